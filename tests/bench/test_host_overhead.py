"""The host's benchmark runs at tiny sizes and reports finite numbers; how large they are is not tested."""

import contextlib
import io
import json
import math
import sys
from typing import Any

import pytest

from bench import host_overhead
from bench.host_overhead import DecodeLoop, TextLoop, blocks_needed

TINY = (
    "--batch 1,3 --context 20 --pool 64 --steps 16 --rounds 2 --flat-batch 2,3 --flat-pools 32,64 --flat-contexts 8,40"
)
SUMMARY = {"median", "mean", "p90", "max"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What the script prints last."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["host_overhead", *TINY.split()])
        host_overhead.main()
    return json.loads(printed.getvalue().splitlines()[-1])


def is_summary(values: dict[str, float]) -> bool:
    return values.keys() == SUMMARY and all(math.isfinite(value) and value > 0 for value in values.values())


def test_every_phase_of_every_batch_size_is_reported_with_and_without_prefix_caching(result: dict[str, Any]) -> None:
    assert {(row["batch"], row["prefix_caching"]) for row in result["rows"]} == {
        (batch, caching) for batch in (1, 3) for caching in (True, False)
    }
    for row in result["rows"]:
        for phase in ("schedule", "update", "total", "inputs", "last_update"):
            assert is_summary(row[phase]), (phase, row[phase])
        assert row["allocate"]["mean"] > 0


def test_every_size_of_the_flatness_table_is_reported_with_its_ratio(result: dict[str, Any]) -> None:
    assert {(row["swept"], row["size"]) for row in result["flatness"]} == {
        ("num_blocks", 32),
        ("num_blocks", 64),
        ("context", 8),
        ("context", 40),
    }
    assert len(result["flatness"]) == 4 * 2 * 2  # sizes, batch sizes, caching
    for row in result["flatness"]:
        assert is_summary(row["total"])
        assert is_summary(row["inputs"])
        assert row["total_ratio"] > 0
    assert all(row["total_ratio"] == 1 for row in result["flatness"] if row["size"] in (32, 8))


def test_a_decode_loop_keeps_every_step_but_those_that_end_everyone() -> None:
    loop = DecodeLoop(2, context=20, num_blocks=blocks_needed(2, 20, 5), lifetime=5)
    loop.run(12)
    assert (len(loop.steps), len(loop.last_steps)) == (12, 2)
    loop.manager.check_integrity()
    assert loop.scheduler.preemption.num_preemptions == 0


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="larger pools"):
        DecodeLoop(2, context=20, num_blocks=blocks_needed(2, 20, 5) - 1, lifetime=5)


def test_a_text_loop_times_every_step_of_requests_that_have_text(byte_tokenizer: Any) -> None:
    loop = TextLoop(byte_tokenizer, list(b"the script"), 3, length=5, read=True)
    loop.run(4)
    assert len(loop.steps) == 4
    assert all(seconds > 0 for seconds in loop.steps)
    texts = [completions.output().outputs[0].text for completions in loop._completions]
    assert texts == ["the script", " scriptthe", "riptthe sc"]
