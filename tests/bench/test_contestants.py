"""Contestants on a tiny model: how many tokens they make, and that they make the same ones; forecasts by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench import contestants, decode_latency, throughput
from bench.contestants import (
    OURS,
    PROBE_ROWS,
    Entrant,
    Forecast,
    HuggingFace,
    Pagegraph,
    Timing,
    enter,
    forecast,
    left_padded,
    random_prompts,
)
from bench.decode_latency import turns
from bench.roofline import ReadBandwidth
from bench.throughput import padding, static_batches, static_seconds
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny llama, without tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return path


class Scripted:
    """A contestant that takes as long as it says, in no time: each token `row` seconds, a forward at least `step`."""

    def __init__(self, step: float, row: float) -> None:
        self.step, self.row = step, row
        self.batches: list[tuple[int, int, int]] = []

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Timing:
        batch, tokens = len(prompts), sum(map(len, prompts))
        self.batches.append((batch, tokens, new_tokens))
        step = max(self.step, self.row * batch)
        return Timing(max(self.step, self.row * tokens), [step] * (new_tokens - 1))


def test_our_contestant_counts_decode_steps_of_the_whole_batch_only(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder, max_num_batched_tokens=8)  # the prompts take several steps
    prompts = random_prompts(engine.vocab_size, [7, 5, 6])
    before = engine.stats()
    timing = Pagegraph(engine).generate(prompts, 5)
    after = engine.stats()
    assert len(timing.steps) == 4
    assert after.num_steps - before.num_steps > 5
    assert after.num_output_tokens - before.num_output_tokens > 3 * 5  # early prompts are ahead of the last
    assert not engine.has_unfinished_requests()


def test_nothing_is_cached_from_one_call_to_the_next(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder)
    prompts = random_prompts(engine.vocab_size, [9])
    for _ in range(2):
        Pagegraph(engine).generate(prompts, 3)
    assert engine.stats().num_prompt_tokens == 18


def test_hugging_face_makes_the_engines_tokens(
    make_engine: MakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    prompts = random_prompts(engine.vocab_size, [7, 3, 5])
    sequences: list[torch.Tensor] = []
    model = contestants.load_hugging_face(folder, engine)
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: sequences.append(generate(*args, **kwargs)))
    timing = HuggingFace(model).generate(prompts, 6)
    expected = engine.generate(prompts, contestants.runtime.SamplingParams(max_tokens=6, temperature=0))
    assert sequences[0][:, 7:].tolist() == [output.outputs[0].token_ids for output in expected]
    assert timing.first > 0
    assert len(timing.steps) == 5


@pytest.mark.compile
def test_a_static_cache_compiles_decode_once_for_each_batch_size(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder)
    static = HuggingFace(contestants.load_hugging_face(folder, engine), static=True, max_cache_len=16)
    torch._dynamo.utils.counters.clear()
    for batch, length, graphs_so_far in ((1, 5, 1), (1, 9, 1), (3, 5, 2), (1, 5, 2)):
        static.generate(random_prompts(engine.vocab_size, [length] * batch), 4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs_so_far


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_padded([[5], [6, 7, 8], [9, 1]])
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8], [0, 9, 1]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]


def test_a_forecast_is_from_a_small_prefill_and_steps() -> None:
    contestant = Scripted(step=0.5, row=0.25)
    found = forecast(contestant, vocab_size=10)
    assert found == Forecast(step=0.5, row=0.25)
    assert contestant.batches == [(1, 1, 3), (1, PROBE_ROWS, 3), (1, PROBE_ROWS, 3)]


def test_a_forecast_takes_rows_or_the_weights_whichever_is_more() -> None:
    found = Forecast(step=1.0, row=0.25)
    assert (found.forward(1), found.forward(4), found.forward(8)) == (1.0, 1.0, 2.0)
    assert found.generate(batch=8, prompt=16, new_tokens=1) == 32.0
    assert found.generate(batch=8, prompt=16, new_tokens=4) == 32.0 + 3 * 2.0


def test_who_is_too_slow_runs_in_fewer_rounds_or_is_left_out_but_we_run_once() -> None:
    args = decode_latency.argparse.Namespace(limit=60.0, rounds=4)
    slow = Forecast(step=10.0, row=0.0)
    entrants = {
        OURS: Entrant(Scripted(0, 0), Forecast(step=1000.0, row=0.0)),
        "fast": Entrant(Scripted(0, 0), Forecast(step=1.0, row=0.0)),
        "slow": Entrant(Scripted(0, 0), slow),
        "slowest": Entrant(Scripted(0, 0), Forecast(step=10.0, row=10.0)),
    }
    assert turns(entrants, [[1, 2, 3]], 3, args) == {OURS: 1, "fast": 4, "slow": 2, "slowest": 1}
    assert turns(entrants, [[1, 2, 3]] * 2, 3, args) == {OURS: 1, "fast": 4, "slow": 2, "slowest": 0}


def test_an_unknown_contestant_is_refused(make_engine: MakeEngine, folder: Path) -> None:
    with pytest.raises(ValueError, match="--against dynamic is unknown; these are known: eager, static"):
        enter(make_engine(folder), folder, ["dynamic", "eager"], 16)


def test_a_contestant_that_cannot_run_is_missing_with_its_reason(
    make_engine: MakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: HuggingFace, prompts: Any, new_tokens: int) -> Timing:
        raise RuntimeError("no such cache\nat line 3")

    monkeypatch.setattr(HuggingFace, "generate", broken)
    entrants, missing = enter(make_engine(folder), folder, ["eager"], 16)
    assert list(entrants) == [OURS]
    assert missing == {"eager": "RuntimeError: no such cache"}


def test_static_batches_run_to_their_longest_output() -> None:
    prompts, outputs = [[1], [2, 2], [3], [4], [5] * 5], [4, 2, 3, 3, 6]
    batches = static_batches(prompts, outputs, 2)
    assert batches == [([[1], [2, 2]], 4), ([[3], [4]], 3), ([[5] * 5], 6)]
    assert padding(batches, outputs) == pytest.approx(1 - 18 / 20)
    assert static_seconds(Forecast(step=1.0, row=0.5), batches) == (2 + 3) + (1 + 2) + (2.5 + 5)


def last_line(printed: str) -> dict[str, Any]:
    return json.loads(printed.splitlines()[-1])


def test_decode_latency_prints_every_case_and_says_who_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_latency, "bandwidth_of", partial(ReadBandwidth, nbytes=1 << 20))
    sizes = "--batch 1,3 --context= --prompt 4 --steps 3 --prefill 8 --rounds 2 --backend eager --against eager"
    decode_latency.main(["--model", str(folder), *sizes.split()])
    result = last_line(capsys.readouterr().out)
    (model,) = result["models"]
    assert [row["batch"] for row in model["decode"]] == [1, 3]
    assert [row["tokens"] for row in model["prefill"]] == [8]
    for row in (*model["decode"], *model["prefill"]):
        assert row["entrants"].keys() == {OURS, "eager"}
        assert {cell["rounds"] for cell in row["entrants"].values()} == {2}
        assert row["entrants"][OURS]["over_ours"] == 1
    assert model["decode"][1]["bytes"] > model["decode"][0]["bytes"]

    decode_latency.main(["--model", str(folder), *sizes.split(), "--limit", "0"])
    printed = capsys.readouterr().out
    assert printed.count("left out: forecast to take over 0 s") == 3
    for row in last_line(printed)["models"][0]["decode"]:
        assert row["entrants"]["eager"] is None
        assert row["entrants"][OURS]["rounds"] == 1


def test_throughput_serves_the_same_requests_to_everyone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--requests 5 --prompt 2,6 --output 2,5 --hf-batch 2 --rounds 2 --backend eager"
    throughput.main(["--model", str(folder), *sizes.split()])
    result = last_line(capsys.readouterr().out)
    assert 5 * 2 <= result["output_tokens"] <= 5 * 5
    assert 0 <= result["padding"] < 1
    assert result["entrants"].keys() == {OURS, "eager"}
    for row in result["entrants"].values():
        assert len(row["output_tokens_per_s_by_round"]) == 2
        assert row["output_tokens_per_s"] > 0
    throughput.main(["--model", str(folder), *sizes.split(), "--limit", "0"])
    printed = capsys.readouterr().out
    assert "left out: forecast to take over 0 s" in printed
    assert last_line(printed)["entrants"]["eager"] is None
