"""The check of a GPU: every line of it at tiny sizes on a CPU, and that what breaks a section breaks no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import BUDGETS, OPS
from bench.gpu_sections import SECTIONS
from bench.op_cases import TINY, Case, Maker, cases, copy_of, judge, results
from bench.sections import UNFIT, read, supervise, work
from ops.schema import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
COMPILED = "engine, small, compiled"


def run_check(out: Path, *options: str) -> dict[str, Any]:
    """What the script prints last, in a process of its own."""
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--tiny", *options]
    environment = {**os.environ, "OUT": str(out)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((out / "gpu_check.json").read_text()) == record
    return record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all sections but the one that compiles."""
    only = [option for name in BUDGETS if name != COMPILED for option in ("--only", name)]
    return run_check(tmp_path_factory.mktemp("out"), *only)


def test_every_section_runs_without_a_gpu(record: dict[str, Any]) -> None:
    assert record["problems"] == {}
    assert list(record["sections"]) == [name for name in BUDGETS if name != COMPILED]
    assert all(found["seconds"] > 0 for found in record["sections"].values())


def test_every_op_is_checked_alone_and_replayed_with_other_contents(record: dict[str, Any]) -> None:
    for op in OPS:
        found = record["sections"][f"op {op}"]
        verdicts = {name: verdict for name, verdict in found.items() if isinstance(verdict, dict)}
        alone = {name for name in verdicts if not name.startswith("replayed")}
        assert len(alone) == sum(case.op == op for case in cases(TINY))
        replayed = {name.removeprefix("replayed: ") for name in verdicts} - (verdicts.keys() - alone)
        assert replayed == alone
        assert ("replayed: " + next(iter(alone)) in verdicts) == (found["replayed"] == "yes")
        assert all(verdict["passed"] for verdict in verdicts.values())


def test_what_was_measured_is_in_the_record(record: dict[str, Any]) -> None:
    sections = record["sections"]
    assert torch.__version__.startswith(sections["environment"]["packages"]["torch"])
    row = sections["decode attention"]["batch 1, context 40"]
    assert row["bytes"] == 40 * 2 * TINY.kv_heads * TINY.dim * 4
    assert row["ours"].keys() == {"us", "gb_s", "fraction", "not_captured"}
    assert "varlen" in row["varlen"]["error"]  # it needs a GPU
    assert sections["engine, small"]["float32, graphs: requests equal to plain"] == "5 of 5"
    assert sections["engine, small"]["float32, graphs: steps"]["replayed"] > 0
    engine = sections["engine"]
    assert engine["graphs"]["captured"] == [1, 2]
    assert engine["decode, batch 1"]["executors"].keys() == {"eager", "graph"}
    assert engine["decode, batch 2"]["executors"]["graph"]["replayed"]
    assert engine["batch 1"]["target_ms"] == 4.2
    assert engine["self-check"]["checks"] == engine["self-check"]["same_argmax"] == 4
    assert engine["swap"]["gb_s"] > 0
    assert engine["steps"]["ahead"] > 0
    assert {"greedy", "top_p", "argmax"} < sections["sampling"].keys()
    assert sections["prefill attention"]["24 tokens"].keys() == {"ours", "sdpa"}


@pytest.mark.compile
def test_the_compiled_engine_too(tmp_path: Path) -> None:
    record = run_check(tmp_path, "--only", COMPILED)
    assert record["problems"] == {}
    assert record["sections"][COMPILED]["float32, ahead: requests equal to plain"] == "5 of 5"


def test_the_lists_of_sections_and_ops_agree() -> None:
    assert set(OPS) == SCHEMAS.keys()
    assert BUDGETS.keys() == SECTIONS.keys()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package"))
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().err == "these packages are not installed, and needed: no_such_package\n"


# The judge.

RMS_NORM = next(case for case in cases(TINY) if case.op == "rms_norm")
CPU = torch.device("cpu")


def by_name(name: str) -> Case:
    return next(case for case in cases(TINY) if case.name == name)


@pytest.mark.parametrize("case", cases(TINY), ids=lambda case: case.name)
def test_seeds_change_contents_and_no_shapes(case: Case) -> None:
    first, second = (case.make(Maker(CPU, torch.float32, seed)) for seed in (1, 2))
    tensors = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor)]
    assert all((a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) for a, b in tensors)
    assert not all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases(TINY), ids=lambda case: case.name)
def test_the_specification_is_within_its_own_budget(case: Case, dtype: torch.dtype) -> None:
    arguments = case.make(Maker(CPU, dtype, 3))
    before = copy_of(arguments)
    found = results(case.op, "reference", arguments)
    assert found
    assert judge(case, found, arguments)["passed"]
    for now, then in zip(arguments, before, strict=True):
        if isinstance(now, torch.Tensor):
            torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_an_error_in_a_row_of_small_values_is_found() -> None:
    """Of a sequence of one token the output is as large as its values; of many it is near zero."""
    case = by_name("paged_attention decode")
    arguments = case.make(Maker(CPU, torch.bfloat16, 1))
    (out,) = results(case.op, "reference", arguments)
    rows = out.float().abs().amax((1, 2))
    assert rows.min() < rows.max() / 2
    out[rows.argmin()] += rows.min() / 8
    verdict = judge(case, [out], arguments)
    assert not verdict["passed"]
    assert verdict["share"] > 1


def test_nan_and_other_dtypes_do_not_pass() -> None:
    arguments = RMS_NORM.make(Maker(CPU, torch.float32, 1))
    (out,) = results("rms_norm", "reference", arguments)
    assert judge(RMS_NORM, [out], arguments)["passed"]
    assert not judge(RMS_NORM, [out.double()], arguments)["passed"]
    out[0, 0] = float("nan")
    assert not judge(RMS_NORM, [out], arguments)["passed"]


def test_draws_that_differ_do_not_pass() -> None:
    case = by_name("sample")
    arguments = case.make(Maker(CPU, torch.float32, 1))
    (tokens,) = results("sample", "reference", arguments)
    assert judge(case, [tokens], arguments) == {"different": 0, "of": 3, "passed": True}
    assert not judge(case, [tokens + 1], arguments)["passed"]


# Sections in workers.

WORKER = """
import os, sys, time
from pathlib import Path
from bench.sections import work

def good(note):
    note("value", 7)

def bad(note):
    note("value", 1)
    raise RuntimeError("bad luck")

def dies(note):
    note("value", 2)
    os._exit(11)

def hangs(note):
    note("value", 3)
    time.sleep(100)

sections = {"good": good, "bad": bad, "lost": bad, "dies": dies, "hangs": hangs, "last": good}
file, *names = sys.argv[1:]
lost = lambda: "no GPU any more" if "lost" in Path(file).read_text() else None
sys.exit(work(sections, names, Path(file), lost))
"""


def supervised(tmp_path: Path, budgets: dict[str, float], seconds: float = 60) -> dict[str, dict[str, Any]]:
    script, file = tmp_path / "worker.py", tmp_path / "notes.jsonl"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{WORKER}")

    def command(left: Sequence[str]) -> list[str]:
        return [sys.executable, str(script), str(file), *left]

    return supervise(command, budgets, file, time.monotonic() + seconds, lambda text: None)


def test_what_breaks_a_section_breaks_no_other(tmp_path: Path) -> None:
    names = ("good", "bad", "dies", "hangs", "lost", "last")
    found = supervised(tmp_path, dict.fromkeys(names, 20.0) | {"hangs": 0.5})
    assert list(found) == list(names)
    assert [found[name].get("value") for name in names] == [7, 1, 2, 3, 1, 7]
    assert "error" not in found["good"]
    assert found["bad"]["error"].endswith("RuntimeError: bad luck\n")
    assert found["dies"]["error"] == "the process died with status 11"
    assert found["hangs"]["error"] == "killed: over its 0.5 s"
    assert found["lost"]["worker"] == "no GPU any more"
    assert "error" not in found["last"]


def test_nothing_is_begun_after_the_deadline(tmp_path: Path) -> None:
    found = supervised(tmp_path, {"good": 20.0, "hangs": 20.0, "last": 20.0}, seconds=3)
    assert found["good"]["value"] == 7
    assert found["hangs"]["error"] == "killed: the whole check is out of time"
    assert found["last"] == {"skipped": "out of time"}


def test_a_worker_that_cannot_start_is_not_started_for_ever(tmp_path: Path) -> None:
    def command(left: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(9)"]

    found = supervise(command, {"a": 5.0, "b": 5.0}, tmp_path / "notes", time.monotonic() + 30, lambda text: None)
    assert [found[name]["error"] for name in "ab"] == ["the process died with status 9"] * 2


def test_a_worker_goes_on_after_an_error_unless_it_is_unfit(tmp_path: Path) -> None:
    def broken(note: Any) -> None:
        raise ValueError("no")

    sections = {"a": broken, "b": lambda note: note("x", 1)}
    assert work(sections, ["a", "b"], tmp_path / "fit", lambda: None) == 0
    assert read(tmp_path / "fit")["b"]["x"] == 1
    assert work(sections, ["a", "b"], tmp_path / "unfit", lambda: "broken") == UNFIT
    assert "b" not in read(tmp_path / "unfit")


def test_notes_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text('["a", "x", 1]\n["a", "y", [1, 2')
    assert read(file) == {"a": {"x": 1}}
