"""Whole blocks from cache to cache, bit for bit: `copy_blocks` on a GPU, `swap_blocks` between it and its host.

As the reference says, but that no block of `copy_blocks` may be both source and destination: KVCacheManager plans none,
and so nothing need be kept aside.

One launch moves the pairs of all layers, whose addresses lie in a table on the device: with a launch or a copy for each
of the 64 or more tensors, the host would take longer than the copying. The host's side of a swap is read and written
by the kernel too, through the unified addresses of pinned memory: after a while in use, a pool hands out few blocks in
a row, and a hundred scattered ones of 64 tensors would be 6,400 copies. Nothing waits for the device. Both run outside
of graphs.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import reference
from ops.triton.variants import Variant

TILE_BYTES = 1 << 14  # of a program: 64 for each of its 256 threads, 16 at once
NUM_WARPS = 8
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by their bytes


def copy_blocks(caches: list[Tensor], src_dst: Tensor) -> None:
    """See ops.reference.copy_blocks; src_dst is on the caches' device."""
    if caches and len(src_dst):
        _move(caches, caches, src_dst)


def swap_blocks(src: list[Tensor], dst: list[Tensor], src_dst: Tensor) -> None:
    """See ops.reference.swap_blocks, which does the work where host memory is not pinned: no kernel reaches it then."""
    devices = {tensor.device for tensor in (*src, *dst) if tensor.device.type != "cpu"} or {src_dst.device}
    if not all(tensor.device in devices or tensor.is_pinned() for tensor in (*src, *dst)):
        reference.swap_blocks(src, dst, src_dst)
    elif src and len(src_dst):
        _check_range(src, dst, src_dst)
        _move(src, dst, _upload(src_dst, *devices))


def _check_range(src: list[Tensor], dst: list[Tensor], src_dst: Tensor) -> None:
    lowest, highest = (ids.tolist() for ids in src_dst.aminmax(dim=0))
    for low, high, caches in zip(lowest, highest, (src, dst), strict=True):
        fewest = min(len(cache) for cache in caches)
        if low < 0 or high >= fewest:
            raise RuntimeError(f"blocks {low} to {high} are out of range: a cache has {fewest}")


def _move(src: list[Tensor], dst: list[Tensor], src_dst: Tensor) -> None:
    rows = []
    for source, target in zip(src, dst, strict=True):
        assert source.is_contiguous() and target.is_contiguous(), (source.stride(), target.stride())  # noqa: PT018
        size = source.nbytes // len(source)
        assert size == target.nbytes // len(target), f"{list(source.shape)} to {list(target.shape)}"
        rows.append((source.data_ptr(), target.data_ptr(), size))
    table, aligned = _table(tuple(rows), src_dst.device)
    chunks = triton.cdiv(max(size for *_, size in rows), TILE_BYTES)
    _move_kernel[(len(src_dst), chunks, len(rows))](
        table, src_dst.contiguous(), **_constants(aligned), num_warps=NUM_WARPS
    )


def _constants(aligned: int) -> dict[str, Any]:
    """Of the kernel, for addresses and sizes that are divisible by `aligned` bytes: two int64 make 16."""
    word = min(aligned, 8)
    return {"WORD": WORDS[word], "ALIGNED": aligned, "PER_LOAD": aligned // word, "TILE": TILE_BYTES // word}


# Holds what an engine asks for: copies, swaps out and in. A table says nothing but its own key, so none is ever stale.
@functools.lru_cache(maxsize=16)
def _table(rows: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, int]:
    """(source, destination, bytes of a block) of each cache as a tensor on the device, with words in place of bytes;
    and the largest power of two up to 16 that divides all of them."""
    aligned = next(bytes_ for bytes_ in (16, 8, 4, 2, 1) if not any(number % bytes_ for row in rows for number in row))
    words = [(source, target, size // min(aligned, 8)) for source, target, size in rows]
    return _upload(torch.tensor(words, dtype=torch.int64), device), aligned


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for it: torch keeps the pinned copy until it has been read."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@triton.jit
def _move_kernel(
    table: tl.tensor,
    src_dst: tl.tensor,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER_LOAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A pair of blocks, a part of them, a cache: program by program."""
    pair = src_dst + 2 * tl.program_id(0).to(tl.int64)
    row = table + 3 * tl.program_id(2)
    # What lies in memory tells the compiler nothing of its divisibility, which 16-byte loads need.
    words = tl.multiple_of(tl.load(row + 2), PER_LOAD)
    source = tl.cast(tl.load(row), tl.pointer_type(WORD)) + tl.load(pair).to(tl.int64) * words
    target = tl.cast(tl.load(row + 1), tl.pointer_type(WORD)) + tl.load(pair + 1).to(tl.int64) * words
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(tl.multiple_of(source, ALIGNED) + cols, mask=cols < words, other=0)
    tl.store(tl.multiple_of(target, ALIGNED) + cols, x, mask=cols < words)


def _variant(name: str, aligned: int) -> Variant:
    signature = dict.fromkeys(_move_kernel.arg_names, "constexpr") | {"table": "*i64", "src_dst": "*i64"}
    return Variant(
        name, _move_kernel, signature, _constants(aligned), frozenset({"table", "src_dst"}), num_warps=NUM_WARPS
    )


COMPILED = [_variant("move_blocks by 16 bytes", 16), _variant("move_blocks by 2 bytes", 2)]
"""Blocks of any usual model, and of one with odd sizes."""
