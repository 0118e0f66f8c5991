"""Turns, ratios and what is affordable, on hand-made runners."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.rounds import affordable, alternate, machine, ratio, timed


def recorder(calls: list[str], name: str) -> Callable[[], int]:
    def run() -> int:
        calls.append(name)
        return len(calls)

    return run


def test_everyone_runs_once_a_round_and_another_one_begins() -> None:
    calls: list[str] = []
    results = alternate({name: recorder(calls, name) for name in "abc"}, 3)
    assert "".join(calls) == "abcbcacab"
    assert results == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_who_has_fewer_rounds_takes_part_in_the_first_ones() -> None:
    calls: list[str] = []
    results = alternate({name: recorder(calls, name) for name in "abc"}, {"a": 3, "b": 1, "c": 0})
    assert "".join(calls) == "abaa"
    assert results == {"a": [1, 3, 4], "b": [2], "c": []}


def test_a_round_to_warm_up_is_run_and_not_kept() -> None:
    calls: list[str] = []
    assert alternate({name: recorder(calls, name) for name in "ab"}, 1, warm_up=2) == {"a": [5], "b": [6]}


def test_nobody_runs_without_rounds() -> None:
    calls: list[str] = []
    assert alternate({"a": recorder(calls, "a")}, {"a": 0}) == {"a": []}
    assert calls == []


def test_a_ratio_is_the_median_over_the_rounds_that_both_have() -> None:
    assert ratio([2.0, 9.0, 8.0, 1000.0], [1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize(("seconds", "rounds"), [(1, 4), (15, 4), (16, 3), (31, 1), (60, 1), (61, 0)])
def test_as_many_rounds_as_fit_into_the_limit_are_affordable(seconds: float, rounds: int) -> None:
    assert affordable(seconds, limit=60, rounds=4) == rounds


def test_timing_calls_the_function_once() -> None:
    calls: list[str] = []
    assert timed(recorder(calls, "a"))() > 0
    assert calls == ["a"]


def test_the_machine_is_described_by_what_changes_figures() -> None:
    assert machine().keys() == {"cpu", "threads", "torch", "transformers"}
    assert machine()["cpu"]
