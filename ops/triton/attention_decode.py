"""Attention of one query a sequence: split over the keys, with a second kernel that merges the parts.

Legend: B sequences, S parts at most, Hq query heads, Hk kv heads, G = Hq / Hk.

The G query heads of a kv head are the rows of one tensor-core tile, so that K and V are read once. How many parts there
may be follows from shapes alone; how many keys each has, a program finds from its sequence's length in device memory.
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

PROGRAMS = 264  # two on each of an H200's 132 processors, all of them at once
LONG_PART = tl.constexpr(4096)  # keys of a part that are worth a program even when all processors have work
MOST_LONG_PARTS = 8  # bounds the programs that find nothing to do where the table is wide and the sequences short
PARTS_MERGED = tl.constexpr(16)  # at a time
MERGE = {"num_warps": 4, "num_stages": 2}  # of `merge_parts`


def parts(batch: int, heads: int, capacity: int, tile: int) -> tuple[int, int]:
    """Into how many parts a sequence is cut: usually, and at most if that leaves more than LONG_PART keys in one.

    Args:
        batch, heads: B and Hk. capacity: of the sequence's table, or its window if that is shorter. tile: keys of one
            step, the smallest part.
    """
    usual = max(1, PROGRAMS // max(1, batch * heads))
    most = max(usual, min(MOST_LONG_PARTS, triton.cdiv(capacity, LONG_PART.value)))
    tiles = triton.cdiv(capacity, tile)
    return min(usual, tiles), min(most, tiles)


@triton.jit
def cut(length: tl.tensor, window: tl.tensor, usual: tl.tensor, most: tl.tensor, TILE: tl.constexpr) -> tl.tuple:
    """How a sequence is cut: its first visible key, the tile of that key, the tiles of a part, and the parts."""
    first = tl.maximum(length - window, 0)
    first_tile = first // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    share = tl.maximum(tl.cdiv(tiles, most), tl.minimum(tl.cdiv(tiles, usual), LONG_PART // TILE))
    return first, first_tile, share, tl.cdiv(tiles, share)


@triton.jit(do_not_specialize=["q_stride_b", "table_stride", "window", "usual"])
def attend_part(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    part_out: tl.tensor,
    part_logsum: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    usual: tl.tensor,
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
    """One part of one sequence for one kv head; grid (Hk, S, B), so that neighbours in memory are read at once.

    The only part of a sequence goes to `out` [B, Hq, Dv], several to part_out [B, Hq, S, Dv], with the logarithm (to
    base 2) of their sums in part_logsum [B, Hq, S].
    """
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    most = tl.num_programs(1)
    length = tl.load(seq_lens + row).to(tl.int32)
    first, first_tile, share, count = cut(length, window, usual, most, TILE)
    if part >= count:
        return
    start = first_tile + part * share
    end = tl.minimum(start + share, tl.cdiv(length, TILE))

    group = tl.arange(0, ROWS)
    heads = head * GROUP + group
    valid = group < GROUP
    queries = load_queries(
        q, row + tl.zeros_like(group), heads, valid, q_stride_b, q_stride_h, q_stride_d, k_cache, DK, DK_PADDED
    )
    peak, total = start_softmax(sinks, heads, valid, part == 0)
    acc = tl.zeros([ROWS, DV_PADDED], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    # Each step loads the blocks of the next one, so that its loads of K and V wait for no other load.
    keys = start * TILE + tl.arange(0, TILE)
    blocks = find_blocks(table, keys, (keys >= first) & (keys < length), BLOCK_SIZE)
    for tile in range(start, end):
        keys = tile * TILE + tl.arange(0, TILE)
        seen = (keys >= first) & (keys < length)
        slots = blocks * BLOCK_SIZE + keys % BLOCK_SIZE
        blocks = find_blocks(table, keys + TILE, keys + TILE < length, BLOCK_SIZE)
        peak, total, acc = attend_tile(
            peak,
            total,
            acc,
            queries,
            slots,
            seen,
            seen[None, :],
            k_cache + head * DK,
            v_cache + head * DV,
            scale,
            softcap,
            HEADS,
            DK,
            DV,
            HAS_SOFTCAP,
            MASKED=True,
        )

    acc = acc / total[:, None]
    outputs = row.to(tl.int64) * (HEADS * GROUP) + heads
    if count == 1:
        store_rows(out, outputs, acc, valid, DV)
    else:
        slots = outputs * most + part
        store_rows(part_out, slots, acc, valid, DV)
        tl.store(part_logsum + slots, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["window", "usual", "most"])
def merge_parts(
    part_out: tl.tensor,
    part_logsum: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    usual: tl.tensor,
    most: tl.tensor,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The parts of one sequence and query head, weighted by their sums; grid (Hq, B). See `attend_part`."""
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + row).to(tl.int32)
    _first, _first_tile, _share, count = cut(length, window, usual, most, TILE)
    if count == 1:
        return
    output = row.to(tl.int64) * tl.num_programs(0) + head
    dims = tl.arange(0, DV_PADDED)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([DV_PADDED], tl.float32)
    for start in range(0, count, PARTS_MERGED):
        index = start + tl.arange(0, PARTS_MERGED)
        slots = output * most + index
        logsum = tl.load(part_logsum + slots, mask=index < count, other=float("-inf"))
        values = tl.load(
            part_out + slots[:, None] * DV + dims[None, :],
            mask=(index < count)[:, None] & (dims < DV)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(logsum, 0))
        weights = tl.exp2(logsum - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(values * weights[:, None], 0)
        peak = new_peak
    tl.store(out + output * DV + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DV)


def launch(dk: int, dv: int, group: int, itemsize: int) -> dict[str, int]:
    """Tile, warps and stages of `attend_part` for a product of that many bytes an element."""
    # float32 goes without tensor cores and holds its operands in registers: more threads, and fewer keys at once.
    wide = itemsize == 4
    tile = min(keys_of_tile(dk, dv, itemsize), 32 if wide else 128)
    return {"ROWS": padded(group), "TILE": tile, "num_warps": 8 if wide else 4, "num_stages": 3}


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """paged_attention of T == B queries; the rows of block_table, seq_lens and sinks contiguous, window never 0."""
    batch, q_heads, dk = q.shape
    _, block_size, heads, dv = v_cache.shape
    group = q_heads // heads
    options = launch(dk, dv, group, torch.promote_types(q.dtype, k_cache.dtype).itemsize)
    tile = options["TILE"]
    usual, most = parts(batch, heads, min(block_table.shape[1] * block_size, window + tile), tile)
    out = torch.empty(batch, q_heads, dv, dtype=q.dtype, device=q.device)
    part_out = torch.empty(batch, q_heads, most, dv, dtype=torch.float32, device=q.device)
    part_logsum = torch.empty(batch, q_heads, most, dtype=torch.float32, device=q.device)
    attend_part[(heads, most, batch)](
        *(q, k_cache, v_cache, block_table, seq_lens, sinks, out, part_out, part_logsum),
        *(*q.stride(), block_table.stride(0)),
        *(*score_factors(scale, softcap), window, usual),
        **sizes_of_heads(block_size, heads, group, dk, dv),
        HAS_SOFTCAP=softcap != 0,
        **options,
    )
    if most > 1:
        merge_parts[(q_heads, batch)](
            *(part_out, part_logsum, seq_lens, out, window, usual, most),
            DV=dv,
            DV_PADDED=padded(dv),
            TILE=tile,
            **MERGE,
        )
    return out
