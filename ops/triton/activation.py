"""Gated activations of a merged gate and up projection: `silu_and_mul` and `gelu_and_mul`.

As the reference says, but for float32, bfloat16 and float16 only. A program takes a part of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.norm import as_rows
from ops.triton.variants import Variant

TILE = 1024  # columns of a program: 8 of gate and 8 of up, 16 bytes of bfloat16 each, for each of its 128 threads


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ops.reference.silu_and_mul."""
    return _activate(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """See ops.reference.gelu_and_mul."""
    return _activate(gate_up, "tanh" if tanh else "erf")


def _activate(gate_up: Tensor, kind: str) -> Tensor:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up has {gate_up.shape[-1]} columns, which is odd"
    n = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        rows = as_rows(gate_up)
        outer, inner, _ = rows.shape
        block = min(TILE, triton.next_power_of_2(n))
        _activation_kernel[(outer * inner, triton.cdiv(n, block))](
            *(rows, out, inner, *rows.stride()), N=n, KIND=kind, BLOCK=block, num_warps=max(1, block // 256)
        )
    return out


# Not specialised for what may depend on the batch: a kernel compiled for it could come too late.
@triton.jit(do_not_specialize=["inner"])
def _activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    stride_outer: tl.tensor,
    stride_inner: tl.tensor,
    stride_col: tl.tensor,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = gate_up + (row // inner) * stride_outer + (row % inner) * stride_inner + cols * stride_col
    gate = tl.load(source, mask=cols < N, other=0).to(tl.float32)
    up = tl.load(source + N * stride_col, mask=cols < N, other=0).to(tl.float32)
    if KIND == "silu":
        activated = gate / (1 + tl.exp(-gate))
    elif KIND == "tanh":
        # (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y)), which does not cancel; 2 sqrt(2 / pi) = 1.5957691216057308
        activated = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        activated = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * N + cols, (activated * up).to(out.dtype.element_ty), mask=cols < N)


def _variant(n: int, kind: str) -> Variant:
    types = {"gate_up": "*bf16", "out": "*bf16"} | dict.fromkeys(("inner", "stride_outer", "stride_inner"), "i32")
    signature = {name: types.get(name, "constexpr") for name in _activation_kernel.arg_names}
    constexprs = {"stride_col": 1, "N": n, "KIND": kind, "BLOCK": TILE}
    aligned = frozenset({"gate_up", "out", "stride_outer", "stride_inner"})
    return Variant(
        f"{kind}_and_mul bf16 {n}", _activation_kernel, signature, constexprs, aligned, num_warps=TILE // 256
    )


COMPILED = [_variant(14336, "silu"), _variant(1536, "silu"), _variant(14336, "tanh"), _variant(14336, "erf")]
"""Intermediate sizes of Llama-3-8B and SmolLM2."""
