"""The compile cache: one process makes, others find; damaged entries and killed writers do no harm."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs import compile_cache
from graphs.compile_cache import clear, entries, find, find_or_make
from graphs.compiled_graph import CompiledGraph, unit_file
from graphs.program import Call, Program
from graphs.sealed_folder import MANIFEST, seal
from models.report import RuleOutcome

ROOT = Path(__file__).parents[2]
PROGRAM = Program(
    num_caches=2, state=("weight",), num_constants=0, calls=(Call(0, (0, 1), (30,), ()),), results=(30, 30)
)
OUTCOMES = (RuleOutcome("add_rms_norm", "model.layers.0", True, "fits"),)
# What the processes of the tests run: one that makes an entry, and says so in the file "made".
SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from graphs import compile_cache
from graphs.compiled_graph import CompiledGraph
from graphs.program import Program

def make(folder):
    with open({made!r}, "a") as file:
        file.write("made\\n")
    (folder / "unit-0.pt2").write_bytes(b"code of another process")
    print("making", flush=True)
    time.sleep({seconds})
    return CompiledGraph(folder, Program.from_json({program!r}), ())

assert compile_cache.problem() is None
graph = compile_cache.find_or_make("key", "a model", make)
print(graph.folder, (graph.folder / "unit-0.pt2").read_text(), flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache's graphs, which is there."""
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    assert compile_cache.problem() is None
    return compile_cache.graphs_folder()


class Maker:
    """Makes entries without a compiler. calls: how often it did."""

    def __init__(self, code: bytes = b"code") -> None:
        self.calls, self._code = 0, code

    def __call__(self, folder: Path) -> CompiledGraph:
        self.calls += 1
        unit_file(folder, 0).write_bytes(self._code)
        return CompiledGraph(folder, PROGRAM, OUTCOMES)


def never(folder: Path) -> CompiledGraph:
    raise AssertionError("there was something in the cache")


def start(folder: Path, seconds: float) -> subprocess.Popen:
    """A process that makes the entry "key", for so many seconds."""
    made, program = str(folder.parent / "made"), PROGRAM.to_json()
    code = SCRIPT.format(root=str(ROOT), made=made, seconds=seconds, program=program)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_what_was_made_is_found(folder: Path) -> None:
    make = Maker()
    assert find("key") is None
    made = find_or_make("key", "a model", make)
    assert unit_file(made.folder, 0).read_bytes() == b"code"
    assert made == find("key") == find_or_make("key", "a model", never)
    assert made == CompiledGraph(folder / "key", PROGRAM, OUTCOMES)
    assert make.calls == 1
    assert find("another") is None


def test_a_failure_leaves_nothing(folder: Path) -> None:
    def fail(scratch: Path) -> CompiledGraph:
        unit_file(scratch, 0).write_bytes(b"half")
        raise MemoryError("no room for g++")

    with pytest.raises(MemoryError, match="no room"):
        find_or_make("key", "a model", fail)
    assert [path.name for path in folder.iterdir()] == ["key.lock"]
    assert find("key") is None
    assert find_or_make("key", "a model", Maker()) == find("key")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "unit": lambda entry: flip(unit_file(entry, 0)),
    "manifest": lambda entry: flip(entry / MANIFEST),
    "no manifest": lambda entry: (entry / MANIFEST).unlink(),
    "no unit": lambda entry: unit_file(entry, 0).unlink(),
    "additional file": lambda entry: (entry / "more").write_text("?"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again_with_a_message(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_or_make("key", "a model", Maker())
    DAMAGES[damage](folder / "key")
    with caplog.at_level(logging.WARNING):
        assert find("key") is None
        assert "key cannot be used, so the model is compiled anew" in caplog.text
        caplog.clear()
        find_or_make("key", "a model", Maker(b"new"))
    assert "removing the compile cache's entry" in caplog.text
    assert str(folder / "key") in caplog.text
    assert unit_file(find_or_make("key", "a model", never).folder, 0).read_bytes() == b"new"


def test_an_entry_of_an_unknown_form_is_made_again(folder: Path) -> None:
    (folder / "key").mkdir()
    seal(folder / "key", {"description": "of another version"})
    assert find("key") is None
    assert find_or_make("key", "a model", Maker()) == find("key")


def test_of_two_processes_one_makes_and_the_other_waits(folder: Path) -> None:
    first, second = start(folder, 1.0), start(folder, 1.0)
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(map(len, outputs)) == [1, 2]  # only one has said that it is making
    assert outputs[0][-1] == outputs[1][-1] == f"{folder / 'key'} code of another process"
    assert (folder.parent / "made").read_text() == "made\n"


def test_a_killed_writer_does_no_harm(folder: Path) -> None:
    with start(folder, 600.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        assert find("key") is None
        assert entries() == []
        os.kill(process.pid, signal.SIGKILL)
    assert find("key") is None
    assert unit_file(find_or_make("key", "a model", Maker()).folder, 0).read_bytes() == b"code"
    assert sorted(path.name for path in folder.iterdir()) == ["key", "key.lock"]


def test_entries_the_newest_first(folder: Path) -> None:
    assert entries() == []
    for index, name in enumerate(("old", "new", "damaged")):
        find_or_make(name, f"the {name} one", Maker(b"1234" * 100))
        os.utime(folder / name / MANIFEST, (1000 + index, 1000 + index))
    (folder / "damaged" / MANIFEST).write_text("{}")
    os.utime(folder / "damaged" / MANIFEST, (500, 500))
    found = entries()
    assert [entry.key for entry in found] == ["new", "old", "damaged"]
    assert [entry.description for entry in found] == ["the new one", "the old one", "damaged"]
    assert (found[0].path, found[0].modified) == (folder / "new", 1001)
    assert found[0].nbytes == 400 + (folder / "new" / MANIFEST).stat().st_size
    assert json.loads((folder / "new" / MANIFEST).read_text())["content"]["description"] == "the new one"


def test_clear_removes_graphs_and_the_files_of_inductor_only(folder: Path) -> None:
    assert clear() == 0
    assert compile_cache.problem() is None
    manifest = find_or_make("key", "a model", Maker(b"1234")).folder / MANIFEST
    size = manifest.stat().st_size
    for name in ("inductor", "cpu_ops", "models"):
        (folder.parent / name).mkdir()
        (folder.parent / name / "file").write_bytes(b"12345")
    assert clear() == 4 + size + 5
    assert sorted(path.name for path in folder.parent.iterdir()) == ["cpu_ops", "graphs", "models"]
    assert [path.name for path in folder.iterdir()] == ["key.lock"]  # for it may be held
    assert (find("key"), entries()) == (None, [])


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file") in (compile_cache.problem() or "")
    assert (find("key"), entries()) == (None, [])
