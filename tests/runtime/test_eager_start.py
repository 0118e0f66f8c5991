"""Eager start: steps run uncompiled while another process compiles, and no token depends on when it is done."""

import copy
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import graphs.compile
import runtime
from graphs import compile_cache
from graphs.background_compile import BackgroundCompile
from graphs.compile import Source
from ops.cache_folder import cache_folder
from ops.cpu.build import find_compiler
from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine

TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, list[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

KNOBS: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "num_threads": 1, "progress": False}
PROMPT = [(7 * i + 3) % 250 for i in range(21)]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that has the C++ ops and no graph."""
    built, folder = cache_folder() / "cpu_ops", tmp_path_factory.mktemp("cache")
    find_compiler()
    if built.is_dir():
        (folder / "cpu_ops").symlink_to(built.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEGRAPH_CACHE_DIR", str(folder))
        yield folder


def start(model: PreTrainedModel, **knobs: Any) -> Engine:
    return runtime.compile(model, **{**KNOBS, "eager_start": True, **knobs})


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [one.token_ids for one in output.outputs] for name, output in outputs.items()}


def serve(engine: Engine, drain: Drain, *, between: Callable[[], None] = lambda: None) -> dict[str, list[list[int]]]:
    """Tokens of requests of every kind, of which none has ended when `between` is called."""
    engine.add_request(PROMPT, GREEDY, request_id="greedy")
    engine.add_request(PROMPT[:5], DRAWN, request_id="drawn")
    engine.add_request(PROMPT, SamplingParams(n=2, max_tokens=9, seed=1), request_id="two")
    engine.add_request(PROMPT[3:], BeamSearchParams(beam_width=3, max_tokens=9), request_id="beams")
    engine.add_request(PROMPT[1:], GREEDY, request_id="aborted")
    for _ in range(4):
        assert not any(output.finished for output in engine.step())
    engine.fork("drawn", SamplingParams(max_tokens=12, seed=4), new_id="fork before")
    between()
    engine.abort_request("aborted")
    engine.fork("greedy", SamplingParams(max_tokens=12, seed=5), new_id="fork after")
    return tokens(drain(engine))


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, drain: Drain, hf_greedy: Greedy) -> dict[str, list[list[int]]]:
    """What the uncompiled engine serves."""
    with runtime.compile(model, backend="eager", **KNOBS) as engine:
        found = serve(engine, drain)
    assert found["greedy"] == [hf_greedy(model, PROMPT, 12)]
    assert found.keys() == {"greedy", "drawn", "two", "beams", "fork before", "fork after"}
    return found


def background(engine: Engine) -> BackgroundCompile | None:
    return engine.runner._background


def entries() -> list[str]:
    return [entry.key for entry in compile_cache.entries()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def compiled(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], drain: Drain, empty_cache: Path
) -> dict[str, Any]:
    """What was seen while two processes wanted a graph and its cache was empty: the first engine's is kept at work."""
    with start(model) as first:
        assert (first.seconds.compile < 5, entries()) == (True, [])
        process = background(first)
        assert process is not None
        before = serve(first, drain)
        seen = {"running": process.is_running, "switched": first.switched_at_step, "steps": first.stats().num_steps}
        kept = first.keep_compiling()
    seen |= {"kept": kept, "running after close": process.is_running}
    with start(model) as second:  # its process waits for the first one's
        waiting = background(second)
        assert waiting is not None
        after = serve(second, drain, between=waiting.wait)
        seen |= {"problem": process.problem, "entries": entries(), "served": (before, after)}
        seen |= {"switched then": second.switched_at_step, "eager": second.seconds.eager, "after": background(second)}
        seen |= {"recompiles": second.stats().num_recompiles, "graphs": second.runner.compiled.num_graphs}
        seen |= {"rules": [outcome.rule for outcome in second.report.outcomes]}
    return seen


@pytest.mark.compile
def test_steps_run_before_the_compilation_is_done(
    compiled: dict[str, Any], expected: dict[str, list[list[int]]]
) -> None:
    assert compiled["running"]
    assert compiled["switched"] is None
    assert compiled["steps"] > 10
    assert compiled["served"][0] == expected


@pytest.mark.compile
def test_the_compiled_graph_takes_over_between_two_steps(
    compiled: dict[str, Any], expected: dict[str, list[list[int]]]
) -> None:
    assert compiled["switched then"] == 4
    assert compiled["eager"] > 1
    assert compiled["after"] is None
    assert compiled["served"][1] == expected
    assert (compiled["recompiles"], compiled["graphs"]) == (0, 0)
    assert "add_rms_norm" in compiled["rules"], "what rules did to the graph is reported too"


@pytest.mark.compile
def test_a_compilation_that_was_to_be_kept_goes_on_after_closing(compiled: dict[str, Any]) -> None:
    assert (compiled["kept"], compiled["running after close"], compiled["problem"]) == (True, True, None)
    assert len(compiled["entries"]) == 1


@pytest.mark.compile
@pytest.mark.usefixtures("compiled")
def test_a_cached_graph_needs_no_other_process(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], drain: Drain
) -> None:
    for eager_start in (True, False):
        with start(model, eager_start=eager_start) as engine:
            assert background(engine) is None
            assert not engine.keep_compiling()
            assert serve(engine, drain) == expected
            assert (engine.switched_at_step, engine.seconds.eager) == (None, 0)
            assert engine.runner.compiled is not None


class Controlled:
    """Stands for a background compilation that ends when told to."""

    def __init__(self, job: object) -> None:
        self.started, self.is_running, self.problem, self.stopped = time.perf_counter(), True, None, False

    def wait(self) -> None:
        self.is_running = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def controlled(compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines find no graph when they start, and the cached one once their `Controlled` process has ended."""
    find = graphs.compile.find_compiled
    seen: set[int] = set()

    def at_second_sight(source: Source) -> Any:
        if id(source) in seen:
            return find(source)
        seen.add(id(source))
        return None

    monkeypatch.setattr("graphs.compile.find_compiled", at_second_sight)
    monkeypatch.setattr("runtime.model_runner.BackgroundCompile", Controlled)


@pytest.mark.compile
@pytest.mark.usefixtures("controlled")
@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_no_token_depends_on_when_the_graph_takes_over(
    steps: int, model: PreTrainedModel, expected: dict[str, list[list[int]]]
) -> None:
    """Everything that goes on when it does goes on as it was: pieces of prompts, forks, completions, beams."""
    with start(model, max_num_batched_tokens=16) as engine:
        for name, params in (
            ("greedy", GREEDY),
            ("drawn", DRAWN),
            ("two", SamplingParams(n=2, max_tokens=9, seed=1)),
            ("beams", BeamSearchParams(beam_width=3, max_tokens=9)),
        ):
            prompt = {"drawn": PROMPT[:5], "beams": PROMPT[3:]}.get(name, PROMPT)
            engine.add_request(prompt, params, request_id=name)
        last: dict[str, RequestOutput] = {}
        for index in range(100):
            if index == steps:
                background(engine).wait()
            last |= {output.request_id: output for output in engine.step()}
            engine.check_integrity()
            if not engine.has_unfinished_requests():
                break
        assert engine.switched_at_step == steps
        assert tokens(last) == {name: expected[name] for name in last}
        assert len(last) == 4


@pytest.mark.compile
@pytest.mark.usefixtures("controlled")
def test_new_weights_while_it_compiles_reach_the_graph(
    model: PreTrainedModel, expected: dict[str, list[list[int]]]
) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0) if parameter.ndim > 1 else parameter.flip(0) + 0.1)
    out = other.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
    assert out != expected["greedy"][0]
    with start(model) as engine:
        engine.load_weights(other.state_dict())
        assert engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == out
        background(engine).wait()
        assert engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == out
        assert engine.switched_at_step == 12
        engine.load_weights(model.state_dict())
        assert engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected["greedy"][0]


@pytest.mark.compile
@pytest.mark.usefixtures("controlled")
def test_an_export_waits_for_the_graph(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with start(model) as engine:
        engine.add_request(PROMPT, GREEDY)
        for _ in range(3):
            engine.step()
        engine.export(tmp_path / "artifact", include_weights=True)
        assert engine.switched_at_step == 3
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == expected["greedy"][0]
        assert engine.switched_at_step == 3
    with runtime.load(tmp_path / "artifact", progress=False) as loaded:
        assert loaded.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected["greedy"][0]


@pytest.mark.compile
@pytest.mark.usefixtures("controlled")
def test_closing_ends_what_was_not_to_be_kept(model: PreTrainedModel) -> None:
    for keep in (False, True):
        engine = start(model)
        process = background(engine)
        assert not keep or engine.keep_compiling()
        engine.close()
        assert process.stopped is not keep


def compiler_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Set $CXX to a compiler that says the right version, and else does something else."""
    found = shlex.join(find_compiler().command)
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec {found} "$@";; esac\n{does}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


@pytest.mark.compile
def test_after_a_compilation_that_fails_steps_stay_uncompiled(
    model: PreTrainedModel,
    expected: dict[str, list[list[int]]],
    drain: Drain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler_that(tmp_path, monkeypatch, "echo the disk is full >&2\nexit 3")
    before = entries()
    with start(model) as engine:
        process = background(engine)
        assert process is not None
        assert serve(engine, drain, between=process.wait) == expected
        (warning,) = [record for record in caplog.records if "steps stay uncompiled" in record.message]
        assert warning.levelno == logging.WARNING
        assert "failed twice, with status 3" in warning.message
        assert "the disk is full" in warning.message
        assert (engine.switched_at_step, background(engine), engine.runner.compiled) == (None, None, None)
        with pytest.raises(ValueError, match="nothing is compiled"):
            engine.export(tmp_path / "artifact")
    assert entries() == before


@pytest.mark.compile
def test_closing_the_engine_ends_the_process_and_its_compilers(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(tmp_path, monkeypatch, f"echo $$ >> {tmp_path / 'pids'}\nexec sleep 300")
    before = entries()
    with start(model) as engine:
        process = background(engine)
        assert process is not None
        wait_until(lambda: (tmp_path / "pids").exists() or not process.is_running)
        assert process.is_running, process.problem
        pids = [*map(int, (tmp_path / "pids").read_text().split()), process._process.pid]
        assert all(map(is_alive, pids))
    wait_until(lambda: not any(map(is_alive, pids)), seconds=10)
    assert entries() == before


class ForegroundError(Exception):
    """Raised in place of a compilation in this process."""


@pytest.fixture
def foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no graph be cached, no process start, and a compilation in this one raise ForegroundError."""

    def compile_graph(source: Source, *, progress: bool) -> None:
        raise ForegroundError

    def refuse(job: object) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr("graphs.compile.find_compiled", lambda source: None)
    monkeypatch.setattr("graphs.compile.compile_graph", compile_graph)
    monkeypatch.setattr("runtime.model_runner.BackgroundCompile", refuse)


@pytest.mark.usefixtures("foreground")
def test_what_cannot_be_pickled_is_compiled_here(model: PreTrainedModel) -> None:

    class Local(LlamaForCausalLM):
        """No other process can import it."""

    with (
        pytest.warns(UserWarning, match=r"eager_start is ignored: the model cannot be handed to another .*Local"),
        pytest.raises(ForegroundError),
    ):
        start(Local(model.config).eval())


@pytest.mark.usefixtures("foreground")
def test_a_model_without_key_is_compiled_here(model: PreTrainedModel) -> None:
    """One with hooks: nothing could tell which graph of the cache is its own."""
    hooked = copy.deepcopy(model)
    hooked.model.norm.register_forward_pre_hook(print)
    with pytest.raises(ForegroundError):
        start(hooked)


@pytest.mark.usefixtures("foreground")
def test_where_nothing_is_compiled_it_is_ignored(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], drain: Drain
) -> None:
    with pytest.warns(UserWarning, match="eager_start is ignored: backend='eager' compiles nothing"):
        engine = start(model, backend="eager")
    with engine:
        assert serve(engine, drain) == expected
        assert (engine.switched_at_step, engine.keep_compiling()) == (None, False)


@pytest.mark.usefixtures("foreground")
def test_it_is_off_unless_asked_for(model: PreTrainedModel) -> None:
    with pytest.raises(ForegroundError):
        start(model, eager_start=False)
    with pytest.raises(ValueError, match="eager_start must be True or False, not 'yes'"):
        start(model, eager_start="yes")


@pytest.mark.usefixtures("foreground")
def test_without_a_compiler_no_process_is_started(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.warns(UserWarning, match=r"'/nowhere/g\+\+', which inductor needs .* running uncompiled"):
        engine = start(model)
    with engine:
        assert serve(engine, drain) == expected
