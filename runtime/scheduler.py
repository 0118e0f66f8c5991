"""Continuous batching: which tokens of which requests run in the next step.

One token budget a step and no phases: a request runs the tokens that it has and the cache has not, be they a prompt's
chunk or the one token sampled last. `schedule` and `update` are the only two transitions of a healthy step.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime import beams
from runtime.admission import Admission, check_admissible
from runtime.beam_search import Candidates
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.preemption import Preemption
from runtime.request import FinishReason, Request, RequestStatus
from runtime.schedule import Schedule, ScheduledRow
from runtime.waiting_queue import WaitingQueue

_RUNNING = RequestStatus.RUNNING  # reading an Enum's member costs ten times what a plain name does


class Scheduler:
    """Serves requests over the blocks of `manager`, with preemption by `preemption`; None: by recomputation.

    `scheduling_policy`: "fcfs", or "priority": smaller `Request.priority` is sooner, at equal priority the earlier.

    `max_num_batched_tokens` is the budget of a step and may be below `max_num_seqs`, which it then caps.
    `long_prefill_token_threshold`, if not 0, caps a request's tokens in a step. Without chunked prefill a prompt runs
    whole or waits. Limits are checked by EngineConfig.
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
        scheduling_policy: str = "fcfs",
        preemption: Preemption | None = None,
    ) -> None:
        self.manager = manager
        self.preemption = preemption or Preemption(manager)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        threshold = long_prefill_token_threshold if enable_chunked_prefill else 0
        self.max_tokens_per_row = threshold or max_num_batched_tokens
        self.admission = Admission(
            manager,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked=enable_chunked_prefill,
        )
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting = WaitingQueue(by_priority=scheduling_policy == "priority")
        self._refused: Request | None = None  # the first that waits, if there was no room for it since one ended

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
        if request.request_id in self._requests:
            raise ValueError(
                f"request {request.request_id!r} is still alive: give a new id, or wait until it ends or abort it"
            )
        check_admissible(
            request,
            self.manager,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
        )
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Take in `child`, a fork of the live request `parent`: it shares the blocks of a parent that runs.

        Where the parent does not run, or as many requests run as may, the child waits instead.
        """
        assert child.request_id not in self._requests
        self._requests[child.request_id] = child
        if parent.status is RequestStatus.RUNNING and self._num_slots() < self.max_num_seqs:
            self._run_fork(parent, child)
            return
        child.status, child.num_computed_tokens = RequestStatus.WAITING, 0
        if self.manager.is_swapped(parent):
            self.manager.fork(parent, child)
            child.status = RequestStatus.PREEMPTED
        self._waiting.add(child)

    def schedule(self) -> Schedule:
        """Choose the next step's rows and take their blocks: running requests first, then waiting ones.

        Nobody is admitted in a step that preempted: the blocks it won are for those that run.
        """
        schedule = Schedule()
        self._refused = None
        self._schedule_running(schedule)
        if not schedule.preempted:
            self._schedule_waiting(schedule)
        self._add_transfers(schedule)
        return schedule

    def schedule_ahead(self, current: Schedule) -> Schedule | None:
        """The step after `current`, which has been launched and whose tokens are not known: each row, one token on.

        None if it depends on these tokens (n completions, beams), if not all that runs is in `current` and drawing
        there, if a waiting request may come in, or if blocks are short: then `update` comes first, and `schedule`. Rows
        that end at a length are left out; those that turn out to have ended otherwise run in vain, into blocks that
        nobody else writes before, and `update` passes them over.
        """
        if self._may_admit() or any(row.num_draws != 1 for row in current.rows):
            return None
        ahead = Schedule()
        num_left = 0
        for draw, row in enumerate(current.rows):
            request, start = row.request, row.start + row.num_tokens
            if request.status is not _RUNNING:
                continue
            if request.lead.search is not None:
                return None
            num_left += 1
            if request.ends_at(start + 1):
                continue
            if start >= request.num_writable_tokens and self.manager.allocate_slots(request, start + 1) is None:
                return None
            ahead.rows.append(ScheduledRow(request, start, 1, 1, draw))
        if num_left != len(self._running) or not ahead.rows:
            return None
        ahead.num_tokens = ahead.num_draws = len(ahead.rows)
        self._add_transfers(ahead)
        return ahead

    def update(self, schedule: Schedule, tokens: Sequence[int], candidates: Sequence[Candidates] = ()) -> list[Request]:
        """Take the tokens of a launched step: `num_draws` for each row, in row order; and of the rows that sample for a
        beam search, whose token counts for nothing, the candidates. Whoever launched it finished its transfers.

        Publishes the blocks that became full, forks the children of requests for n completions, appends the tokens,
        chooses beams, and ends requests, whose blocks return to the pool. Rows whose request ended since `schedule` are
        passed over. Returns the requests that got a token.
        """
        assert len(tokens) == schedule.num_draws
        advanced: list[Request] = []
        offers: dict[Request, Candidates] = {}
        offered, end = iter(candidates), 0
        for row in schedule.rows:
            request, start, end = row.request, end, end + row.num_draws
            is_beam = request.lead.search is not None
            offer = next(offered) if is_beam and row.num_draws else None
            if request.status is not _RUNNING:
                continue
            request.num_computed_tokens = num_computed_tokens = row.start + row.num_tokens
            if num_computed_tokens % self.manager.block_size < row.num_tokens:  # a block became full
                self.manager.publish(request, num_computed_tokens)
            if offer is not None:
                offers[request] = offer
            elif is_beam:
                beams.fork_off(request.lead, self.manager)
            elif row.num_draws:
                advanced.append(request)
                if row.num_draws > 1:
                    self._divide(request, tokens[start + 1 : end])
                    advanced += request.children
                if request.append_token(tokens[start]):
                    self._release(request)
        for lead in dict.fromkeys(request.lead for request in offers):
            beams.select(lead, offers, self.manager)
            advanced.append(lead)
            if lead.is_finished:
                self._release(lead)
        return advanced

    def fail(self, schedule: Schedule) -> list[Request]:
        """End the running requests of a step whose forward failed, with "error"; nothing it wrote is published.

        Returns the requests that it ended.
        """
        self.manager.abandon_transfers()
        leads = dict.fromkeys(row.request.lead for row in schedule.rows)
        failed = [lead for lead in leads if lead.status is RequestStatus.RUNNING]
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
        """Make every request compute its tokens anew, so that all that is cached may be dropped; their order stays."""
        for request in reversed(list(self._running.values())):
            self._preempt(request, keep=False)
        self.manager.forget_swapped()

    def _divide(self, request: Request, tokens: Sequence[int]) -> None:
        """Fork off the children of a request for n completions, before its own token is appended, with their first."""
        request.num_draws = 1
        for index, token in enumerate(tokens, 1):
            child_id = f"{request.request_id}#{index}"
            while child_id in self._requests:  # a user's own id may look like that
                child_id += "'"
            child = request.fork(child_id, index)
            self._requests[child_id] = child
            self._run_fork(request, child)
            request.children.append(child)
            if child.append_token(token):
                self._release(child)

    def _run_fork(self, parent: Request, child: Request) -> None:
        self.manager.fork(parent, child)
        child.status = RequestStatus.RUNNING
        self._running[child.request_id] = child

    def _num_slots(self) -> int:
        """Running requests, those counted that they will divide into."""
        return sum(request.num_slots for request in self._running.values())

    def _add_transfers(self, schedule: Schedule) -> None:
        schedule.swap_outs = self.manager.pending_swap_outs
        schedule.swap_ins = self.manager.pending_swap_ins
        schedule.copies = self.manager.pending_copies

    def _may_admit(self) -> bool:
        """Whether a request waits that max_num_seqs leaves room for, and that has not been refused in vain before."""
        if not self._waiting or self._refused is self._waiting.peek():
            return False
        return self._num_slots() + self._waiting.peek().num_slots <= self.max_num_seqs

    def _schedule_running(self, schedule: Schedule) -> None:
        for request in list(self._running.values()):
            if request.status is not _RUNNING:  # preempted by one before it
                continue
            budget = self.max_num_batched_tokens - schedule.num_tokens
            if budget == 0:
                break
            start = request.num_computed_tokens
            known = request.num_prompt_tokens <= start < request.num_writable_tokens
            if known and len(request.token_ids) == start + 1 and not request.beams:
                # Most rows of most steps, with nothing to decide: in the fewest operations.
                schedule.rows.append(ScheduledRow(request, start, 1, 1))
                schedule.num_tokens += 1
                schedule.num_draws += 1
                continue
            rows = self._next_rows(request, budget)
            if self._grow(request, rows, schedule):
                for sequence, num_tokens in rows:
                    schedule.add(sequence, num_tokens)

    def _next_rows(self, request: Request, budget: int) -> list[tuple[Request, int]]:
        """What runs next of a running request, as (sequence, number of tokens): none if its beams need more budget."""
        if request.beams:
            return beams.next_rows(request, budget, self.max_tokens_per_row)
        return [(request, min(request.num_tokens - request.num_computed_tokens, budget, self.max_tokens_per_row))]

    def _grow(self, request: Request, rows: list[tuple[Request, int]], schedule: Schedule) -> bool:
        """Find blocks for the next tokens of a running request, preempting others; False if it has left itself."""
        if self._end_if_outgrown(request, schedule):
            return False
        for sequence, num_tokens in rows:
            end = sequence.num_computed_tokens + num_tokens
            while self.manager.allocate_slots(sequence, end) is None:
                if not schedule.preempted:
                    self.preemption.note_shortage(self._requests.values(), self.max_num_seqs)
                victim = self._choose_victim()
                self._preempt(victim)
                schedule.preempted.append(victim)
                schedule.drop(victim)
                if victim is request:
                    return False
        return True

    def _schedule_waiting(self, schedule: Schedule) -> None:
        slots = self._num_slots() if self._waiting else 0
        while self._waiting and slots + self._waiting.peek().num_slots <= self.max_num_seqs:
            request = self._waiting.peek()
            if self._end_if_outgrown(request, schedule):
                continue
            budget = self.max_num_batched_tokens - schedule.num_tokens
            if not self.admission.admit(request, budget):  # stops here, else smaller ones behind it could starve it
                self._refused = request
                break
            self._waiting.remove(request)
            self._running[request.request_id] = request
            slots += request.num_slots
            for sequence, num_tokens in self._next_rows(request, budget):
                schedule.add(sequence, num_tokens)

    def _choose_victim(self) -> Request:
        """The running request that is preempted next: the last in rank."""
        return max(self._running.values(), key=self._waiting.rank)

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Take a running request's blocks and put it, with all its tokens, at the front of the waiting queue.

        keep: its keys and values may be swapped out.
        """
        running = [sequence for sequence in request.sequences if sequence.status is RequestStatus.RUNNING]
        self.preemption.release(running, keep=keep)
        del self._running[request.request_id]
        for sequence in running:
            sequence.status = RequestStatus.PREEMPTED
            sequence.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.put_back(request)

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
        self._refused = None
        for sequence in request.sequences:
            self.manager.free(sequence)
            sequence.status = RequestStatus.FINISHED
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)
