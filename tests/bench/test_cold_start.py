"""Starts of fresh processes: what each case finds there, what the child says, and what is made of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import runtime
from bench import cold_start, cold_start_child
from bench.cold_start import CASES, PHASES, Setting, environment, main, print_table, run_child, start, summarise
from bench.cold_start_child import Phases
from runtime.engine import Engine

TinyModel = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny llama, without tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no C++ ops are built, which takes long."""
    (tmp_path / "no compiler").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "no compiler"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_our_first_token_and_hugging_faces(
    folder: Path, hf_greedy: Callable[..., list[int]], tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model", str(folder), "--cases", "cold,hugging-face", "--rounds", "1", "--backend", "eager"]
    main([*args, "--dtype", "float32", "--device", "cpu"])
    *table, line = capsys.readouterr().out.splitlines()
    cases = json.loads(line)["cases"]
    assert cases.keys() == {"cold", "hugging-face"}
    assert not any("first tokens differ" in printed for printed in table)
    for case in cases.values():
        assert case["tokens"] == hf_greedy(tiny_model("llama"), [1, 2, 3, 4, 5], 1)
        assert case["total_s"] == pytest.approx(sum(case["phases_s"].values()))
        assert all(case["phases_s"][phase] > 0 for phase in ("start", "imports", "load", "first step"))
        assert case["compiler_runs"] == case["counters"]["graphs"] == 0
        assert case["counters"]["num_modules"] > 500
        assert "transformers.models.llama.modeling_llama" in case["counters"]["modelling_imported"]
    assert cases["cold"]["phases_s"].keys() == set(PHASES)
    assert cases["cold"]["target_s"] == 35.0


def test_phases_follow_each_other_from_the_spawning_on() -> None:
    phases = Phases(time.time() - 1.0)
    began = time.perf_counter()
    for name in ("imports", "load", "imports"):
        time.sleep(0.01)
        phases.end(name)
    assert list(phases.seconds) == ["start", "imports", "load"]
    assert 1.0 <= phases.seconds["start"] < 2.0
    assert phases.seconds["imports"] >= 0.02
    assert sum(phases.seconds.values()) - phases.seconds["start"] <= time.perf_counter() - began + 0.01


def test_a_child_loads_an_artifact_or_makes_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, knobs = [], {"backend": "eager", "num_blocks": 9}

    def load(path: str, *, progress: bool) -> Engine:
        assert path == "artifact"
        return runtime.compile(folder, progress=progress, **knobs)

    monkeypatch.setattr(runtime, "load", load)
    monkeypatch.setattr(Engine, "export", lambda engine, path: exported.append(path))
    task = {"model": str(folder), "artifact": "artifact", "knobs": knobs, "prompt": [1, 2], "spawned": time.time()}
    cold_start_child.main({**task, "what": "load"})
    loaded = json.loads(capsys.readouterr().out)
    assert len(loaded["tokens"]) == 1
    assert loaded["phases"].keys() == set(PHASES)
    cold_start_child.main({**task, "what": "export"})
    assert json.loads(capsys.readouterr().out)["tokens"] == []
    assert exported == ["artifact"]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, str], list[str]]]:
    """For each child that would be run: its task, its variables, and the files in its cache. None is run."""
    seen = []

    def stand_in(task: Mapping[str, Any], variables: Mapping[str, str], limit: float) -> dict[str, Any]:
        cache = Path(variables["PAGEGRAPH_CACHE_DIR"])
        seen.append((dict(task), dict(variables), sorted(path.name for path in cache.rglob("*") if path.is_file())))
        return {"phases": {"start": 0.5, "load": 1.0}, "counters": {"graphs": 0, "num_modules": 9}, "tokens": [7]}

    monkeypatch.setattr(cold_start, "run_child", stand_in)
    return seen


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """With a cache that holds a library, a graph, and a model that no case takes."""
    for name in ("cpu_ops/library.so", "graphs/key/unit-0.pt2", "models/weights"):
        (tmp_path / "cache" / name).parent.mkdir(parents=True)
        (tmp_path / "cache" / name).touch()
    return Setting(
        {"model": "folder", "artifact": "artifact", "knobs": {"dtype": "auto"}, "prompt": "hi"}, tmp_path / "cache", 9.0
    )


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("cold", []),
        ("cold+ops", ["library.so"]),
        ("eager-start", []),
        ("eager-start+ops", ["library.so"]),
        ("cached", ["library.so", "unit-0.pt2"]),
        ("artifact", []),
        ("hugging-face", []),
    ],
)
def test_a_case_finds_only_what_its_name_says(
    name: str, kept: list[str], setting: Setting, children: list[Any]
) -> None:
    result = start(name, setting)
    ((task, variables, found),) = children
    assert found == kept
    assert result["total"] == 1.5
    assert task["what"] == {"artifact": "load", "hugging-face": "hugging face"}.get(name, "compile")
    assert task["knobs"].get("eager_start", False) is name.startswith("eager-start")
    own = ("PAGEGRAPH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
    assert len({variables[variable] for variable in own}) == 4
    assert not any(Path(variables[variable]).exists() for variable in own), "the folders have been removed"
    start(name, setting)
    assert not {variables[variable] for variable in own} & {children[1][1][variable] for variable in own}


def test_only_an_artifact_does_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, case in CASES.items() if not case.has_compiler] == ["artifact"]
    monkeypatch.setenv("CXX", "/usr/bin/g++")
    variables = environment(tmp_path, tmp_path / "cache", has_compiler=False)
    assert "CXX" not in variables
    assert shutil.which("g++", path=variables["PATH"]) is None
    assert shutil.which("sh", path=variables["PATH"]) is None


def test_runs_of_a_compiler_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    compiler = tmp_path / "real" / "g++"
    compiler.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "real"))
    variables = environment(tmp_path, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == ["g++"]
    for number in range(3):
        found = shutil.which("g++", path=variables["PATH"])
        done = subprocess.run([found, "-c", "a b"], env=variables, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3, "-c a b\n")
        assert len((tmp_path / "compilers.log").read_text().splitlines()) == number + 1


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    variables = environment(tmp_path, tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"(?s)no such task failed, with status 1:.*KeyError: 'no such task'"):
        run_child({"what": "no such task"}, variables, 60.0)


def test_a_child_that_takes_too_long_is_ended(folder: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path, tmp_path / "cache")
    task = {"what": "hugging face", "model": str(folder), "knobs": {}, "prompt": [1]}
    with pytest.raises(RuntimeError, match=r"hugging face failed, with status over 0\.2 s"):
        run_child(task, variables, 0.2)


def test_the_table_has_medians_beside_targets(capsys: pytest.CaptureFixture[str]) -> None:
    def run(load: float, runs: int) -> dict[str, Any]:
        counters = {"graphs": 1, "num_modules": 1234}
        phases = {"start": 0.0, "load": load, "first step": 0.25}
        return {"phases": phases, "total": load + 0.25, "compiler_runs": runs, "counters": counters, "tokens": [7]}

    case = summarise("cached", [run(3.0, 5), run(9.0, 5), run(4.0, 6)])
    assert (case["total_s"], case["totals_s"]) == (4.25, [3.25, 9.25, 4.25])
    print_table({"cached": case})
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["total", "target", "load", "first", "step", "C++", "runs", "graphs", "modules"]
    assert line.split() == ["cached", "4.25", "8", "4.00", "0.25", "6", "1", "1234"]


@pytest.mark.parametrize(
    ("cases", "prepared"),
    [
        ("cold,hugging-face", []),
        ("cold,cold+ops", ["compile"]),
        ("artifact", ["export"]),
        ("cached,artifact", ["export"]),
    ],
)
def test_what_cases_take_is_made_once_before(
    folder: Path, cases: str, prepared: list[str], children: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--model", str(folder), "--cases", cases, "--rounds", "2"])
    whats = [task["what"] for task, _, _ in children]
    assert whats[: len(prepared)] == prepared
    assert len(whats) == len(prepared) + 2 * len(cases.split(","))
    assert {tuple(task["prompt"]) for task, _, _ in children} == {(1, 2, 3, 4, 5)}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cases"].keys() == set(cases.split(","))


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "cold,warm"])
    assert "there is no 'warm'; there are cold, cold+ops" in capsys.readouterr().err
