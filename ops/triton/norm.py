"""RMS norms: `rms_norm`, and `add_rms_norm` with the residual addition before it.

As the reference says, but for float32, bfloat16 and float16 only.

A program takes one row, or several where rows are short, and reads it once if it has at most MAX_TILE elements. A row's
result does not depend on the other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.variants import Variant

MIN_TILE, MAX_TILE = 1024, 8192  # elements of a program: rows are taken together, and cut in parts


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See ops.reference.rms_norm."""
    return _normalise(x, None, weight, eps, offset)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """See ops.reference.add_rms_norm."""
    assert x.shape == residual.shape, f"x is {list(x.shape)} and the residual {list(residual.shape)}"
    return _normalise(x, residual, weight, eps, offset)


def as_rows(x: Tensor) -> Tensor:
    """[..., D] as [outer, inner, D]: a view, unless there are four dimensions or more of which the first do not merge.

    A slice of a merged projection, [1, T, heads, D], and its transpose are of no one stride over all rows, but of two.
    """
    return x.flatten(0, -3) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The norm, and the sum that was normalised where there is a residual (else x)."""
    d = x.shape[-1]
    assert weight.shape == (d,), f"x is {list(x.shape)} and the weight {list(weight.shape)}"
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if x.numel():
        rows, added = as_rows(x), as_rows(x if residual is None else residual)
        count, inner = rows.shape[0] * rows.shape[1], rows.shape[1]
        sizes = _sizes(d)
        _norm_kernel[(triton.cdiv(count, sizes["ROWS"]),)](
            *(rows, added, weight, normed, total, count, inner, eps, offset),
            *(*rows.stride(), *added.stride(), weight.stride(0)),
            D=d,
            ADD=residual is not None,
            **sizes,
        )
    return normed, total


def _sizes(d: int) -> dict[str, int]:
    """Tile and warps for rows of d elements: 16 a thread, of which 8 of bfloat16 are a load of 16 bytes."""
    block = min(triton.next_power_of_2(d), MAX_TILE)
    rows = max(1, MIN_TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": rows * block // 512}


# Not specialised for what depends on the batch: a kernel compiled for it could come too late.
@triton.jit(do_not_specialize=["count", "inner"])
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    inner: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    x_outer: tl.tensor,  # strides, each named after what it steps over
    x_inner: tl.tensor,
    x_dim: tl.tensor,
    residual_outer: tl.tensor,
    residual_inner: tl.tensor,
    residual_dim: tl.tensor,
    weight_dim: tl.tensor,
    D: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    outer, within = row // inner, row % inner
    x += outer * x_outer + within * x_inner
    residual += outer * residual_outer + within * residual_inner
    there = row < count
    # The first tile of a row stays in registers; most rows have no other.
    first = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    kept = _load(x, residual, total, row, first, there, x_dim, residual_dim, D, ADD, True)
    squares = kept * kept
    for start in range(BLOCK, D, BLOCK):
        part = _load(x, residual, total, row, start + first, there, x_dim, residual_dim, D, ADD, True)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / D + eps)
    _store(kept * scale, weight, normed, row, first, there, offset, weight_dim, D)
    for start in range(BLOCK, D, BLOCK):
        part = _load(x, residual, total, row, start + first, there, x_dim, residual_dim, D, ADD, False)
        _store(part * scale, weight, normed, row, start + first, there, offset, weight_dim, D)


@triton.jit
def _load(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    cols: tl.tensor,
    there: tl.tensor,
    x_dim: tl.tensor,
    residual_dim: tl.tensor,
    D: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
) -> tl.tensor:
    """What is normalised, in float32 and 0 where there is nothing; KEEP: store it too if it is a sum."""
    mask = there & (cols < D)
    value = tl.load(x + cols * x_dim, mask=mask, other=0)
    if ADD:
        added = tl.load(residual + cols * residual_dim, mask=mask, other=0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        if KEEP:
            tl.store(total + row * D + cols, value, mask=mask)
    return value.to(tl.float32)


@triton.jit
def _store(
    value: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    row: tl.tensor,
    cols: tl.tensor,
    there: tl.tensor,
    offset: tl.tensor,
    weight_dim: tl.tensor,
    D: tl.constexpr,
) -> None:
    mask = there & (cols < D)
    # For every row anew, from the nearest cache: one alone would be loaded 2 bytes a thread and dealt out.
    scale = tl.load(weight + row * 0 + cols * weight_dim, mask=mask, other=0).to(tl.float32)
    tl.store(normed + row * D + cols, (value * (offset + scale)).to(normed.dtype.element_ty), mask=mask)


def _variant(d: int, *, add: bool) -> Variant:
    pointers = ("x", "residual", "weight", "normed", "total")
    sizes = _sizes(d)
    warps = sizes.pop("num_warps")
    constexprs: dict[str, Any] = {
        **dict.fromkeys(("x_dim", "residual_dim", "weight_dim"), 1),
        "D": d,
        "ADD": add,
        **sizes,
    }
    types = dict.fromkeys(pointers, "*bf16") | {"eps": "fp32", "offset": "fp32"}
    strides = ("x_outer", "x_inner", "residual_outer", "residual_inner")
    types |= dict.fromkeys(("count", "inner", *strides), "i32")
    signature = {name: types.get(name, "constexpr") for name in _norm_kernel.arg_names}
    name = f"{'add_' if add else ''}rms_norm bf16 {d}"
    return Variant(name, _norm_kernel, signature, constexprs, frozenset((*pointers, *strides)), num_warps=warps)


COMPILED = [_variant(d, add=add) for d in (576, 2048, 4096, 16384) for add in (False, True)] + [
    _variant(d, add=False) for d in (64, 128)
]
"""Hidden sizes of SmolLM2, Llama-3.2-1B and Llama-3-8B, one that is cut, and heads of queries and keys (Qwen3)."""
