"""Host memory for the blocks of preempted requests, and how many blocks of it there may be."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from graphs.kv_cache import KVCache, free_host_memory
from ops.providers import Choice

logger = logging.getLogger(__name__)

# Copied each way to measure the rate: some milliseconds, and on most CPUs both sides are more than the cache holds.
MEASURED_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}


class SwapSpace:
    """One host tensor for each of a KV cache's, [num_blocks, block_size, kv heads, head dim], pinned if it is on a GPU.

    Which host block holds what is the caller's business. The memory is taken by the first `reserve`, uninitialised, so
    an engine that never preempts pays nothing. Whoever plans a swap asks `reserve` first: where it is False, there is
    no space and never will be, and `swap_out` raises RuntimeError.

    Copies are queued on the device's current stream, in order with the forwards before and after them.
    """

    def __init__(self, cache: KVCache, num_blocks: int, swap: Choice) -> None:
        """num_blocks: of the host, all of them usable; 0 for no space at all. swap: provider of the op swap_blocks."""
        self.num_blocks = num_blocks
        self._cache, self._swap = cache, swap.overload
        self._device = cache.tensors[0].device
        self._host: list[Tensor] | None = None
        self._tried = num_blocks == 0
        self._written = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole space once it is taken."""
        return self.num_blocks * self._cache.bytes_per_block

    def reserve(self) -> bool:
        """Take the memory if that has not been tried yet; whether the space is there.

        Side effects: at most one allocation (page-locking it for a GPU takes about a second for some GiB), and a
        warning if it fails. It fails as well if less is free: Linux would promise the memory and kill the process
        when it is written.
        """
        if not self._tried:
            self._tried = True
            try:
                self._host = self._allocate()
            except (MemoryError, RuntimeError) as error:  # RuntimeError: torch's own, for host and pinned memory alike
                warnings.warn(
                    f"preempted requests are recomputed, not swapped out: no {_gib(self.nbytes)} of host memory for "
                    f"their blocks ({error}); lower swap_space",
                    stacklevel=2,
                )
        return self._host is not None

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host. Raises RuntimeError if there is no space."""
        if not self.reserve():
            raise RuntimeError("there is no swap space: plan no swap where reserve() is False")
        assert self._host is not None
        self._written = True
        self._swap(self._cache.tensors, self._host, _as_tensor(pairs))

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs to the device. The host blocks stay as they are."""
        assert self._host is not None, "nothing has been swapped out"
        self._swap(self._host, self._cache.tensors, _as_tensor(pairs))

    def measure_copy_rate(self) -> float:
        """Copy some blocks out and back into their places, and return the bytes that moved per second.

        Both directions count, so b bytes take 2 * b / rate seconds to go out and come in. The KV cache keeps its
        contents; host blocks are overwritten, so this comes after `reserve` and before the first `swap_out`. Waits
        for the device.
        """
        assert self._host is not None, "reserve() first"
        assert not self._written, "host blocks may be in use"
        per_block = self._cache.bytes_per_block
        count = max(1, MEASURED_BYTES[self._device.type] // per_block)
        count = min(count, self.num_blocks, self._cache.num_blocks)
        pairs = _as_tensor([(block, block) for block in range(count)])
        rounds = []
        for _ in range(3):  # the quickest counts: the first touches fresh pages, and another process may disturb one
            self._synchronize()
            start = time.perf_counter()
            self._swap(self._cache.tensors, self._host, pairs)
            self._swap(self._host, self._cache.tensors, pairs)
            self._synchronize()
            rounds.append(time.perf_counter() - start)
        return 2 * count * per_block / min(rounds)

    def _allocate(self) -> list[Tensor]:
        if (free := free_host_memory()) < self.nbytes:
            raise MemoryError(f"{_gib(free)} is free")
        tensors = self._cache.tensors
        sizes = [self.num_blocks * tensor[0].numel() for tensor in tensors]
        # One buffer in pieces: torch rounds each pinned allocation up to a power of two.
        buffer = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=self._device.type == "cuda")
        pieces = buffer.split(sizes)
        return [piece.view(-1, *tensor.shape[1:]) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def num_swap_blocks(requested_bytes: int, bytes_per_block: int, device: torch.device, pool_bytes: int = 0) -> int:
    """Number of host blocks for a KV cache on `device`: those asked for, in at most half of the host's free memory.

    The other half is for the forward's intermediate values and for other processes. pool_bytes: size of the KV cache,
    whose pages count as free until they are written, if it is on the CPU. For a GPU the memory is pinned, and torch
    rounds a pinned allocation up to a power of two bytes: that too has to fit. Logs a cap at info level.
    """
    if device.type == "cpu":
        share = max(0, free_host_memory() - pool_bytes) // 2
        allowed = min(requested_bytes, share)
    else:
        share = free_host_memory() // 2
        rounded = 1 << max(0, requested_bytes - 1).bit_length()
        allowed = requested_bytes if rounded <= share else min(requested_bytes, 1 << share.bit_length() >> 1)
    if allowed < requested_bytes:
        logger.info("swap_space=%s is capped to %s: half of what is free", _gib(requested_bytes), _gib(allowed))
    return allowed // bytes_per_block


def _as_tensor(pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
