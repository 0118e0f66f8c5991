"""How running requests give their memory back under pressure, and what would have spared them that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request

logger = logging.getLogger(__name__)


class Preemption:
    """Decides between swapping a preempted request out and computing it again, and keeps count.

    `mode`: "swap" and "recompute" always do so, as long as the swap space has room; "auto" does what is quicker for
    that request: its blocks out and in at the measured copy rate, or its tokens at the measured prefill rate.
    """

    def __init__(
        self, manager: KVCacheManager, mode: str = "recompute", measure_copy_rate: Callable[[], float] | None = None
    ) -> None:
        """measure_copy_rate: returns blocks a second, one way; 0: there is no swap space after all. Called once, before
        the first request is swapped out. None: any number of blocks moves at no cost."""
        self.manager, self.mode = manager, mode
        self.num_swapped_out = self.num_recomputed = 0  # preemptions
        self.num_blocks_wanted = 0  # what would have sufficed so far
        self.num_sequences_served = (
            1  # how many sequences at once the pool is certain to serve, as of the last shortage
        )
        self._measure, self._copy_rate = measure_copy_rate, None if measure_copy_rate else float("inf")
        self._prefill_rate: float | None = None  # tokens a second
        self._is_swap_space_short = False

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that computed prompts took that long; later ones weigh more."""
        rate = num_tokens / seconds
        self._prefill_rate = rate if self._prefill_rate is None else 0.8 * self._prefill_rate + 0.2 * rate

    def note_shortage(self, alive: Iterable[Request], max_num_seqs: int) -> None:
        """Somebody must be preempted: note what would have served any `max_num_seqs` sequences of those alive at once.

        That is their worst case, with all their output. Only sequences that a request has yet to divide into are taken
        to share its prompt, so it may be more than is needed.
        """
        sizes = [(self.manager.num_worst_case_blocks(one), one.num_slots) for one in alive]
        largest = sorted(sizes, key=lambda size: size[0] / size[1], reverse=True)  # by blocks for each sequence
        num_blocks = num_sequences = 0
        self.num_sequences_served = max(slots for _, slots in largest)  # each is admitted only if it fits alone
        for blocks, slots in largest:
            if num_sequences >= max_num_seqs:
                break
            num_blocks, num_sequences = num_blocks + blocks, num_sequences + slots
            if num_blocks <= self.manager.num_usable_blocks:
                self.num_sequences_served = num_sequences
        self.num_blocks_wanted = max(self.num_blocks_wanted, num_blocks)

    def release(self, sequences: Sequence[Request], *, keep: bool = True) -> bool:
        """Take the blocks of a request's sequences; returns whether they were swapped out, which `keep` allows."""
        num_out, num_in, num_tokens = self.manager.swap_cost(sequences)
        if keep and num_in and self._prefers_swap(num_out + num_in, num_tokens):
            if self.manager.swap_out(sequences):
                self.num_swapped_out += 1
                return True
            if not self._is_swap_space_short:
                self._is_swap_space_short = True
                pool = self.manager.host_pool
                logger.warning(
                    "the swap space is too small: %d of its %d blocks are in use and a preempted request needs %d, so "
                    "it is computed again; raise swap_space (said once)",
                    pool.num_used_blocks,
                    pool.num_blocks,
                    num_out,
                )
        for sequence in sequences:
            self.manager.free(sequence)
        self.num_recomputed += 1
        return False

    def _prefers_swap(self, num_moves: int, num_tokens: int) -> bool:
        if self.mode == "recompute" or not self.manager.host_pool.num_blocks:
            return False
        if self._copy_rate is None:
            assert self._measure is not None
            self._copy_rate = self._measure()
        if self.mode == "swap" or self._prefill_rate is None or not self._copy_rate:
            return self._copy_rate > 0
        return num_moves / self._copy_rate < num_tokens / self._prefill_rate

    @property
    def num_preemptions(self) -> int:
        """How many requests were preempted so far."""
        return self.num_swapped_out + self.num_recomputed

    def advice(self) -> str:
        """What happened so far, and what would have sufficed."""
        return (
            f"{self.num_preemptions} requests were preempted so far ({self.num_swapped_out} "
            f"swapped out, {self.num_recomputed} to be computed again): the KV cache has "
            f"{self.manager.num_usable_blocks} blocks of {self.manager.block_size} tokens, "
            f"{self.num_blocks_wanted} would have sufficed. Set num_blocks={self.num_blocks_wanted + 1}, or raise "
            f"gpu_memory_utilization, or lower max_num_seqs to {self.num_sequences_served}, or add GPUs"
        )
