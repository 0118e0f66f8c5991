"""The three allocators on small pools, the simulation step by step, and the script's figures."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import fragmentation
from bench.allocators import Allocator, ContiguousAllocator, PagedAllocator, next_power_of_two
from bench.fragmentation import (
    Sample,
    Simulation,
    allocators,
    make_request,
    read_trace,
    serve,
    summarise,
    synthetic,
    textbook,
)

KINDS = ("max length", "power of two", "paged")


def simulate(allocator: Allocator, *lengths: tuple[int, int], arrivals: tuple[int, ...] = ()) -> Simulation:
    arrivals = arrivals or (0,) * len(lengths)
    requests = [
        make_request(str(i), prompt, output, arrival)
        for i, ((prompt, output), arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    simulation = Simulation(allocator, requests)
    simulation.run()
    return simulation


def contiguous(slots: int, *sizes: int) -> tuple[ContiguousAllocator, list[Any]]:
    """An allocator, and a request for each size that asks for it."""
    requests = [make_request(str(i), 1, 1) for i in range(len(sizes))]
    return ContiguousAllocator(slots, lambda request: sizes[int(request.request_id)]), requests


def test_powers_of_two() -> None:
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9, 7574)] == [1, 2, 4, 4, 8, 8, 16, 8192]


def test_the_textbook_pool_of_64_slots() -> None:
    result = textbook()
    assert result["contiguous"] == {
        "fits": {"A": True, "earlier": True, "B": True, "C": False},
        "starts": {"A": 0, "B": 32},
        "unused": 27,
        "holes": [12, 12],
        "external_fragmentation": 24,
    }
    assert result["paged"] == {
        "fits": {"A": True, "B": True, "C": True},
        "blocks": {"A": 2, "B": 2, "C": 2},
        "unused": {"A": 2, "B": 1, "C": 2},
    }


def test_the_first_hole_that_is_large_enough_is_taken() -> None:
    pool, (a, b, c, d, e) = contiguous(20, 3, 2, 5, 2, 4)
    assert all(map(pool.allocate, (a, b, c, d)))
    pool.free(a)
    pool.free(c)
    assert pool.holes == [(0, 3), (5, 5), (12, 8)]
    assert pool.allocate(e)
    assert pool.region(e) == (5, 4)
    assert pool.holes == [(0, 3), (9, 1), (12, 8)]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_holes_that_touch_are_merged(order: tuple[int, ...]) -> None:
    pool, requests = contiguous(9, 2, 3, 4)
    assert all(map(pool.allocate, requests))
    assert pool.holes == []
    for index in order:
        pool.free(requests[index])
    assert pool.holes == [(0, 9)]


def test_a_region_is_taken_once_and_does_not_grow() -> None:
    pool, (request,) = contiguous(8, 2)
    assert pool.allocate(request)
    request.append_token(0)
    assert pool.allocate(request)
    assert (pool.num_allocated(request), pool.free_slots) == (2, 6)
    request.token_ids.append(0)
    with pytest.raises(AssertionError, match="outgrown its 2 slots"):
        pool.allocate(request)


def test_holes_are_fragmented_only_for_a_request_that_they_are_too_small_for() -> None:
    pool, (a, b, c, small, large) = contiguous(12, 3, 4, 2, 3, 4)
    assert all(map(pool.allocate, (a, b, c)))
    pool.free(a)
    assert pool.holes == [(0, 3), (9, 3)]
    assert (pool.fragmented_slots(small), pool.fragmented_slots(large)) == (0, 6)


def test_paged_takes_blocks_as_tokens_come_and_gives_them_back() -> None:
    pool = PagedAllocator(16, block_size=4)
    request = make_request("a", 3, 4)
    assert pool.free_slots == 12  # of 16: the null block is in the pool and is not handed out
    assert pool.demand(request) == 4
    sizes = []
    for _ in range(3):
        assert pool.allocate(request)
        sizes.append(pool.num_allocated(request))
        request.num_computed_tokens = request.num_tokens
        request.append_token(0)
    assert sizes == [4, 4, 8]
    pool.free(request)
    pool.manager.check_integrity()
    assert pool.free_slots == 12


def test_a_pool_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="slots=18 is no multiple of block_size=4"):
        PagedAllocator(18, block_size=4)


def test_contiguous_step_by_step() -> None:
    # Two of three requests fit. Each writes 2 prompt tokens, then 1 a step, 4 in the end, and has reserved 8.
    simulation = simulate(ContiguousAllocator(17, lambda request: 8), (2, 3), (2, 3), (2, 3))
    full: dict[str, Any] = {"internal": 8, "external": 1, "free": 0, "running": 2, "outstanding": 1, "blocked": False}
    alone: dict[str, Any] = {"internal": 4, "external": 0, "free": 9, "running": 1, "outstanding": 0, "blocked": False}
    assert simulation.samples == [
        Sample(used=4, reserved=4, **full),
        Sample(used=6, reserved=2, **full),
        Sample(used=8, reserved=0, **full),
        Sample(used=2, reserved=2, **alone),
        Sample(used=3, reserved=1, **alone),
        Sample(used=4, reserved=0, **alone),
    ]


def test_paged_step_by_step() -> None:
    # The last of 4 blocks is the null block; the request behind waits for 2 blocks, and 1 is free.
    simulation = simulate(PagedAllocator(16, block_size=4), (7, 2), (5, 1))
    assert simulation.samples == [
        Sample(7, 1, 4, 0, 4, running=1, outstanding=1, blocked=False),
        Sample(8, 0, 4, 0, 4, running=1, outstanding=1, blocked=False),
        Sample(5, 0, 7, 0, 4, running=1, outstanding=0, blocked=False),
    ]


def test_the_head_of_the_queue_is_blocked_where_only_the_holes_are_too_small() -> None:
    # As in the textbook: the middle one of three ends, and its hole and the one at the end are too small for a fourth.
    sizes = {"0": 20, "1": 12, "2": 20, "3": 20}
    pool = ContiguousAllocator(64, lambda request: sizes[request.request_id])
    simulation = simulate(pool, (6, 3), (12, 1), (7, 3), (6, 1))
    assert [(sample.running, sample.external, sample.blocked) for sample in simulation.samples] == [
        (3, 12, False),
        (2, 24, True),
        (2, 24, True),
        (1, 0, False),
    ]


def test_the_request_that_came_last_is_preempted_and_computed_anew() -> None:
    # Both need a second block at step 2, and there is one: the second request drops its 4 tokens and waits to the end
    # of the first. It has 5 tokens then and 4 to draw.
    simulation = simulate(PagedAllocator(16, block_size=4), (4, 5), (4, 5))
    assert (simulation.num_preemptions, simulation.num_recomputed_tokens) == (1, 4)
    assert [sample.running for sample in simulation.samples] == [2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [sample.used for sample in simulation.samples] == [8, 5, 6, 7, 8, 5, 6, 7, 8]


def test_requests_are_admitted_when_they_arrive() -> None:
    simulation = simulate(PagedAllocator(64, block_size=4), (4, 2), (4, 2), (4, 1), arrivals=(0, 1, 4))
    assert [sample.running for sample in simulation.samples] == [1, 2, 1, 0, 1]
    assert [sample.outstanding for sample in simulation.samples] == [2, 1, 1, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_no_pool_could_hold_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"asks for (64|48) slots, and (32|28) are in the whole pool: raise --slots"):
        simulate(allocators(32, 64, block_size=4)[kind], (45, 4))


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12))
def test_every_request_runs_to_its_end_and_every_slot_is_counted_once(
    kind: str, lengths: list[tuple[int, int]]
) -> None:
    slots = 72
    pool = allocators(slots, 32, block_size=4)[kind]
    simulation = simulate(pool, *lengths)
    for sample in simulation.samples:
        assert min(sample[:5]) >= 0
        assert sum(sample[:5]) == slots
    # Each step of a running request draws one token; recomputing adds tokens, not draws.
    assert sum(sample.running for sample in simulation.samples) == sum(output for _, output in lengths)
    if isinstance(pool, PagedAllocator):
        pool.manager.check_integrity()
        assert pool.free_slots == slots - 4
    else:
        assert isinstance(pool, ContiguousAllocator)
        assert pool.holes == [(0, slots)]
        assert (simulation.num_preemptions, simulation.num_recomputed_tokens) == (0, 0)


def test_means_are_taken_while_requests_are_still_to_be_admitted() -> None:
    summary = summarise(simulate(ContiguousAllocator(16, lambda request: 8), (2, 3), (2, 3), (2, 3)))
    assert (summary["num_steps"], summary["num_steps_measured"]) == (6, 3)
    assert summary["used"] == summary["used_of_allocated"] == 6 / 16
    assert (summary["reserved"], summary["internal_fragmentation"]) == (2 / 16, 8 / 16)
    assert (summary["concurrency"], summary["blocked_by_fragmentation"]) == (2, 0)


def test_means_are_over_all_steps_where_nobody_has_to_wait() -> None:
    summary = summarise(simulate(ContiguousAllocator(16, lambda request: 8), (2, 3)))
    assert (summary["num_steps"], summary["num_steps_measured"], summary["free"]) == (3, 3, 0.5)


@pytest.mark.parametrize(("name", "count", "longest"), [("conv", 2000, 7979), ("code", 1000, 7574)])
def test_the_traces_are_complete(name: str, count: int, longest: int) -> None:
    requests = read_trace(name)
    assert (len(requests), max(request.total for request in requests)) == (count, longest)
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)


def test_the_traces_name_their_source_and_licence() -> None:
    text = (fragmentation.DATA / "README.md").read_text()
    assert "Azure/AzurePublicDataset" in text
    assert "Microsoft" in text
    assert fragmentation.LICENCE in text


def test_the_synthetic_workload_depends_on_its_seed_alone() -> None:
    assert synthetic(3) == synthetic(3) != synthetic(4)
    assert all(16 <= tokens <= 1024 for request in synthetic(0) for tokens in (request.prompt, request.output))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, dict[str, Any]]:
    fragmentation.main(argv)
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_the_last_line_holds_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text, result = run(capsys, "--requests", "150", "--slots", "32768")
    assert fragmentation.SOURCE in text
    assert fragmentation.LICENCE in text
    assert "20.4% to 38.2%" in text
    assert result["textbook"] == textbook()
    assert [workload["workload"] for workload in result["workloads"]] == ["conv", "code", "synthetic"]
    assert [workload["max_len"] for workload in result["workloads"]] == [8192, 8192, 2048]
    for workload in result["workloads"]:
        rows = workload["allocators"]
        assert tuple(rows) == KINDS
        assert rows["max length"]["used"] < rows["power of two"]["used"] < rows["paged"]["used"]
        assert rows["max length"]["concurrency"] == 32768 // workload["max_len"]
        assert rows["paged"]["used_of_allocated"] > fragmentation.PUBLISHED["used_paged_above"]
        assert rows["paged"]["external_fragmentation"] == 0


def test_requests_above_a_given_maximum_length_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--workload", "conv", "--requests", "100", "--slots", "16384", "--max-len", "1024")
    (workload,) = run(capsys, *argv)[1]["workloads"]
    kept = [request for request in read_trace("conv")[:100] if request.total <= 1024]
    assert 0 < len(kept) < 100
    assert (workload["num_requests"], workload["max_len"]) == (len(kept), 1024)
    assert workload["longest"] == max(request.total for request in kept)
    with pytest.raises(ValueError, match="--max-len 8 is shorter than every request of 'conv'"):
        fragmentation.main(["--workload", "conv", "--max-len", "8"])


def test_requests_may_come_at_their_own_times(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--workload", "conv", "--requests", "20", "--rate", "10")
    text, result = run(capsys, *argv)
    assert "come at their own times, 10 steps a second" in text
    last = int(read_trace("conv")[19].arrival_s * 10)
    assert result["workloads"][0]["allocators"]["paged"]["num_steps"] > last


@pytest.mark.parametrize("argv", [("--slots", "0"), ("--rate", "-1"), ("--block-size", "x"), ("--workload", "chat")])
def test_a_bad_knob_is_refused(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fragmentation.main(argv)
    assert argv[0] in capsys.readouterr().err


def test_serving_counts_the_requests_that_run_at_once(
    tiny_model: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    prompts, outputs = [[1, 2, 3], [4, 5], [6], [7, 8]], [2, 2, 2, 2]
    for limit, concurrency in ((1, 1), (2, 2), (4, 4)):
        run = serve(make_engine(tiny_model("llama"), max_num_seqs=limit), prompts, outputs)
        assert (run.concurrency, run.num_preemptions) == (concurrency, 0)
        assert run.output_tokens_per_s > 0


def test_a_plot_is_drawn(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    run(capsys, "--workload", "conv", "--requests", "20", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        fragmentation.main(["--plot", "plot.png"])
