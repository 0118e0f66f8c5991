"""The scheduling policy on fake tokens, and a random driver over tiny pools.

The fake model keeps a number in each KV slot that depends on the whole prefix up to it, as keys and values do, and
checks at every draw that the block table leads to the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.beam_search import BeamSearch, BeamSearchParams, Candidates
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.preemption import Preemption
from runtime.request import Request, RequestStatus
from runtime.sampling import SamplingParams
from runtime.schedule import Schedule
from runtime.scheduler import Scheduler

VOCAB, EOS = 50, 2


def content(request: Request, length: int) -> int:
    """What a slot must hold for token `length - 1` of `request`."""
    return crc32(repr((request.token_ids[:length], request.extra_keys)).encode())


def next_token(request: Request, noise_key: int | None = None) -> int:
    key = request.noise_key if noise_key is None else noise_key
    token = crc32(repr((content(request, request.num_tokens), key)).encode()) % VOCAB
    while token in request.masked_token_ids():
        token = (token + 1) % VOCAB
    return token


def candidates(request: Request, count: int) -> Candidates:
    """The fake model's log-probabilities, the largest first; few values, so that hypotheses and ends are frequent."""
    whole = content(request, request.num_tokens)
    logprobs = [(token, -(crc32(repr((whole, token)).encode()) % 1000) / 100) for token in range(VOCAB)]
    return sorted(logprobs, key=lambda one: -one[1])[:count]


class Driver:
    """A scheduler with a fake model below it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        preemption: str = "recompute",
        swap_blocks: int = 0,
        **limits: Any,
    ) -> None:
        defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 4096}
        self.manager = KVCacheManager(num_blocks, block_size, caching, swap_blocks)
        self.preemption = Preemption(self.manager, preemption)
        self.scheduler = Scheduler(self.manager, preemption=self.preemption, **(defaults | limits))
        self.memory: dict[int, int | None] = {}
        self.host: dict[int, int | None] = {}
        self.arrivals = 0

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        arrival: int | None = None,
        salt: str | None = None,
        priority: int = 0,
        beams: BeamSearchParams | None = None,
        **params: Any,
    ) -> Request:
        self.arrivals += 1
        sampling = SamplingParams(**({"max_tokens": 5, "ignore_eos": True, "seed": 0} | params))
        request = Request(
            name,
            prompt,
            sampling if beams is None else beams.sampling,
            beam_search=beams,
            arrival=self.arrivals if arrival is None else arrival,
            eos_token_ids=frozenset({EOS}),
            max_model_len=self.scheduler.max_model_len,
            cache_salt=salt,
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def slots(self, request: Request, start: int, end: int) -> list[int]:
        size, table = self.manager.block_size, self.manager.block_ids(request)
        return [table[i // size] * size + i % size for i in range(start, end)]

    def copy_blocks(
        self, pairs: list[tuple[int, int]], source_of: dict[int, int | None], into: dict[int, int | None]
    ) -> None:
        size, before = self.manager.block_size, dict(source_of)
        for source, target in pairs:
            for offset in range(size):
                into[target * size + offset] = before.get(source * size + offset)

    def move_blocks(self, schedule: Schedule) -> None:
        self.copy_blocks(schedule.swap_outs, self.memory, self.host)
        self.copy_blocks(schedule.swap_ins, self.host, self.memory)
        self.copy_blocks(schedule.copies, self.memory, self.memory)

    def forward(self, schedule: Schedule) -> tuple[list[int], list[Candidates]]:
        self.move_blocks(schedule)
        self.manager.finish_transfers()
        for row in schedule.rows:
            end = row.start + row.num_tokens
            for i, slot in enumerate(self.slots(row.request, row.start, end), row.start):
                block = self.manager.pool.blocks[slot // self.manager.block_size]
                assert self.manager._writable(block), f"{row.request.request_id} writes to {block}"
                self.memory[slot] = content(row.request, i + 1)
        tokens, offers = [], []
        for row in schedule.rows:
            length = row.request.num_tokens
            assert row.samples == (row.start + row.num_tokens == length)
            if row.samples:
                held = [self.memory[slot] for slot in self.slots(row.request, 0, length)]
                assert held == [content(row.request, i + 1) for i in range(length)]
                tokens += [next_token(row.request, key) for key in row.request.draw_keys()]
                search = row.request.lead.search
                if search is not None:
                    offers.append(candidates(row.request, search.num_candidates))
        return tokens, offers

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        assert schedule.rows or schedule.finished or schedule.preempted or not self.scheduler.has_unfinished()
        assert schedule.num_tokens == sum(row.num_tokens for row in schedule.rows)
        assert schedule.num_tokens <= self.scheduler.max_num_batched_tokens
        assert self.scheduler._num_slots() <= self.scheduler.max_num_seqs
        self.scheduler.update(schedule, *self.forward(schedule))
        self.manager.check_integrity()
        return schedule

    def finish_all(self) -> None:
        while self.scheduler.has_unfinished():
            self.step()
        self.check_empty()

    def check_empty(self) -> None:
        pool = self.manager.pool
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert pool.num_free_blocks == len(pool.blocks) - 1
        assert [block.ref_cnt for block in pool.blocks] == [0] * len(pool.blocks)
        assert self.manager.usage == 0.0
        assert self.manager.host_pool.num_used_blocks == 0
        self.manager.check_integrity()


def rows(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in schedule.rows]


def solo(request: Request, start: int | None = None) -> list[int]:
    """The output of the same request alone in an endless pool; from its first `start` tokens on, if given."""
    alone = Request(
        "solo",
        request.token_ids[: request.num_prompt_tokens],
        replace(request.params, n=1),
        arrival=0,
        eos_token_ids=frozenset({EOS}),
        max_model_len=request.max_model_len,
    )
    alone.extra_keys, alone.noise_key = request.extra_keys, request.noise_key
    alone.token_ids = request.token_ids[: request.num_prompt_tokens if start is None else start]
    while not alone.is_finished:
        alone.append_token(next_token(alone))
    return alone.output_token_ids


def solo_search(request: Request) -> list[tuple[float, list[int]]]:
    """The hypotheses of the same beam search over whole sequences, without any memory."""
    assert request.search is not None
    search = BeamSearch(request.search.params, request._ending_ids, request.max_output_tokens)
    alone = request.fork("solo", 0)
    del alone.token_ids[request.num_prompt_tokens :]
    beams = [alone]
    while True:
        offers = [candidates(beam, search.num_candidates) for beam in beams]
        chosen = search.advance([beam.output_token_ids for beam in beams], offers)
        if not chosen:
            return [(ended.score, ended.token_ids) for ended in search.hypotheses]
        parents = [beams[one.parent] for one in chosen]
        beams = [parent.fork("solo", 0) for parent in parents]
        for beam, one in zip(beams, chosen, strict=True):
            beam.token_ids.append(one.token)


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


# --- one step's budget ---


def test_ten_prompts_that_fit_run_whole_in_one_step() -> None:
    driver = Driver(100, 16)
    for i in range(10):
        driver.add(f"r{i}", tokens(20, 100 * i))
    schedule = driver.step()
    assert rows(schedule) == [(f"r{i}", 0, 20, True) for i in range(10)]
    assert schedule.num_tokens == 200
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (10, 0)


@pytest.mark.parametrize(
    ("chunked", "first", "second"),
    [
        (True, [("a", 0, 800, True), ("b", 0, 224, False)], [("a", 800, 1, True), ("b", 224, 576, True)]),
        (False, [("a", 0, 800, True)], [("a", 800, 1, True), ("b", 0, 800, True)]),
    ],
)
def test_budget_1024_cuts_the_second_prompt_or_lets_it_wait(
    chunked: bool, first: list[object], second: list[object]
) -> None:
    driver = Driver(200, 16, max_num_batched_tokens=1024, enable_chunked_prefill=chunked)
    driver.add("a", tokens(800))
    driver.add("b", tokens(800, 1000))
    assert rows(driver.step()) == first
    assert rows(driver.step()) == second


def test_running_requests_come_before_waiting_ones() -> None:
    driver = Driver(50, 4, max_num_batched_tokens=6)
    driver.add("a", tokens(4))
    driver.step()
    driver.add("b", tokens(9, 100))
    assert rows(driver.step()) == [("a", 4, 1, True), ("b", 0, 5, False)]
    assert rows(driver.step()) == [("a", 5, 1, True), ("b", 5, 4, True)]


def test_long_prefill_threshold_caps_a_row() -> None:
    driver = Driver(50, 4, max_num_batched_tokens=16, long_prefill_token_threshold=5)
    driver.add("a", tokens(12))
    driver.add("b", tokens(3, 100))
    assert rows(driver.step()) == [("a", 0, 5, False), ("b", 0, 3, True)]
    assert rows(driver.step()) == [("a", 5, 5, False), ("b", 3, 1, True)]
    assert rows(driver.step()) == [("a", 10, 2, True), ("b", 4, 1, True)]


def test_budget_1_runs_one_token_of_one_request_a_step() -> None:
    driver = Driver(10, 1, max_num_batched_tokens=1)
    first, second = driver.add("a", tokens(3), max_tokens=2), driver.add("b", tokens(2, 100), max_tokens=1)
    schedules = []
    while driver.scheduler.has_unfinished():
        schedules += rows(driver.step())
    assert schedules == [
        ("a", 0, 1, False),
        ("a", 1, 1, False),
        ("a", 2, 1, True),
        ("a", 3, 1, True),
        ("b", 0, 1, False),
        ("b", 1, 1, True),
    ]
    assert (first.output_token_ids, second.output_token_ids) == (solo(first), solo(second))
    driver.check_empty()


def test_a_budget_below_max_num_seqs_caps_rows() -> None:
    driver = Driver(50, 4, max_num_seqs=8, max_num_batched_tokens=2)
    for name in "abc":
        driver.add(name, tokens(1, ord(name)), max_tokens=3)
    assert [row[0] for row in rows(driver.step())] == ["a", "b"]
    assert [row[0] for row in rows(driver.step())] == ["a", "b"]
    driver.finish_all()


def test_max_num_seqs_caps_running_requests() -> None:
    driver = Driver(50, 4, max_num_seqs=2)
    for name in "abc":
        driver.add(name, tokens(1, ord(name)), max_tokens=1 if name == "a" else 3)
    assert [row[0] for row in rows(driver.step())] == ["a", "b"]
    assert [row[0] for row in rows(driver.step())] == ["b", "c"]


# --- prefix hits ---


def test_only_what_is_not_cached_runs_and_counts() -> None:
    driver = Driver(30, 16)
    first = driver.add("a", tokens(48))
    driver.step()
    second = driver.add("b", tokens(48), max_tokens=1)
    assert rows(driver.step()) == [("a", 48, 1, True), ("b", 47, 1, True)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 47)
    assert second.output_token_ids == first.output_token_ids[:1]
    assert (driver.scheduler.admission.prefix_cache_queries, driver.scheduler.admission.prefix_cache_hits) == (96, 47)
    salted = driver.add("c", tokens(48), salt="other")
    driver.step()
    assert salted.num_cached_tokens == 0
    driver.finish_all()


def test_equal_prompts_of_one_step_do_not_share_what_is_not_computed() -> None:
    driver = Driver(30, 4)
    first, second = driver.add("a", tokens(9)), driver.add("b", tokens(9))
    assert rows(driver.step()) == [("a", 0, 9, True), ("b", 0, 9, True)]
    driver.finish_all()
    assert first.output_token_ids == second.output_token_ids == solo(first)


# --- memory pressure ---


def test_the_second_of_two_is_preempted_at_the_next_block_and_keeps_its_token() -> None:
    driver = Driver(11, 16)
    first, second = driver.add("a", tokens(80)), driver.add("b", tokens(80, 1000))
    assert rows(driver.step()) == [("a", 0, 80, True), ("b", 0, 80, True)]
    schedule = driver.step()
    assert rows(schedule) == [("a", 80, 1, True)]
    assert schedule.preempted == [second]
    assert (second.status, second.num_computed_tokens, second.num_tokens) == (RequestStatus.PREEMPTED, 0, 81)
    assert (second.num_preemptions, driver.scheduler.preemption.num_preemptions) == (1, 1)
    assert driver.scheduler.num_waiting == 1
    driver.finish_all()
    assert (first.output_token_ids, second.output_token_ids) == (solo(first), solo(second))


def test_a_scheduled_victim_leaves_the_step_and_nobody_behind_it_is_skipped() -> None:
    driver = Driver(11, 16)
    # The latest arrival is first in the running order, so it is scheduled before it becomes the victim.
    latest = driver.add("latest", tokens(40), arrival=9)
    driver.add("needs", tokens(48, 1000), arrival=1)
    driver.add("behind", tokens(60, 2000), arrival=2)
    assert driver.step().num_tokens == 148
    driver.scheduler.max_num_batched_tokens = 2  # without the victim's token there is none left for the last row
    schedule = driver.step()
    assert rows(schedule) == [("needs", 48, 1, True), ("behind", 60, 1, True)]
    assert (schedule.num_tokens, schedule.preempted) == (2, [latest])
    driver.finish_all()
    assert latest.output_token_ids == solo(latest)


def test_a_resumed_request_hits_its_own_blocks_and_gives_the_same_output() -> None:
    driver = Driver(20, 4)
    request = driver.add("a", tokens(8))
    driver.step()
    driver.scheduler.preempt_all()
    assert (request.num_tokens, request.num_computed_tokens, driver.manager.usage) == (9, 0, 0.0)
    driver.add("late", tokens(4, 100))
    assert rows(driver.step()) == [("a", 8, 1, True), ("late", 0, 4, True)]
    assert len(driver.manager.block_ids(request)) == 3
    scheduler = driver.scheduler
    assert (scheduler.admission.resumed_cache_queries, scheduler.admission.resumed_cache_hits) == (9, 8)
    assert (scheduler.admission.prefix_cache_queries, scheduler.admission.prefix_cache_hits) == (12, 0)
    assert request.num_cached_tokens == 0
    driver.finish_all()
    assert request.output_token_ids == solo(request)


def test_preempt_all_keeps_the_order_and_allows_a_reset() -> None:
    driver = Driver(30, 4)
    requests = [driver.add(name, tokens(5, ord(name))) for name in "abc"]
    driver.step()
    assert driver.manager.reset_prefix_cache() is False
    driver.scheduler.preempt_all()
    assert driver.manager.reset_prefix_cache() is True
    assert rows(driver.step()) == [("a", 0, 6, True), ("b", 0, 6, True), ("c", 0, 6, True)]
    driver.finish_all()
    assert [r.output_token_ids for r in requests] == [solo(r) for r in requests]
    assert [r.num_preemptions for r in requests] == [1, 1, 1]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    driver = Driver(7, 4)
    driver.add("a", tokens(8))
    driver.add("b", tokens(15, 100))
    driver.step()
    driver.add("c", tokens(1, 200))
    schedule = driver.step()
    assert [request.request_id for request in schedule.preempted] == ["b"]
    assert rows(schedule) == [("a", 8, 1, True)]


def test_prompts_that_each_fill_most_of_the_pool_do_not_thrash() -> None:
    driver = Driver(11, 16, max_num_batched_tokens=32)
    first, second = driver.add("a", tokens(120)), driver.add("b", tokens(120, 1000))
    started = []
    while driver.scheduler.has_unfinished():
        started.append([row[:2] for row in rows(driver.step())])
    assert started[:4] == [[("a", 0)], [("a", 32)], [("a", 64)], [("a", 96)]]
    assert all(len(step) == 1 for step in started)
    assert driver.scheduler.preemption.num_preemptions == 0
    assert (first.output_token_ids, second.output_token_ids) == (solo(first), solo(second))
    driver.check_empty()


def test_a_waiting_request_that_does_not_fit_stops_admission() -> None:
    driver = Driver(6, 4)
    driver.add("a", tokens(11), max_tokens=2)
    driver.add("big", tokens(15, 100), max_tokens=1)
    driver.add("small", tokens(1, 200), max_tokens=1)
    assert [row[0] for row in rows(driver.step())] == ["a"]
    assert [row[0] for row in rows(driver.step())] == ["a"]
    assert [row[0] for row in rows(driver.step())] == ["big", "small"]
    driver.check_empty()


def test_a_lone_request_that_outgrows_the_pool_ends() -> None:
    driver = Driver(3, 4)
    request = driver.add("a", tokens(6), max_tokens=50)
    ended: list[Request] = []
    while driver.scheduler.has_unfinished():
        ended += driver.step().finished
    assert ended == [request]
    assert (request.finish_reason, request.stop_reason) == ("length", "kv_cache_full")
    assert request.output_token_ids == solo(request)[:3]
    driver.check_empty()


def test_an_outgrown_request_ends_even_if_it_was_preempted_meanwhile() -> None:
    driver = Driver(3, 4)
    request = driver.add("a", tokens(7), max_tokens=50)
    driver.step()
    driver.step()
    assert request.num_tokens == 9
    driver.scheduler.preempt_all()
    behind = driver.add("b", tokens(2, 100), max_tokens=1)
    schedule = driver.step()
    assert schedule.finished == [request]
    assert rows(schedule) == [("b", 0, 2, True)]
    assert (request.stop_reason, behind.finish_reason) == ("kv_cache_full", "length")
    driver.check_empty()


def test_an_outgrowing_request_preempts_nobody_in_vain() -> None:
    driver = Driver(4, 4)
    request = driver.add("a", tokens(7), max_tokens=50)
    driver.add("b", tokens(3, 100), max_tokens=1)
    driver.finish_all()
    assert request.stop_reason == "kv_cache_full"
    assert request.num_output_tokens == 6
    assert driver.scheduler.preemption.num_preemptions == 0


def test_a_pool_of_two_blocks_serves_one_after_the_other() -> None:
    driver = Driver(2, 8)
    requests = [driver.add(name, tokens(5, ord(name)), max_tokens=3) for name in "abc"]
    assert [row[0] for row in rows(driver.step())] == ["a"]
    driver.finish_all()
    assert [r.output_token_ids for r in requests] == [solo(r) for r in requests]


def test_without_chunking_a_preempted_request_longer_than_the_budget_still_resumes() -> None:
    driver = Driver(20, 4, caching=False, max_num_batched_tokens=8, enable_chunked_prefill=False)
    request = driver.add("a", tokens(8), max_tokens=6)
    for _ in range(3):
        driver.step()
    driver.scheduler.preempt_all()
    assert request.num_tokens == 11
    assert [rows(driver.step()), rows(driver.step())] == [[("a", 0, 8, False)], [("a", 8, 3, True)]]
    driver.finish_all()
    assert request.output_token_ids == solo(request)


# --- refusals and ends ---


def test_what_can_never_run_is_refused_and_those_behind_complete() -> None:
    driver = Driver(5, 4, max_model_len=32, max_num_batched_tokens=8, enable_chunked_prefill=False)
    with pytest.raises(
        ValueError, match=r"16 tokens and one more take 5 blocks of 4, the pool offers 4: .* at least 6"
    ):
        driver.add("never", tokens(16))
    with pytest.raises(ValueError, match=r"prompt of 32 tokens .* max_model_len=32: at most 31"):
        driver.add("long", tokens(32))
    with pytest.raises(ValueError, match="prompt of 33 tokens"):
        driver.add("longer", tokens(33))
    with pytest.raises(ValueError, match="prompt of 9 tokens exceeds max_num_batched_tokens=8 and chunked prefill is"):
        driver.add("whole", tokens(9))
    assert not driver.scheduler.has_unfinished()
    request = driver.add("ok", tokens(8))
    driver.finish_all()
    assert request.output_token_ids == solo(request)


def test_max_model_len_32_gives_a_prompt_of_31_one_token() -> None:
    driver = Driver(10, 4, max_model_len=32)
    request = driver.add("a", tokens(31), max_tokens=9)
    driver.finish_all()
    assert (request.num_output_tokens, request.finish_reason) == (1, "length")


def test_a_live_id_is_refused_and_an_ended_one_may_come_back() -> None:
    driver = Driver(10, 4)
    first = driver.add("a", tokens(3))
    driver.step()
    with pytest.raises(ValueError, match="request 'a' is still alive"):
        driver.add("a", tokens(3))
    assert driver.scheduler.get("a") is first
    driver.finish_all()
    assert first.output_token_ids == solo(first)
    assert driver.scheduler.get("a") is None
    driver.add("a", tokens(3))
    driver.finish_all()


def test_abort_in_every_state() -> None:
    driver = Driver(11, 16, max_num_batched_tokens=100)
    running = driver.add("running", tokens(80))
    chunked = driver.add("chunked", tokens(70, 1000))
    waiting = driver.add("waiting", tokens(40, 2000))
    assert rows(driver.step()) == [("running", 0, 80, True), ("chunked", 0, 20, False)]
    for name in ("waiting", "chunked", "chunked", "unknown"):
        driver.scheduler.abort(name)
        driver.manager.check_integrity()
    assert driver.manager.usage == 0.5
    driver.scheduler.preempt_all()
    driver.scheduler.abort("running")
    assert [r.finish_reason for r in (running, chunked, waiting)] == ["abort"] * 3
    assert (running.num_output_tokens, chunked.num_output_tokens) == (1, 0)
    driver.check_empty()
    assert driver.step().rows == []


def test_an_abort_between_schedule_and_update_emits_nothing() -> None:
    driver = Driver(11, 4)
    aborted, kept = driver.add("a", tokens(9)), driver.add("b", tokens(9, 100))
    schedule = driver.scheduler.schedule()
    drawn = driver.forward(schedule)
    driver.scheduler.abort("a")
    assert driver.scheduler.update(schedule, *drawn) == [kept]
    assert aborted.output_token_ids == []
    assert kept.output_token_ids == solo(kept)[:1]
    assert driver.manager.get_computed_blocks(aborted) == ([], 0)
    driver.finish_all()


def test_a_failed_forward_ends_its_rows_and_publishes_nothing() -> None:
    driver = Driver(11, 4, max_num_seqs=2)
    first, second = driver.add("a", tokens(9)), driver.add("b", tokens(9, 100))
    behind = driver.add("c", tokens(9))
    schedule = driver.scheduler.schedule()
    driver.scheduler.abort("b")
    assert driver.scheduler.fail(schedule) == [first]
    assert (first.finish_reason, second.finish_reason) == ("error", "abort")
    assert driver.manager.usage == 0.0
    driver.manager.check_integrity()
    assert rows(driver.step()) == [("c", 0, 9, True)]
    driver.finish_all()
    assert behind.output_token_ids == solo(behind)


def test_a_stop_text_overrides_an_end_of_the_same_update() -> None:
    driver = Driver(11, 4)
    ended, live = driver.add("a", tokens(3), max_tokens=1), driver.add("b", tokens(3, 100))
    driver.step()
    assert ended.finish_reason == "length"
    driver.scheduler.finish(ended, "stop", "END")
    driver.scheduler.finish(live, "stop", "END")
    assert [(r.finish_reason, r.stop_reason) for r in (ended, live)] == [("stop", "END")] * 2
    driver.check_empty()


def test_a_late_reason_does_not_touch_a_new_request_of_the_same_id() -> None:
    driver = Driver(11, 4)
    old = driver.add("a", tokens(3), max_tokens=1)
    driver.step()
    new = driver.add("a", tokens(3))
    driver.scheduler.finish(old, "stop", "END")
    assert driver.scheduler.get("a") is new
    driver.finish_all()
    assert new.output_token_ids == solo(new)


def test_a_threshold_without_chunking_is_ignored() -> None:
    driver = Driver(11, 4, enable_chunked_prefill=False, long_prefill_token_threshold=3)
    driver.add("a", tokens(9))
    assert rows(driver.step()) == [("a", 0, 9, True)]


# --- priority ---


def test_smaller_priority_is_sooner_and_arrival_decides_among_equals() -> None:
    driver = Driver(30, 4, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 5), ("b", -1), ("c", 5), ("d", 0)):
        driver.add(name, [1, 2], priority=priority, max_tokens=1)
    served = [rows(driver.step())[0][0] for _ in range(4)]
    assert served == ["b", "d", "a", "c"]


def test_the_largest_priority_is_preempted_and_the_latest_among_equals() -> None:
    driver = Driver(11, 4, scheduling_policy="priority")
    requests = {
        name: driver.add(name, tokens(8, first), priority=priority, max_tokens=8)
        for name, first, priority in (("urgent", 0, 0), ("low", 10, 9), ("early", 20, 3), ("late", 30, 3))
    }
    driver.step()
    assert driver.manager.usage == 0.8
    preempted = driver.step().preempted
    assert [request.request_id for request in preempted] == ["low"], "before the later ones of smaller priority"
    while not (more := driver.step().preempted):
        pass
    assert [request.request_id for request in more] == ["late"]
    driver.finish_all()
    assert all(request.output_token_ids == solo(request) for request in requests.values())


def test_a_victim_that_was_scheduled_before_leaves_the_step() -> None:
    """The first to run is the least urgent: the second needs its blocks, after it was given its row."""
    driver = Driver(5, 4, scheduling_policy="priority")
    low = driver.add("low", tokens(7), priority=1, max_tokens=4)
    driver.step()
    urgent = driver.add("urgent", tokens(8, 20), priority=0, max_tokens=4)
    driver.step()
    schedule = driver.step()
    assert rows(schedule) == [("urgent", 8, 1, True)]
    assert (schedule.num_tokens, schedule.preempted) == (1, [low])
    driver.finish_all()
    assert [low.output_token_ids, urgent.output_token_ids] == [solo(low), solo(urgent)]


def test_fcfs_ignores_priority() -> None:
    driver = Driver(30, 4, max_num_seqs=1)
    driver.add("a", [1, 2], priority=5, max_tokens=1)
    driver.add("b", [1, 2], priority=0, max_tokens=1)
    assert [rows(driver.step())[0][0] for _ in range(2)] == ["a", "b"]


# --- anything at all, in any order ---


class AnyOrder(RuleBasedStateMachine):
    """Random adds, steps, failures, aborts, preemptions and resets; every output equals the solo run's."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 16),
        max_model_len=st.integers(4, 40),
        chunked_threshold=st.sampled_from([(True, 0), (True, 1), (True, 3), (False, 0)]),
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        preemption=st.sampled_from(["swap", "swap", "recompute"]),
        swap_blocks=st.sampled_from([0, 2, 5, 30]),
    )
    def start(self, chunked_threshold: tuple[bool, int], num_blocks: int, block_size: int, **limits: Any) -> None:
        chunked, threshold = chunked_threshold
        self.driver = Driver(
            num_blocks, block_size, enable_chunked_prefill=chunked, long_prefill_token_threshold=threshold, **limits
        )
        self.requests: list[Request] = []
        self.forked_at: dict[int, int] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 12),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "x"]),
        arrival=st.none() | st.integers(0, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 2),
    )
    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, **rest: Any) -> None:
        name = str(len(self.requests))
        try:
            request = self.driver.add(
                name, prompt, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **rest
            )
        except ValueError:
            assert self.driver.scheduler.get(name) is None
        else:
            self.requests.append(request)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        width=st.integers(1, 4),
        max_tokens=st.integers(1, 10),
        early_stopping=st.sampled_from([False, True, "never"]),
        length_penalty=st.sampled_from([0.0, 1.0, -0.5, 2.0]),
        stop_token_ids=st.sampled_from([(), (1, 3, 4), tuple(range(10))]),
        priority=st.integers(-1, 2),
    )
    def add_beams(self, prompt: list[int], width: int, priority: int, **params: Any) -> None:
        name = str(len(self.requests))
        try:
            request = self.driver.add(name, prompt, priority=priority, beams=BeamSearchParams(width, **params))
        except ValueError:
            assert self.driver.scheduler.get(name) is None
        else:
            self.requests.append(request)

    @precondition(lambda self: any(not request.is_finished for request in self.family()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([request for request in self.family() if not request.is_finished]))
        if parent.search is not None:
            parent = data.draw(st.sampled_from(parent.sequences))
        if parent.num_output_tokens >= parent.params.max_tokens:
            return
        child = parent.fork(str(len(self.requests)), params=replace(parent.params, n=1))
        self.forked_at[id(child)] = child.num_tokens
        self.driver.scheduler.fork(parent, child)
        self.requests.append(child)

    def family(self) -> list[Request]:
        return [member for request in self.requests for member in (request, *request.children)]

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(abort=st.integers(0, 30))
    def abort(self, abort: int) -> None:
        self.driver.scheduler.abort(str(abort))

    @rule(abort=st.integers(0, 30))
    def step_with_an_abort_in_flight(self, abort: int) -> None:
        schedule = self.driver.scheduler.schedule()
        drawn = self.driver.forward(schedule)
        self.driver.scheduler.abort(str(abort))
        self.driver.scheduler.update(schedule, *drawn)

    @rule(moved=st.booleans())
    def fail(self, moved: bool) -> None:
        schedule = self.driver.scheduler.schedule()
        if moved:
            self.driver.move_blocks(schedule)
        for row in schedule.rows:
            for slot in self.driver.slots(row.request, row.start, row.start + row.num_tokens):
                self.driver.memory[slot] = -1
        leads = dict.fromkeys(row.request.lead for row in schedule.rows)
        assert self.driver.scheduler.fail(schedule) == list(leads)

    @precondition(lambda self: self.driver.scheduler._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = list(self.driver.scheduler._running.values())
        self.driver.scheduler._preempt(data.draw(st.sampled_from(running)))

    @rule()
    def preempt_all_and_reset(self) -> None:
        self.driver.scheduler.preempt_all()
        assert self.driver.manager.reset_prefix_cache() is True
        self.driver.memory.clear()
        self.driver.host.clear()

    @precondition(lambda self: self.driver.manager.usage > 0)
    @rule()
    def reset_is_refused(self) -> None:
        assert self.driver.manager.reset_prefix_cache() is False

    @invariant()
    def intact(self) -> None:
        self.driver.manager.check_integrity()
        for request in self.family():
            if request.is_finished:
                assert self.driver.scheduler.get(request.request_id) is None

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for _ in range(5000):
            if not self.driver.scheduler.has_unfinished():
                break
            self.driver.step()
        self.driver.check_empty()
        for request in self.family():
            if request.search is not None:
                whole = request.finish_reason in ("stop", "length")
                found = [(ended.score, ended.token_ids) for ended in request.search.hypotheses]
                assert not whole or found == solo_search(request)
                continue
            expected, output = solo(request, self.forked_at.get(id(request))), request.output_token_ids
            whole = request.finish_reason not in ("abort", "error") and request.stop_reason != "kv_cache_full"
            assert output == (expected if whole else expected[: len(output)])


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
