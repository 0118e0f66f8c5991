"""Our own decode steps, part by part, on a tiny model: who runs them, what is reported, and what is left out."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench import decode_latency
from bench.device_time import Repeated, Stopwatch
from bench.roofline import CopyBandwidth, ReadBandwidth, bytes_per_step
from bench.step_time import (
    COMPILED,
    EAGER,
    GRAPH,
    HOST,
    decode_times,
    decode_turn,
    executors,
    no_room,
    prompt_length,
    running,
    watching,
)
from runtime import SamplingParams
from runtime.cli import main
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]

CPU = torch.device("cpu")
GRAPHS = {"cuda_graphs": True, "cudagraph_capture_sizes": [1, 3], "async_scheduling": True}


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny llama, without tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_latency, "bandwidth_of", partial(ReadBandwidth, nbytes=1 << 20))


def test_an_engine_has_the_executors_that_it_was_made_with(make_engine: MakeEngine, tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"))
    assert list(executors(engine)) == [EAGER]
    replaying = make_engine(tiny_model("llama"), **GRAPHS)
    assert list(executors(replaying)) == [EAGER, GRAPH]
    assert executors(replaying)[GRAPH] is replaying.runner.executor


def test_a_compiled_executor_is_found(
    make_engine: MakeEngine, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, example: graph.forward)
    engine = make_engine(tiny_model("llama"), backend="inductor")
    assert list(executors(engine)) == [EAGER, COMPILED]
    assert executors(engine)[COMPILED] is engine.runner.executor


def test_executors_take_turns_on_one_engine_without_changing_its_tokens(
    make_engine: MakeEngine, tiny_model: TinyModel, hf_greedy: Callable[..., list[int]]
) -> None:
    model = tiny_model("llama")
    engine = make_engine(model, **GRAPHS)
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=12, temperature=0)
    named = executors(engine)
    engine.add_request(prompt, params)
    for name in (GRAPH, EAGER, GRAPH, EAGER):
        with running(engine, named[name]), watching(named[name], CPU) as spans:
            for _ in range(3):
                (output,) = engine.step()
                tokens = output.outputs[0].token_ids
            assert spans, f"{name} ran nothing"
    assert tokens == hf_greedy(model, prompt, 12)
    assert engine.runner.executor is named[GRAPH]
    assert "run" not in vars(named[GRAPH])  # nobody watches any more


def test_a_turn_counts_its_own_steps_and_says_whether_they_were_replayed(
    make_engine: MakeEngine, tiny_model: TinyModel
) -> None:
    engine = make_engine(tiny_model("llama"), **GRAPHS)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for name, replays in ((EAGER, 0), (GRAPH, 5)):
        turn = decode_turn(engine, executors(engine)[name], prompts, 5)
        assert (len(turn.steps), len(turn.device), turn.replays) == (5, 5, replays)
        assert all(seconds > 0 for seconds in (*turn.steps, *turn.device))
        assert {*HOST, "forward", "transfer"} == turn.phases.keys()
    assert not engine.has_unfinished_requests()


def test_a_turn_in_which_requests_end_early_is_an_error(make_engine: MakeEngine, tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"), max_model_len=12)
    with pytest.raises(RuntimeError, match="see the log"):
        decode_turn(engine, executors(engine)[EAGER], [[1, 2, 3]], 20)


def test_the_prompts_of_later_turns_come_from_the_prefix_cache(make_engine: MakeEngine, tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"), **GRAPHS)
    bandwidth = ReadBandwidth(CPU, nbytes=1 << 16)
    row = decode_times(engine, executors(engine), 3, 30, steps=4, rounds=2, bandwidth=bandwidth)
    length = prompt_length(30, 4)
    assert length == 25
    stats = engine.stats()
    turns = 2 * 3  # of two executors, one to warm up and two rounds
    assert stats.num_prompt_tokens == 3 * (length + (turns - 1) * 1)  # the last token is always computed
    assert stats.prefix_cache_hits == 3 * (turns - 1) * 24
    assert row["bytes"] == bytes_per_step(engine, 3, 30)
    assert row["executors"][GRAPH]["replayed"]
    assert not row["executors"][EAGER]["replayed"]


def test_what_does_not_fit_is_said_beforehand(make_engine: MakeEngine, tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"), max_model_len=100, max_num_seqs=8)
    assert no_room(engine, 2, 20, 4) is None
    assert no_room(engine, 9, 20, 4) == "max_num_seqs is 8"
    assert "max_model_len is 100" in str(no_room(engine, 1, 95, 4))
    assert "the KV cache has 79 blocks, and" in str(no_room(engine, 8, 40, 4))
    with pytest.raises(ValueError, match="max_num_seqs is 8"):
        decode_times(engine, executors(engine), 9, 20, steps=4, rounds=1, bandwidth=ReadBandwidth(CPU, 1 << 16))


def test_calls_are_timed_one_by_one() -> None:
    calls: list[int] = []
    repeated = Repeated([partial(calls.append, index) for index in range(3)], CPU)
    assert repeated.not_captured == "no CUDA graphs on cpu"
    calls.clear()
    assert repeated.median(rounds=2) > 0
    assert calls == [0, 1, 2] * 3


def test_a_stopwatch_measures_what_lies_between() -> None:
    watch = Stopwatch(CPU)
    watch.start()
    sum(range(1000))
    watch.stop()
    assert watch.seconds() == watch.seconds() > 0


def test_a_copy_counts_bytes_read_and_written() -> None:
    bandwidth = CopyBandwidth(CPU, nbytes=1 << 16, copies=3)
    assert bandwidth.nbytes == 2 * 3 << 16
    assert bandwidth.sample() == bandwidth.best == bandwidth.median > 0
    assert torch.equal(bandwidth._source, bandwidth._target)


SIZES = "--batch 1,3 --context 8,20,9999 --prompt 4 --steps 3 --prefill 8 --rounds 2 --backend eager --against"


@pytest.mark.usefixtures("small_bandwidth")
def test_steps_are_printed_plotted_and_last_comes_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    picture = tmp_path / "steps.png"
    assert main(["bench", "decode", "--model", str(folder), *SIZES.split(), "", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["bandwidth"] == "read-only sum"
    steps = result["models"][0]["steps"]
    assert [(row["batch"], row["context"]) for row in steps] == [(b, c) for b in (1, 3) for c in (8, 20, 9999)]
    for row in steps:
        if row["context"] == 9999:
            assert "max_model_len" in row["left_out"]
            assert "executors" not in row
            continue
        assert row["executors"].keys() == {EAGER}
        check_cell(row, row["executors"][EAGER])
    assert printed.count("max_model_len") == 4  # in the table and in the JSON
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_cell(row: dict[str, Any], cell: dict[str, Any]) -> None:
    assert row["sample_us"] > 0
    assert row["floor_us"] > 0
    assert 0 < cell["device_us"] < cell["us"]
    assert cell["host_us"] == pytest.approx(sum(cell["phases_us"][name] for name in HOST))
    assert 0 < cell["fraction"] <= cell["device_fraction"]
    assert all(math.isfinite(value) for value in cell["phases_us"].values())
    assert cell["rounds"] == 2


@pytest.mark.usefixtures("small_bandwidth")
def test_steps_that_would_take_too_long_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", str(folder), "--limit", "0", "--context", "8", "--batch", "1", "--prefill", "", "--against", ""]
    decode_latency.main([*args, "--prompt", "4", "--steps", "3", "--backend", "eager"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["models"][0]["steps"]
    assert row["left_out"] == "forecast to take over 0 s"


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "decode", "--model", "nowhere", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == "pagegraph: --plot needs matplotlib: pip install matplotlib\n"


def test_without_a_checkout_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runtime.cli.__file__", str(tmp_path / "runtime" / "cli.py"))
    assert main(["bench", "decode"]) == 2
    assert "needs a checkout of the repository" in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err
