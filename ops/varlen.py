"""The provider `varlen` of paged_attention: torch's own varlen_attn. Only when asked for, to compare with.

Where FlashAttention 3 is installed and active (`torch.nn.attention.activate_flash_attention_impl("FA3")`) and torch is
2.12 or newer it reads the pages in place. Otherwise the sequences' pages are first gathered into packed keys and
values, room for full tables being taken: that is slow, and part of what a benchmark of it measures.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.providers import Provider, register
from ops.schema import define

DTYPES = frozenset({torch.bfloat16, torch.float16})
NEEDED = ("scale", "window_size")  # of varlen_attn's parameters; 2.11 has both


def register_varlen_provider() -> None:
    """Define and register the provider `varlen` of paged_attention, on CUDA."""
    define("paged_attention", "varlen", CUDA=paged_attention)
    provider = Provider(devices=frozenset({"cuda"}), priority=-1, dtypes=DTYPES, prepare=problem)
    register("paged_attention", "varlen", provider)


def problem() -> str | None:
    """Why this torch's varlen_attn does not do, or None."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if missing := [name for name in NEEDED if name not in _parameters(_varlen_attn())]:
        return f"varlen_attn of torch {torch.__version__} has no {' and no '.join(missing)}"
    return None


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
    """See ops.reference.paged_attention. Raises ValueError for what varlen_attn cannot do, naming it."""
    if (feature := _unsupported(q, k_cache, v_cache, softcap, sinks)) is not None:
        raise ValueError(f"provider 'varlen' of paged_attention does not support {feature}")
    tokens, batch = q.shape[0], block_table.shape[0]
    varlen_attn = _varlen_attn()
    parameters, lengths = _parameters(varlen_attn), seq_lens.to(torch.int32)
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1, 0) if window else (-1, 0)}
    if "enable_gqa" in parameters:  # before, FlashAttention shared kv heads unasked
        options["enable_gqa"] = q.shape[1] != k_cache.shape[2]
    if "block_table" in parameters and _flash_attention_3():
        options |= {"seqused_k": lengths, "block_table": block_table.to(torch.int32)}
        k, v, k_starts = k_cache, v_cache, None
    else:
        k_starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        slots = _packed_slots(block_table, k_starts, k_cache.shape[1])
        k, v = (cache.flatten(0, 1).index_select(0, slots) for cache in (k_cache, v_cache))
    # Bounds from shapes: no length is read on the host.
    longest = 1 if tokens == batch else tokens
    starts, capacity = query_start_loc.to(torch.int32), block_table.shape[1] * k_cache.shape[1]
    out: Tensor = varlen_attn(q, k, v, starts, k_starts, longest, capacity, **options)
    padding = torch.arange(tokens, device=q.device) >= starts[-1]
    return out.masked_fill(padding[:, None, None], 0).contiguous()


def _unsupported(q: Tensor, k_cache: Tensor, v_cache: Tensor, softcap: float, sinks: Tensor | None) -> str | None:
    """What is asked for that varlen_attn cannot do, or None."""
    dk, dv = k_cache.shape[3], v_cache.shape[3]
    if softcap:
        return f"a softcap ({softcap})"
    if sinks is not None:
        return "sinks"
    if dk != dv:
        return f"keys of {dk} dimensions with values of {dv}"
    if dk % 8 or dk > 256:
        return f"heads of {dk} dimensions: multiples of 8 up to 256"
    if q.dtype not in DTYPES or {k_cache.dtype, v_cache.dtype} != {q.dtype}:
        return f"queries of {q.dtype} with a cache of {k_cache.dtype}: both must be bfloat16 or both float16"
    return None


def _packed_slots(block_table: Tensor, starts: Tensor, block_size: int) -> Tensor:
    """The slots of all sequences' tokens, one sequence after the other, and as many 0 as fill B full tables.

    block_table: [B, W]; starts: [B + 1] where each sequence begins in the result. Returns [B * W * block_size] int64.
    """
    batch, width = block_table.shape
    index = torch.arange(batch * width * block_size, device=starts.device, dtype=torch.int32)
    rows = torch.searchsorted(starts[1:], index, right=True)
    inside = rows < batch
    rows = rows.clamp(max=batch - 1)
    positions = torch.where(inside, index - starts[rows], 0)
    blocks = block_table[rows, positions // block_size].to(torch.int64)
    return torch.where(inside, blocks * block_size + positions % block_size, 0)


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention import varlen

    return varlen.varlen_attn


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _flash_attention_3() -> bool:
    """Whether it is active: FlashAttention 2, which torch brings along, refuses tables."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() == "FA3"
