"""Attention of packed sequences with any number of queries: prefill, chunks of it, and mixed batches.

Legend: T tokens, B sequences, Hq query heads, Hk kv heads, G = Hq / Hk.

A tile holds the G query heads of consecutive tokens of one sequence, so that K and V are read once for all of them.
The grid follows from T and B alone; each program finds its tile through query_start_loc in device memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.attention_tile import (
    attend_tile,
    find_blocks,
    keys_of_tile,
    load_queries,
    padded,
    score_factors,
    sizes_of_heads,
    start_softmax,
    store_rows,
)

STARTS = tl.constexpr(256)  # of query_start_loc that are looked through at once


@triton.jit
def find_sequence(query_start_loc: tl.tensor, index: tl.tensor, batch: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """The sequence that tile `index` belongs to; `batch` for the tokens after the last one.

    The tiles of sequence b begin at query_start_loc[b] // TOKENS + b: that leaves at least as many up to those of the
    next one as it needs, and rises with b, so the answer is how many begin at `index` or before, less one.
    """
    begun = 0
    for start in range(0, batch + 1, STARTS):
        rows = start + tl.arange(0, STARTS)
        first = tl.load(query_start_loc + rows, mask=rows <= batch, other=0).to(tl.int32) // TOKENS + rows
        begun += tl.sum(((rows <= batch) & (first <= index)).to(tl.int32), 0)
    return begun - 1


@triton.jit(do_not_specialize=["tokens", "batch", "q_stride_t", "table_stride", "window"])
def attend_queries(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    batch: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    """One tile of queries for one kv head; grid (Hk, T // TOKENS + B + 1). Row r is head r % G of token r // G.

    Programs start in order, and the last tiles of a prompt have most keys to see: they come first.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    head, index = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row = find_sequence(query_start_loc, index, batch, TOKENS)
    sequence_start = tl.load(query_start_loc + row).to(tl.int32)
    sequence_end = tl.load(query_start_loc + row + 1, mask=row < batch, other=tokens).to(tl.int32)
    start = sequence_start + (index - (sequence_start // TOKENS + row)) * TOKENS
    end = tl.minimum(start + TOKENS, sequence_end)
    if start >= end:
        return

    rows = tl.arange(0, ROWS)
    token = start + rows // GROUP
    heads = head * GROUP + rows % GROUP
    valid = token < end  # TOKENS * GROUP may be less than ROWS: the rows after those belong to the next tile
    outputs = token.to(tl.int64) * (HEADS * GROUP) + heads
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    if row == batch:  # padding
        store_rows(out, outputs, acc, valid, DV)
        return

    queries = load_queries(q, token, heads, valid, q_stride_t, q_stride_h, q_stride_d, k_cache, DK, DK_PADDED)
    peak, total = start_softmax(sinks, heads, valid, True)
    k_head, v_head = k_cache + head * DK, v_cache + head * DV
    table = block_table + row.to(tl.int64) * table_stride

    # Positions of the tile's first and last token, and of the first key that the first one sees.
    shift = tl.load(seq_lens + row).to(tl.int32) - sequence_end
    positions = shift + token
    earliest, latest = shift + start, shift + end - 1
    oldest = tl.maximum(earliest - window + 1, 0)
    # Tiles of keys: all are seen by every query from `whole` on, and before `partly`.
    first = oldest // TILE
    whole = tl.cdiv(tl.maximum(latest - window + 1, 0), TILE)
    partly = tl.maximum((earliest + 1) // TILE, whole)

    keys = whole * TILE + tl.arange(0, TILE)
    blocks = find_blocks(table, keys, keys <= latest, BLOCK_SIZE)
    for tile in range(whole, partly):
        keys = tile * TILE + tl.arange(0, TILE)
        slots = blocks * BLOCK_SIZE + keys % BLOCK_SIZE
        blocks = find_blocks(table, keys + TILE, keys + TILE <= latest, BLOCK_SIZE)
        peak, total, acc = attend_tile(
            peak,
            total,
            acc,
            queries,
            slots,
            None,
            None,
            k_head,
            v_head,
            scale,
            softcap,
            HEADS,
            DK,
            DV,
            HAS_SOFTCAP,
            MASKED=False,
        )
    # The others: those before `whole`, where a window begins, and those from `partly` on, where causality ends.
    for step in tl.range(first, whole + latest // TILE + 1 - partly, num_stages=1):
        keys = tl.where(step < whole, step, step - whole + partly) * TILE + tl.arange(0, TILE)
        seen = (keys >= oldest) & (keys <= latest)
        visible = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        blocks = find_blocks(table, keys, seen, BLOCK_SIZE)
        peak, total, acc = attend_tile(
            peak,
            total,
            acc,
            queries,
            blocks * BLOCK_SIZE + keys % BLOCK_SIZE,
            seen,
            visible,
            k_head,
            v_head,
            scale,
            softcap,
            HEADS,
            DK,
            DV,
            HAS_SOFTCAP,
            MASKED=True,
        )
    store_rows(out, outputs, acc / total[:, None], valid, DV)


def launch(dk: int, dv: int, group: int, itemsize: int, large: bool) -> dict[str, int]:
    """Tile, warps and stages for a product of that many bytes an element.

    large: Hopper or its data-centre successor: 128 rows, two warp groups, halve the traffic from the L2 cache. The
    registers of the others, or their 100 KiB of shared memory, do not hold as much.
    """
    tile = min(keys_of_tile(dk, dv, itemsize), 64)
    if itemsize == 4:  # without tensor cores, and operands in registers: see attention_decode
        return {"ROWS": max(32, padded(group)), "TILE": min(tile, 32), "num_warps": 8, "num_stages": 2}
    rows, stages = (128, 3) if large else (64, 3 if max(dk, dv) <= 128 else 2)
    return {"ROWS": max(rows, padded(group)), "TILE": tile, "num_warps": 8, "num_stages": stages}


def attend_varlen(
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
    """paged_attention of any batch; arguments as of `attend_decode`, query_start_loc contiguous too."""
    tokens, q_heads, dk = q.shape
    _, block_size, heads, dv = v_cache.shape
    batch, group = block_table.shape[0], q_heads // heads
    large = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    options = launch(dk, dv, group, torch.promote_types(q.dtype, k_cache.dtype).itemsize, large)
    out = torch.empty(tokens, q_heads, dv, dtype=q.dtype, device=q.device)
    attend_queries[(heads, tokens // (options["ROWS"] // group) + batch + 1)](
        *(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, sinks, out, tokens, batch),
        *(*q.stride(), block_table.stride(0)),
        *(*score_factors(scale, softcap), window),
        **sizes_of_heads(block_size, heads, group, dk, dv),
        HAS_SOFTCAP=softcap != 0,
        **options,
    )
    return out
