"""Whether a preempted request is swapped out or computed again, what is counted, and what the advice says."""

from __future__ import annotations

import logging

import pytest

from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.preemption import Preemption
from runtime.request import Request
from runtime.sampling import SamplingParams


class Meter:
    """A copy rate, in blocks a second, that knows how often it was measured."""

    def __init__(self, rate: float) -> None:
        self.rate, self.count = rate, 0

    def __call__(self) -> float:
        self.count += 1
        return self.rate


def running(manager: KVCacheManager, num_tokens: int, *, computed: int | None = None) -> Request:
    """A request that holds its blocks and has computed its tokens."""
    params = SamplingParams(max_tokens=1000)
    name, tokens = f"{num_tokens} tokens", range(num_tokens)
    request = Request(name, tokens, params, arrival=0, eos_token_ids=frozenset(), max_model_len=10_000)
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens if computed is None else computed
    return request


def alive(num_tokens: int, n: int = 1) -> Request:
    """A request that writes that many tokens, half of them as its prompt, before its last one ends it."""
    params = SamplingParams(max_tokens=num_tokens - num_tokens // 2 + 1, n=n)
    return Request("a", range(num_tokens // 2), params, arrival=0, eos_token_ids=frozenset(), max_model_len=10_000)


def make(mode: str, *, copy_rate: float | None = None, host_blocks: int = 20) -> Preemption:
    """A policy over 20 device blocks of 4 tokens."""
    meter = None if copy_rate is None else Meter(copy_rate)
    return Preemption(KVCacheManager(21, 4, False, host_blocks), mode, meter)


def release(preemption: Preemption, num_tokens: int = 12) -> bool:
    """Whether a new request of that many tokens is swapped out; its blocks are free afterwards, whichever it is."""
    manager = preemption.manager
    request = running(manager, num_tokens)
    is_swapped = preemption.release([request])
    assert manager.is_swapped(request) is is_swapped
    assert manager.usage == 0.0
    manager.check_integrity()
    return is_swapped


# --- the choice ---


@pytest.mark.parametrize(
    ("copy_rate", "prefill_rate", "is_swapped"),
    [
        (10.0, 19.0, True),  # 3 blocks out and in take 0.6 s, 12 tokens 0.63 s
        (10.0, 20.0, False),  # as quick: then without the host's memory
        (10.0, 21.0, False),
        (1e6, 1e3, True),
        (1.0, 1e6, False),
    ],
)
def test_auto_does_what_is_quicker_by_the_measured_rates(
    copy_rate: float, prefill_rate: float, is_swapped: bool
) -> None:
    preemption = make("auto", copy_rate=copy_rate)
    preemption.note_prefill(int(prefill_rate * 10), 10.0)
    assert release(preemption) is is_swapped


@pytest.mark.parametrize(("mode", "is_swapped"), [("swap", True), ("recompute", False)])
def test_the_other_modes_do_not_look_at_the_rates(mode: str, is_swapped: bool) -> None:
    for copy_rate, prefill_rate in ((1.0, 1e6), (1e6, 1.0)):
        preemption = make(mode, copy_rate=copy_rate)
        preemption.note_prefill(int(prefill_rate), 1.0)
        assert release(preemption) is is_swapped


def test_auto_swaps_before_any_prompt_was_timed() -> None:
    assert release(make("auto", copy_rate=1e-3))


def test_later_prefills_weigh_more() -> None:
    """From 10 towards 40 tokens a second, past the 20 of the copy rate's 10 blocks: 10, 16, 20.8."""
    preemption = make("auto", copy_rate=10.0)
    chosen = []
    for num_tokens in (10, 40, 40):
        preemption.note_prefill(num_tokens, 1.0)
        chosen.append(release(preemption))
    assert chosen == [True, True, False]


def test_what_sequences_share_needs_room_once() -> None:
    """One block shared and a tail for each."""
    preemption = make("swap", host_blocks=3)
    parent = running(preemption.manager, 6)
    child = parent.fork("child")
    preemption.manager.fork(parent, child)
    child.token_ids.append(6)
    assert preemption.manager.allocate_slots(child, 7) is not None
    assert preemption.release([parent, child])
    assert preemption.manager.host_pool.num_free_blocks == 0
    assert preemption.num_swapped_out == 1


def test_the_rate_is_measured_once_and_only_if_it_matters() -> None:
    unneeded = [make("recompute", copy_rate=5.0), make("swap", copy_rate=5.0, host_blocks=0)]
    needed = make("auto", copy_rate=5.0)
    for preemption in (*unneeded, needed):
        release(preemption)
        release(preemption)
    assert [one._measure.count for one in (*unneeded, needed)] == [0, 0, 1]  # type: ignore[union-attr]


def test_without_a_measurement_moving_costs_nothing() -> None:
    preemption = make("auto")
    preemption.note_prefill(10**9, 1.0)
    assert release(preemption)


# --- no space ---


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_a_space_that_is_too_small_is_said_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    preemption = make(mode, copy_rate=1e6, host_blocks=4)
    assert release(preemption, 8)
    assert not release(preemption, 12)
    assert not release(preemption, 16)
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "runtime.preemption")
    assert record.getMessage() == (
        "the swap space is too small: 2 of its 4 blocks are in use and a preempted request needs 3, so it is computed "
        "again; raise swap_space (said once)"
    )
    assert release(preemption, 8), "there is room for smaller ones"


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_no_space_after_all_is_computed_again(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The space itself has warned that it could not be had."""
    preemption = make(mode, copy_rate=0.0)
    preemption.note_prefill(1, 1.0)
    assert [release(preemption), release(preemption)] == [False, False]
    assert preemption.manager.host_pool.num_used_blocks == 0
    assert caplog.records == []


def test_a_request_that_has_computed_nothing_has_nothing_to_swap_out(caplog: pytest.LogCaptureFixture) -> None:
    preemption = make("swap", copy_rate=1.0, host_blocks=1)
    assert not preemption.release([running(preemption.manager, 40, computed=0)])
    assert preemption.manager.usage == 0.0
    assert preemption.num_recomputed == 1
    assert preemption._measure.count == 0  # type: ignore[union-attr]
    assert caplog.records == []


# --- counts and advice ---


def test_preemptions_are_counted_by_what_was_done() -> None:
    preemption = make("swap", host_blocks=5)
    done = [release(preemption, num_tokens) for num_tokens in (8, 16, 8, 4, 40)]
    assert done == [True, False, True, True, False]
    assert (preemption.num_swapped_out, preemption.num_recomputed) == (3, 2)


def waiting(prompt: int, max_tokens: int, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request("waiting", range(prompt), params, arrival=0, eos_token_ids=frozenset(), max_model_len=10_000)


def test_the_advice_names_what_happened_and_what_helps() -> None:
    """Each request comes to hold 16 tokens, 4 blocks: 6 of them need 24, and the 20 serve 5."""
    preemption = make("swap", host_blocks=5)
    for num_tokens in (8, 16, 8):
        release(preemption, num_tokens)
    preemption.note_shortage([waiting(10, 7)] * 6, 100)
    assert preemption.advice() == (
        "3 requests were preempted so far (2 swapped out, 1 to be computed again): the KV cache has 20 blocks of 4 "
        "tokens, 24 would have sufficed. Set num_blocks=25, or raise gpu_memory_utilization, or lower max_num_seqs to "
        "5, or add GPUs"
    )


@pytest.mark.parametrize(
    ("alive", "max_num_seqs", "num_blocks", "num_served"),
    [
        ([waiting(10, 7)] * 9, 6, 24, 5),  # no more than may run at once
        ([waiting(10, 7)] * 6 + [waiting(1, 80)], 6, 20 + 5 * 4, 1),  # the longest count first
        ([waiting(90, 1), waiting(1, 1)], 6, 24, 1),  # never 0
        ([waiting(10, 7, n=3)] * 3, 100, 3 * (2 + 3 * 2), 6),  # a prompt's full blocks count once
        ([waiting(10, 7, n=5), *[waiting(20, 13)] * 5], 5, 5 * 8, 2),  # by size for each sequence
    ],
)
def test_what_suffices_is_the_worst_case_of_all_that_may_run_at_once(
    alive: list[Request], max_num_seqs: int, num_blocks: int, num_served: int
) -> None:
    preemption = make("swap")
    preemption.note_shortage(alive, max_num_seqs)
    preemption.note_shortage([waiting(10, 7)] * 4, 1)  # a smaller shortage later
    assert preemption.num_blocks_wanted == num_blocks
    preemption.note_shortage(alive, max_num_seqs)
    assert preemption.num_sequences_served == num_served
