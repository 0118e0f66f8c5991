"""Continuous batching: which tokens of which requests run in the next step.

One token budget a step and no phases: a request runs the tokens that it has and the cache has not, be they a prompt's
chunk or the one token sampled last. `schedule` and `update` are the only two transitions of a healthy step.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import FinishReason, Request, RequestStatus


@dataclass(slots=True)
class ScheduledRow:
    """Tokens [start, start + num_tokens) of a request; `samples` if they reach its last one."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Schedule:
    """One step: rows to run, `num_tokens` in all; who was preempted for it; who ended because the pool is too small.

    `copies` are (source, destination) block ids to copy before the forward.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, request: Request, num_tokens: int) -> None:
        """Append a row of the next `num_tokens` tokens of `request`."""
        start = request.num_computed_tokens
        self.rows.append(ScheduledRow(request, start, num_tokens, start + num_tokens == request.num_tokens))
        self.num_tokens += num_tokens

    def drop(self, request: Request) -> None:
        """Take the row of `request` out again, if it has one, and give its tokens back."""
        self.rows = [row for row in self.rows if row.request is not request]
        self.num_tokens = sum(row.num_tokens for row in self.rows)


class Scheduler:
    """First come, first served over the blocks of `manager`, with preemption by recomputation.

    `max_num_batched_tokens` is the budget of a step and may be below `max_num_seqs`, which it then caps.
    `long_prefill_token_threshold`, if not 0, caps a request's tokens in a step. Without chunked prefill a prompt runs
    whole or waits. Raises ValueError for a limit out of range.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
            ("long_prefill_token_threshold", long_prefill_token_threshold, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value} is not supported: it must be at least {least}")
        if long_prefill_token_threshold and not enable_chunked_prefill:
            warnings.warn(
                f"long_prefill_token_threshold={long_prefill_token_threshold} is ignored: chunked prefill is off",
                stacklevel=2,
            )
            long_prefill_token_threshold = 0
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_tokens_per_row = long_prefill_token_threshold or max_num_batched_tokens
        self.num_preemptions = 0
        # In tokens, counted at admission. A preempted request finds its own blocks again: that says nothing about how
        # well prompts share, so it is counted apart.
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.resumed_cache_queries = self.resumed_cache_hits = 0
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first or, preempted, their next admission."""
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The live request of that id, or None."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError, and queues nothing, for one that could never run."""
        length, needed = request.num_prompt_tokens, self.manager.num_blocks_for(request.num_prompt_tokens + 1)
        name = f"request {request.request_id!r}"
        if request.request_id in self._requests:
            raise ValueError(f"{name} is still alive: give a new id, or wait until it ends or abort it")
        if length >= self.max_model_len:
            raise ValueError(
                f"{name}: a prompt of {length} tokens leaves no room for output within max_model_len="
                f"{self.max_model_len}: at most {self.max_model_len - 1} are supported; raise max_model_len"
            )
        if needed > self.manager.num_usable_blocks:
            raise ValueError(
                f"{name} can never fit: a prompt of {length} tokens and one more take {needed} blocks of "
                f"{self.manager.block_size}, the pool offers {self.manager.num_usable_blocks}: raise num_blocks to at "
                f"least {needed + 1} or give the KV cache more memory"
            )
        if not self.enable_chunked_prefill and length > self.max_num_batched_tokens:
            raise ValueError(
                f"{name}: a prompt of {length} tokens exceeds max_num_batched_tokens={self.max_num_batched_tokens} and "
                "chunked prefill is off: raise max_num_batched_tokens or set enable_chunked_prefill=True"
            )
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> Schedule:
        """Choose the next step's rows and take their blocks: running requests first, then waiting ones.

        Nobody is admitted in a step that preempted: the blocks it won are for those that run.
        """
        schedule = Schedule()
        self._schedule_running(schedule)
        if not schedule.preempted:
            self._schedule_waiting(schedule)
        schedule.copies = self.manager.pending_copies
        return schedule

    def update(self, schedule: Schedule, tokens: Sequence[int]) -> list[Request]:
        """Take the tokens of a launched step: one for each row that samples, in row order.

        Publishes the blocks that became full, appends the tokens, and ends requests, whose blocks return to the pool.
        Rows whose request ended since `schedule` are passed over. Returns the requests that got a token.
        """
        assert len(tokens) == sum(row.samples for row in schedule.rows)
        self.manager.finish_copies()
        sampled = iter(tokens)
        advanced = []
        for row in schedule.rows:
            token = next(sampled) if row.samples else None
            request = row.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens = row.start + row.num_tokens
            self.manager.publish(request, request.num_computed_tokens)
            if token is not None:
                request.append_token(token)
                advanced.append(request)
                if request.is_finished:
                    self._release(request)
        return advanced

    def fail(self, schedule: Schedule) -> list[Request]:
        """End the running requests of a step whose forward failed, with "error"; nothing it wrote is published.

        Returns the requests that it ended.
        """
        self.manager.finish_copies()
        failed = [row.request for row in schedule.rows if row.request.status is RequestStatus.RUNNING]
        for request in failed:
            self.finish(request, "error")
        return failed

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request from outside and free its blocks; one that has already ended only takes the new reason."""
        request.finish(reason, stop_reason)
        self._release(request)

    def abort(self, request_id: str) -> None:
        """End a live request with "abort"; an unknown or ended one is left alone."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")

    def preempt_all(self) -> None:
        """Preempt every running request, so that the whole cache may be dropped; they keep their order."""
        for request in reversed(list(self._running.values())):
            self._preempt(request)

    def _schedule_running(self, schedule: Schedule) -> None:
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:  # preempted by one before it
                continue
            budget = self.max_num_batched_tokens - schedule.num_tokens
            if budget == 0:
                break
            remaining = request.num_tokens - request.num_computed_tokens
            num_tokens = min(remaining, budget, self.max_tokens_per_row)
            if self._grow(request, num_tokens, schedule):
                schedule.add(request, num_tokens)

    def _grow(self, request: Request, num_tokens: int, schedule: Schedule) -> bool:
        """Find blocks for the next tokens of a running request, preempting others; False if it has left itself."""
        if self._end_if_outgrown(request, schedule):
            return False
        while self.manager.allocate_slots(request, request.num_computed_tokens + num_tokens) is None:
            victim = self._choose_victim()
            self._preempt(victim)
            schedule.preempted.append(victim)
            schedule.drop(victim)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, schedule: Schedule) -> None:
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            if self._end_if_outgrown(request, schedule):
                continue
            num_hit_tokens = self._take_blocks(request, schedule)
            if num_hit_tokens is None:  # stops admission, else smaller ones behind it could starve it
                break
            num_tokens = self._admitted_tokens(request.num_tokens - num_hit_tokens, schedule)
            self._waiting.popleft()
            self._admit(request, num_hit_tokens)
            schedule.add(request, num_tokens)

    def _take_blocks(self, request: Request, schedule: Schedule) -> int | None:
        """Allocate a waiting request's blocks; returns how many of its tokens the cache had, or None if it must wait.

        Blocks for the whole prompt, even if only a chunk of it runs now: two prompts that each fill most of the pool
        would otherwise both be admitted and preempt each other in the middle, over and over.
        """
        hits, num_hit_tokens = self.manager.get_computed_blocks(request)
        inside = num_hit_tokens % self.manager.block_size
        # A hit that ends inside a block needs one block more until it is copied; where that is missing, whole blocks.
        for blocks, num_tokens in ((hits, num_hit_tokens), (hits[:-1], num_hit_tokens - inside))[: 2 if inside else 1]:
            if not self._admitted_tokens(request.num_tokens - num_tokens, schedule):
                return None
            if self.manager.allocate_slots(request, request.num_tokens, blocks, num_tokens) is not None:
                return num_tokens
        return None

    def _admitted_tokens(self, remaining: int, schedule: Schedule) -> int:
        """How many of a waiting request's `remaining` tokens run now; 0 if it must wait."""
        budget = self.max_num_batched_tokens - schedule.num_tokens
        # Only a preempted request's prompt and output can exceed a whole budget: it is cut even without chunking,
        # since it could never run otherwise.
        if not self.enable_chunked_prefill and budget < remaining <= self.max_num_batched_tokens:
            return 0
        return min(remaining, budget, self.max_tokens_per_row)

    def _admit(self, request: Request, num_hit_tokens: int) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self.resumed_cache_queries += request.num_tokens
            self.resumed_cache_hits += num_hit_tokens
        else:
            request.num_cached_tokens = num_hit_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_hit_tokens
        request.num_computed_tokens = num_hit_tokens
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request

    def _choose_victim(self) -> Request:
        """The running request that is preempted next: the latest to arrive."""
        return max(self._running.values(), key=lambda request: request.arrival)

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and put it, with all its tokens, at the front of the waiting queue."""
        self.manager.free(request)
        del self._running[request.request_id]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _end_if_outgrown(self, request: Request, schedule: Schedule) -> bool:
        """End a request whose tokens no longer fit in the whole pool, before anyone is preempted in vain for it."""
        if self.manager.num_blocks_for(request.num_tokens) <= self.manager.num_usable_blocks:
            return False
        self.finish(request, "length", "kv_cache_full")
        schedule.finished.append(request)
        return True

    def _release(self, request: Request) -> None:
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        self.manager.free(request)
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)
