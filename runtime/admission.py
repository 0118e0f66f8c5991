"""Which waiting requests are let in, and which could never be, however long they waited."""

from __future__ import annotations

from runtime import beams
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request, RequestStatus


class Admission:
    """Gives waiting requests their first blocks; counts what the prefix cache had of their tokens.

    A preempted request finds its own blocks again: that says nothing about how well prompts share, so it is counted
    apart (`resumed_…`), and what was swapped out is not counted at all.
    """

    def __init__(self, manager: KVCacheManager, *, max_num_batched_tokens: int, enable_chunked: bool) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked = enable_chunked
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.resumed_cache_queries = self.resumed_cache_hits = 0

    def admit(self, request: Request, budget: int) -> bool:
        """Take the blocks of a waiting request, all of its beams if they were swapped out, and mark it as running.

        False if it must wait: then nothing has changed. budget: tokens that this step may still run.
        """
        sequences = beams.resumable(request, self.manager)
        if len(sequences) > budget:
            return False
        taken: dict[Request, int] = {}
        for sequence in sequences:
            num_hit_tokens = self._take_blocks(sequence, budget)
            if num_hit_tokens is None:
                for other in taken:
                    self.manager.retract(other)
                return False
            taken[sequence] = num_hit_tokens
        self._count_hits(request, taken[request])
        for sequence, num_hit_tokens in taken.items():
            sequence.num_computed_tokens = num_hit_tokens
            sequence.status = RequestStatus.RUNNING
        return True

    def _take_blocks(self, request: Request, budget: int) -> int | None:
        """Allocate a waiting sequence's blocks; returns how many of its tokens need not run, or None if it must wait.

        Blocks for the whole prompt, even if only a chunk of it runs now: two prompts that each fill most of the pool
        would otherwise both be admitted and preempt each other in the middle, over and over.
        """
        goal = request.num_goal_tokens
        hits, num_hit_tokens = self.manager.get_computed_blocks(request, goal)
        inside = num_hit_tokens % self.manager.block_size
        # A hit that ends inside a block needs one block more until it is copied; where that is missing, whole blocks.
        for blocks, num_tokens in ((hits, num_hit_tokens), (hits[:-1], num_hit_tokens - inside))[: 2 if inside else 1]:
            if not self._may_run(goal - num_tokens, budget):
                return None
            if self.manager.allocate_slots(request, goal, blocks, num_tokens) is not None:
                return num_tokens
        return None

    def _may_run(self, remaining: int, budget: int) -> bool:
        """Whether a sequence with that many tokens to compute may begin within the budget."""
        # Only a preempted request's prompt and output can exceed a whole budget: it is cut even without chunking,
        # since it could never run otherwise.
        return budget > 0 and (self.enable_chunked or not budget < remaining <= self.max_num_batched_tokens)

    def _count_hits(self, request: Request, num_hit_tokens: int) -> None:
        queried = request.num_goal_tokens if self.manager.enable_prefix_caching else 0
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_hit_tokens
            self.prefix_cache_queries += queried
            self.prefix_cache_hits += num_hit_tokens
        elif not self.manager.is_swapped(request):
            self.resumed_cache_queries += queried
            self.resumed_cache_hits += num_hit_tokens


def check_admissible(
    request: Request,
    manager: KVCacheManager,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    enable_chunked_prefill: bool,
) -> None:
    """Raise ValueError, with the number that would do, for a request that can never be scheduled whole."""
    name, length = f"request {request.request_id!r}", request.num_prompt_tokens
    needed = manager.num_blocks_for(length + 1)
    if length >= max_model_len:
        raise ValueError(
            f"{name}: a prompt of {length} tokens leaves no room for output within max_model_len={max_model_len}: at "
            f"most {max_model_len - 1} are supported; raise max_model_len"
        )
    if needed > manager.num_usable_blocks:
        raise ValueError(
            f"{name} can never fit: a prompt of {length} tokens and one more take {needed} blocks of "
            f"{manager.block_size}, the pool offers {manager.num_usable_blocks}: raise num_blocks to at least "
            f"{needed + 1} or give the KV cache more memory"
        )
    if request.params.n > max_num_seqs:
        raise ValueError(
            f"{name}: n={request.params.n} completions are more than max_num_seqs={max_num_seqs} requests that may run "
            "at once: lower n or raise max_num_seqs"
        )
    if request.search is not None:
        _check_beams(request, manager, min(max_num_seqs, max_num_batched_tokens))
    if not enable_chunked_prefill and length > max_num_batched_tokens:
        raise ValueError(
            f"{name}: a prompt of {length} tokens exceeds max_num_batched_tokens={max_num_batched_tokens} and chunked "
            "prefill is off: raise max_num_batched_tokens or set enable_chunked_prefill=True"
        )


def _check_beams(request: Request, manager: KVCacheManager, most: int) -> None:
    assert request.search is not None
    name, width = f"request {request.request_id!r}", request.search.params.beam_width
    if width > most:
        raise ValueError(
            f"{name}: beam_width={width} sequences are more than may run in one step, {most}: lower beam_width or "
            "raise max_num_seqs and max_num_batched_tokens"
        )
    needed = manager.num_worst_case_blocks(request)
    if needed > manager.num_usable_blocks:
        raise ValueError(
            f"{name}: {width} beams of up to {request.num_prompt_tokens + request.max_output_tokens} tokens can take "
            f"{needed} blocks of {manager.block_size}, the pool offers {manager.num_usable_blocks}: raise num_blocks "
            f"to at least {needed + 1}, or lower beam_width or max_tokens"
        )
