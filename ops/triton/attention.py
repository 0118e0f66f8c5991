"""paged_attention in Triton: decode batches (attention_decode.py) and all others (attention_varlen.py).

As the reference says, but for float32, bfloat16 and float16 only, and heads of at most 256 dimensions. The caches may
be of another dtype than the queries: both are then made float32. float32 is multiplied exactly, without tensor cores.
Nothing is read on the host, and all sizes follow from shapes: every call can be captured.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ops.triton import attention_decode, attention_varlen
from ops.triton.attention_decode import MERGE, attend_decode, attend_part, merge_parts
from ops.triton.attention_tile import NO_WINDOW, sizes_of_heads
from ops.triton.attention_varlen import attend_queries, attend_varlen
from ops.triton.variants import Variant


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See ops.reference.paged_attention."""
    assert k_cache.is_contiguous(), "the kernels take the caches' strides from their shapes"
    assert v_cache.is_contiguous(), "the kernels take the caches' strides from their shapes"
    assert q.shape[1] % k_cache.shape[2] == 0, f"{q.shape[1]} query heads do not share {k_cache.shape[2]} kv heads"
    assert q.shape[2] == k_cache.shape[3], f"queries have {q.shape[2]} dimensions, keys {k_cache.shape[3]}"
    if block_table.stride(1) != 1:  # columns of a wider table stay where they are, anything else is copied
        block_table = block_table.contiguous()
    seq_lens, sinks = seq_lens.contiguous(), None if sinks is None else sinks.contiguous()
    options = (scale, min(window or NO_WINDOW, NO_WINDOW), softcap, sinks)
    if q.shape[0] == block_table.shape[0]:
        return attend_decode(q, k_cache, v_cache, block_table, seq_lens, *options)
    return attend_varlen(q, k_cache, v_cache, block_table, seq_lens, query_start_loc.contiguous(), *options)


def _variant(
    name: str,
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    launch: dict[str, int],
    archs: tuple[int, ...] = (80, 90, 100),
) -> Variant:
    """A kernel as it is launched on contiguous queries and int32 tables; launch: its tile, warps and stages."""
    constants = {key: value for key, value in (constants | launch).items() if key in kernel.arg_names}
    types = dict.fromkeys(("q", "k_cache", "v_cache", "sinks", "out"), f"*{dtype}")
    types |= dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32")
    types |= dict.fromkeys(("part_out", "part_logsum"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    pointers = frozenset(arg for arg, kind in signature.items() if kind.startswith("*"))
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=constants,
        aligned=pointers | ({"q_stride_h"} & signature.keys()),
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
        archs=archs,
    )


def _variants(
    dtype: str, dim: int, heads: int, group: int, *, softcap: bool = False, sinks: bool = False
) -> list[Variant]:
    """The kernels of one 16-bit model with blocks of 16 tokens."""
    constants: dict[str, Any] = {"HAS_SOFTCAP": softcap, "q_stride_d": 1} | ({} if sinks else {"sinks": None})
    constants |= sizes_of_heads(16, heads, group, dim, dim)
    name = f"{dtype} D{dim} G{group}" + " softcap" * softcap + " sinks" * sinks
    decode = attention_decode.launch(dim, dim, group, 2)
    small, large = (attention_varlen.launch(dim, dim, group, 2, large) for large in (False, True))
    return [
        _variant(f"decode {name}", attend_part, dtype, constants, decode),
        _variant(f"merge {name}", merge_parts, dtype, constants, decode | MERGE),
        _variant(f"varlen {name}", attend_queries, dtype, constants, large, archs=(90, 100)),
        _variant(f"varlen small {name}", attend_queries, dtype, constants, small, archs=(80,)),
    ]


COMPILED = [
    *_variants("bf16", 128, 8, 4),  # Llama, Qwen
    *_variants("bf16", 64, 3, 3),  # SmolLM2
    *_variants("bf16", 256, 4, 2, softcap=True),  # Gemma 2
    *_variants("bf16", 64, 8, 8, sinks=True)[:1],  # GPT-OSS; of this and the others only decode: it takes time
    *_variants("fp16", 128, 4, 8)[:1],
    *_variants("bf16", 96, 32, 1)[:1],
]
