"""From pieces of a graph to native code: AOTInductor packages, one file a unit.

A package takes weights and caches as inputs and holds none. It loads in some ms, without inductor and a C++ compiler.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from graphs import compile_cache
from graphs.compiled_graph import unit_file
from graphs.precompiled_header import PrecompiledHeader, portable
from graphs.program import Unit
from ops.cache_folder import cache_folder
from ops.cpu.build import run_compiler
from ops.cpu.library import loaded

logger = logging.getLogger(__name__)

# dynamic_threads: the number of threads is the process's when it runs, not that of the machine that compiled.
# Inductor's own precompiled headers lie in /tmp for good, and are made while all else waits.
_OPTIONS = {
    "cpp.dynamic_threads": True,
    "aot_inductor.package": True,
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


# What calls a unit's kernels: quicker to compile by 2 s, and slower by some percent of a step if all units had it.
_SELDOM_CALLED = {"aot_inductor.compile_wrapper_opt_level": "O0"}


class AheadOfTimeError(RuntimeError):
    """Inductor cannot compile something ahead of time. The message has its reason."""


def use_lasting_compiler_cache() -> None:
    """Keep inductor's files under our cache folder, unless the user chose a place, or nothing can be written there.

    Its own default is in /tmp.

    Side effect: sets TORCHINDUCTOR_CACHE_DIR in this process's environment.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch itself puts its default into the environment when torch._dynamo is imported: that is not the user's choice.
    is_default = os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir())
    if is_default and compile_cache.problem() is None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "inductor")


class UnitCompiler:
    """A context that compiles units ahead of time, to packages.

    many_units: precompile torch's header for kernels from the start on, on a core that tracing leaves idle.
    """

    def __init__(self, device: torch.device, *, many_units: bool) -> None:
        self._device = device
        self._options = {**_OPTIONS, "cpp.vec_isa_ok": _isa_is_known(device) or None}
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(num_cpus)
        self._header: PrecompiledHeader | None = None
        if many_units and device.type == "cpu" and num_cpus > 1:
            self._header = PrecompiledHeader(self._pool, self._options)
        self._exit = ExitStack()

    def __enter__(self) -> UnitCompiler:
        """Begin with the header."""
        from torch._inductor import config
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        use_lasting_compiler_cache()
        with config.patch(self._options):
            pick_vec_isa()  # which may build programs to probe with: before builds are deferred
        if self._header is not None:
            self._exit.enter_context(self._header)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)  # first: what is left in the folders is removed
        self._exit.close()

    @torch.no_grad()
    def compile(
        self, units: Sequence[fx.GraphModule], calls: Sequence[int], folder: Path, tell: Callable[[str], None]
    ) -> None:
        """Compile each unit to `unit_file(folder, its index)`. calls: how often each is called in a step.

        On a CPU inductor makes the code of one unit while the C++ compiler is at work on those before, on all cores.
        `tell` is given what is being done.
        Raises BuildError, with the C++ compiler's output, if that fails twice, and AheadOfTimeError if inductor fails.
        """
        from torch._inductor import aot_compile
        from torch._inductor.package import package_aoti

        packages = []
        if self._device.type == "cpu":
            self._exit.enter_context(_private_inductor_folder())
        for index, unit in enumerate(units):
            tell(f"inductor, unit {index + 1} of {len(units)}, {len(unit.graph.nodes)} nodes")
            builds = _Builds(self._pool, self._header)
            options = {**self._options, **(_SELDOM_CALLED if len(units) > 1 and calls[index] == 1 else {})}
            with builds.deferred() if self._device.type == "cpu" else nullcontext():
                try:
                    packages.append((aot_compile(unit, _examples(unit), options=options), builds))
                except Exception as error:  # inductor has no class of its own for what it does not know
                    raise AheadOfTimeError(f"inductor cannot compile it ahead of time: {error}") from error
        for index, (files, builds) in enumerate(packages):
            tell(f"the C++ compiler, unit {index + 1} of {len(units)}")
            builds.finish()
            package_aoti(str(unit_file(folder, index)), files)


@torch.no_grad()
def compile_in_memory(units: Sequence[fx.GraphModule], tell: Callable[[str], None]) -> list[Unit]:
    """Compile each unit for this process alone: for what inductor cannot compile ahead of time."""
    from torch._inductor.compile_fx import compile_fx

    use_lasting_compiler_cache()

    def compiled(unit: fx.GraphModule) -> Unit:
        function = compile_fx(unit, _examples(unit))
        return lambda tensors: function(*tensors)

    made = []
    for index, unit in enumerate(units):
        tell(f"inductor, unit {index + 1} of {len(units)}, {len(unit.graph.nodes)} nodes")
        made.append(compiled(unit))
    return made


def _examples(unit: fx.GraphModule) -> tuple[Tensor, ...]:
    return tuple(node.meta["val"] for node in unit.graph.find_nodes(op="placeholder"))


def _isa_is_known(device: torch.device) -> bool:
    """Whether our own ops have shown already that the compiler and the CPU know what inductor would probe for.

    Its probe compiles and runs a program, which takes seconds. For instruction sets wider than AVX2 it asks more of the
    compiler than we do, so there it probes.
    """
    library = loaded()
    is_avx2 = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return is_avx2 and library is not None and "avx2" in library.isas


class _Builds:
    """The runs of the C++ compiler that inductor wants for a unit, done in a pool: objects first, then the library."""

    def __init__(self, pool: ThreadPoolExecutor, header: PrecompiledHeader | None) -> None:
        self._pool, self._header = pool, header
        self._commands: list[list[str]] = []
        self._objects: list[Future[Any]] = []

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note what inductor would build while this is entered, and begin with all but the last, which links."""
        from torch._inductor.cpp_builder import CppBuilder

        thread = threading.get_ident()

        def note(builder: CppBuilder) -> None:
            if threading.get_ident() != thread:  # a compilation that is none of ours
                return build(builder)
            command = portable(builder.get_command_line())
            # Inductor goes on as if this had been built: it removes the object, and a source in assembler.
            Path(builder.get_target_file_path()).touch()
            self._commands.append([_kept(word) if word.endswith(".S") else word for word in command])
            return None

        build, CppBuilder.build = CppBuilder.build, note
        try:
            yield
        finally:
            CppBuilder.build = build
        self._objects = [self._pool.submit(self._run, command) for command in self._commands[:-1]]

    def finish(self) -> None:
        """Wait for the objects and link them. Raises BuildError."""
        for built in self._objects:
            built.result()
        if self._commands:
            run_compiler(self._commands[-1])

    def _run(self, command: list[str]) -> None:
        run_compiler(command if self._header is None else self._header.used_by(command))


@contextmanager
def _private_inductor_folder() -> Iterator[None]:
    """Have inductor write to a folder of its own, which goes at the end.

    Its names are hashes of content, and it holds a lock while it builds: another process that makes the same code would
    remove objects which are linked after that.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="pagegraph-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _kept(source: str) -> str:
    """A copy of a source file, under another name."""
    return shutil.copyfile(source, f"{source.removesuffix('.S')}.kept.S")
