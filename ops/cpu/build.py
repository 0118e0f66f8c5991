"""Builds the C++ op library with the machine's compiler, for the instruction sets that the machine has.

Once per sources, compiler, flags, instruction sets and torch version.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512BF16 = (*_AVX512, "-mavx512bf16")
_X86_ISAS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512BF16,
    "amx": (*_AVX512BF16, "-mamx-tile", "-mamx-bf16"),
}
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    **(_X86_ISAS if platform.machine() == "x86_64" else {}),
}
"""Compiler flags per instruction set, from narrow to wide: each includes those before it."""

BFLOAT16_ISAS = ("avx512bf16", "amx")
"""Those that add products of bfloat16, in files of their own. A compiler may not know them."""

_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-DTORCH_TARGET_VERSION=0x020b000000000000")
# Vectors are written out: the compiler's own attempts around them only cost time. Contraction makes a * b + c one fma.
_KERNEL_FLAGS = ("-O3", "-fno-tree-vectorize", "-ffp-contract=fast", "-Wno-psabi")


class BuildError(RuntimeError):
    """The library cannot be built here: no compiler, or one that fails. The message says what it printed."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that runs it, and what `--version` prints."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """Return $CXX, or else the first of g++, c++ and clang++ on the PATH. Raises BuildError if there is none."""
    named = os.environ.get("CXX")
    commands = [tuple(shlex.split(named))] if named else [("g++",), ("c++",), ("clang++",)]
    command = next((command for command in commands if command and shutil.which(command[0])), None)
    if command is None:
        tried = ", ".join(command[0] for command in commands if command)
        where = f"$CXX names {named!r}, which is not there" if named else f"none of {tried} is on the PATH"
        raise BuildError(f"no C++ compiler: {where}. Install g++ 11 or newer (Debian: apt install g++), or set CXX.")
    return Compiler(command, run_compiler([*command, "--version"]))


def build(compiler: Compiler | None = None) -> Path:
    """Return the path of the library, and build it if the cache folder lacks it: some 10 s on two cores.

    Safe in many processes at once: one builds, the others wait, and a file appears under its name only when complete.
    Side effects: files below `cache_folder() / "cpu_ops"`, a log line.
    Raises BuildError if there is no compiler, or if it fails twice; OSError if the folder cannot be written.
    """
    compiler = compiler or find_compiler()
    folder = cache_folder() / "cpu_ops"
    isas = machine_isas()
    library = folder / f"pagegraph_cpu_{_key(compiler, isas)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            logger.info("building the C++ ops with %s, once on this machine", compiler.command[0])
            start = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                os.replace(_compile(compiler, Path(scratch), supported_isas(compiler, isas)), library)
            logger.info("built %s in %.1f s", library, time.perf_counter() - start)
    return library


def machine_isas(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of ISA_FLAGS that the machine has, by the flags in `cpuinfo`; all where it lists none.

    One too many costs time to build, and the library asks the processor again before it uses it.
    """

    def plain_name(flag: str) -> str:
        return flag.replace("_", "").replace("-", "")  # the kernel's avx512_bf16 is the compiler's avx512bf16

    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    line = next((line for line in text.splitlines() if line.startswith("flags")), None)
    if line is None:
        return list(ISA_FLAGS)
    known = set(map(plain_name, line.split()))
    return [isa for isa, flags in ISA_FLAGS.items() if {plain_name(flag.removeprefix("-m")) for flag in flags} <= known]


def supported_isas(compiler: Compiler, isas: Sequence[str]) -> list[str]:
    """Those of `isas` whose flags the compiler knows, by a run of it for each of BFLOAT16_ISAS."""

    def is_known(isa: str) -> bool:
        command = [*compiler.command, *ISA_FLAGS[isa], "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    return [isa for isa in isas if isa not in BFLOAT16_ISAS or is_known(isa)]


def compile_commands(compiler: Compiler, objects: Path, isas: Sequence[str]) -> dict[Path, list[str]]:
    """The commands that make the object files in folder `objects`.

    *_kernels.cpp are compiled per instruction set of `isas` that is not of BFLOAT16_ISAS, *_<isa>.cpp for that one of
    them. All others are compiled once, as one file, since reading torch's headers takes longer than the rest of it:
    their names must not collide. The slowest come first.
    """
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    defines = [f"-DPAGEGRAPH_HAS_{isa.upper()}" for isa in isas if isa != "plain"]
    kernels: dict[str, tuple[Path, str]] = {}
    others = []
    for source in sorted(SOURCES.glob("*.cpp")):
        kind = source.stem.rpartition("_")[2]
        if kind == "kernels":
            kernels |= {f"{source.stem}_{isa}": (source, isa) for isa in isas if isa not in BFLOAT16_ISAS}
        elif kind not in BFLOAT16_ISAS:
            others += ["-include", str(source)]
        elif kind in isas:
            kernels[source.stem] = (source, kind)
    flags = {"others": ["-O2", include, *defines, *others, "-x", "c++", os.devnull]}
    for name, (source, isa) in kernels.items():
        flags[name] = [*_KERNEL_FLAGS, f"-DPAGEGRAPH_ISA={isa}", *ISA_FLAGS[isa], str(source)]
    return {
        objects / f"{name}.o": [*compiler.command, *_FLAGS, *own, "-c", "-o", str(objects / f"{name}.o")]
        for name, own in flags.items()
    }


def _compile(compiler: Compiler, scratch: Path, isas: Sequence[str]) -> Path:
    """Compile for `isas` and link in folder `scratch`; returns the library there."""
    commands = compile_commands(compiler, scratch, isas)
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(num_cpus) as pool:
        list(pool.map(run_compiler, commands.values()))
    library = scratch / "library.so"
    # Without an rpath: where this is loaded, torch's library of that name already is.
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    run_compiler([*compiler.command, "-shared", *map(str, commands), libraries, "-ltorch_cpu", "-o", str(library)])
    return library


def run_compiler(command: Sequence[str]) -> str:
    """Run a compiler command and return its output. A failure may be a lack of memory, so it gets a second try."""
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
    raise BuildError(f"{' '.join(command)} failed twice, with status {done.returncode}:\n{done.stdout}{done.stderr}")


def _key(compiler: Compiler, isas: Sequence[str]) -> str:
    """A hash of everything that the library depends on."""
    digest = hashlib.sha256()
    flags = (_FLAGS, _KERNEL_FLAGS, [(isa, ISA_FLAGS[isa]) for isa in isas])
    for part in (compiler.version, repr(flags), torch.__version__, platform.machine()):
        digest.update(f"{len(part)}:{part}".encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(f"{source.name}:{source.stat().st_size}:".encode() + source.read_bytes())
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file, which is made if needed and stays."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
