"""torch's header for inductor's C++ kernels, read by the compiler once for all units, while Dynamo is still tracing."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ops.cpu.build import BuildError, run_compiler

_HEADER = "torch/csrc/inductor/cpp_prefix.h"
_KERNELS = ".kernel.cpp"  # how the sources that include it first end
_NOT_WANTED = ("-march=native", "-g1")


class PrecompiledHeader:
    """A context in which the header is precompiled, and used by the commands that `used_by` is given.

    It saves some 3 s a unit, and is ready before the first one, on a core that tracing leaves idle. It is 150 MB large,
    so it goes when the context ends. (The same for the wrappers around kernels slowed tracing by what it saved.)
    options: inductor's, as for the units: the compiler uses a precompiled header under the flags it was made with.
    """

    def __init__(self, pool: ThreadPoolExecutor, options: Mapping[str, Any]) -> None:
        self._pool, self._options = pool, options

    def __enter__(self) -> PrecompiledHeader:
        """Begin to make it."""
        self._folder = tempfile.TemporaryDirectory(prefix="pagegraph-")
        self._file = Path(self._folder.name) / "kernel.h"
        self._file.write_text(f"#include <{_HEADER}>\n")
        self._made: Future[Any] = self._pool.submit(run_compiler, self._command())
        return self

    def __exit__(self, *_: object) -> None:
        if not self._made.cancel():
            self._made.exception()  # the compiler still writes
        self._folder.cleanup()

    def used_by(self, command: list[str]) -> list[str]:
        """The command; with the precompiled header, once that is ready, if its source is of kernels."""
        if any(word.endswith(_KERNELS) for word in command):
            with suppress(BuildError):  # then it includes the header as it is
                self._made.result()
                return [command[0], "-include", str(self._file), *command[1:]]
        return command

    def _command(self) -> list[str]:
        """What inductor would run to precompile a header for ahead-of-time code."""
        from torch._inductor import config
        from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        with config.patch(self._options):
            options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True, precompiling=True)
            builder = CppBuilder(name=str(self._file), sources=str(self._file), BuildOption=options)
            return portable(builder.get_command_line())


def portable(command: str) -> list[str]:
    """The words of one of inductor's compiler commands, but for debug symbols and -march=native.

    The code then runs wherever the instruction set is that inductor names besides.
    """
    return [word for word in shlex.split(command) if word not in _NOT_WANTED]
