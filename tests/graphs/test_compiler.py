"""Compiling units ahead of time: the C++ compiler's failures, and where inductor keeps its files."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from graphs.compiled_graph import load_unit, unit_file
from graphs.compiler import AheadOfTimeError, UnitCompiler, use_lasting_compiler_cache
from ops.cpu.build import BuildError, find_compiler

CPU = torch.device("cpu")
# A compiler that notes each object it is to make, and fails for the first `failures` of them.
FAILING = """#!/bin/sh
case " $* " in *" -c "*)
    echo "$@" >> {log}
    i=0
    while [ $i -lt {failures} ]; do  # several run at once: a folder can be made but once
        if mkdir {log}.$i 2> /dev/null; then echo "no space left on this device" >&2; exit 1; fi
        i=$((i + 1))
    done;;
esac
exec {compiler} "$@"
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """`failing(n)`: inductor gets a compiler that fails for the first n objects; returns the log of all of them."""
    found = shutil.which(find_compiler().command[0])
    pick_vec_isa()  # inductor's probe for instruction sets: with the compiler that there is
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    script, log = tmp_path / "g++", tmp_path / "log"

    def use(failures: int) -> Path:
        script.write_text(FAILING.format(log=log, failures=failures, compiler=found))
        script.chmod(0o755)
        return log

    with config.patch({"cpp.cxx": (None, str(script))}):
        yield use


def unit(function: Callable[[torch.Tensor], torch.Tensor]) -> fx.GraphModule:
    """A piece of a graph, as `partition` makes them."""
    traced = fx.symbolic_trace(lambda x: (function(x),))
    for node in traced.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.ones(4)
    return traced


def compile_one(folder: Path, made: fx.GraphModule) -> None:
    with UnitCompiler(CPU, many_units=False) as compiler:
        compiler.compile([made], [1], folder, lambda text: None)


@pytest.mark.compile
def test_a_compiler_that_fails_once_is_run_again(tmp_path: Path, failing: Callable[[int], Path]) -> None:
    log = failing(1)
    compile_one(tmp_path, unit(lambda x: x.sin() * 2))
    commands = log.read_text().splitlines()
    assert len(commands) == len(set(commands)) + 1
    x = torch.arange(4.0)
    (found,) = load_unit(unit_file(tmp_path, 0), CPU)([x])
    torch.testing.assert_close(found, x.sin() * 2)


def test_a_compiler_that_always_fails_is_reported_with_its_output(
    tmp_path: Path, failing: Callable[[int], Path]
) -> None:
    log = failing(1000)
    with pytest.raises(BuildError, match=r"(?s)failed twice, with status 1:.*no space left on this device"):
        compile_one(tmp_path, unit(lambda x: x.cos() * 2))
    commands = log.read_text().splitlines()
    assert all(commands.count(command) == 2 for command in commands)
    assert not unit_file(tmp_path, 0).exists()


def test_what_inductor_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **knobs: object) -> None:
        raise NotImplementedError("an op of the future")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("torch._inductor.aot_compile", refuse)
    with pytest.raises(AheadOfTimeError, match="cannot compile it ahead of time: an op of the future"):
        compile_one(tmp_path, unit(lambda x: x + 1))


def test_compiled_files_last_unless_the_user_chose_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    for before, after in (
        (default_cache_dir(), str(tmp_path / "inductor")),
        (str(tmp_path / "mine"), str(tmp_path / "mine")),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        use_lasting_compiler_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after


def test_compiled_files_do_not_go_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    use_lasting_compiler_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
