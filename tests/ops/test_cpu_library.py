"""Building, loading and choosing the C++ op library. Most tests build with a stand-in for the compiler."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ops import providers
from ops.cpu import build as building
from ops.cpu import library as loading
from ops.cpu.build import (
    BFLOAT16_ISAS,
    ISA_FLAGS,
    SOURCES,
    BuildError,
    build,
    compile_commands,
    find_compiler,
    machine_isas,
    supported_isas,
)

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo stand-in 1.0; exit 0; fi
echo "$@" >> {log}
for argument in "$@"; do last=$argument; done
case "$*" in *{failing}*) echo half > "$last"; echo "it is broken" >&2; exit 3;; esac
sleep 0.02
echo object > "$last"
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(failing)`: puts a compiler in place that fails where its arguments have that word; returns its log."""
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path / "cache"))

    def install(failing="nothing"):
        log = tmp_path / "log"
        log.write_text("")
        compiler = tmp_path / "compiler"
        compiler.write_text(COMPILER.format(log=log, failing=failing))
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return log

    return install


@pytest.fixture
def library():
    """The loaded library, with its instruction set as before afterwards."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    library = loading.load()
    isa = library.isa
    yield library
    library.use(isa)


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "cpu_ops").iterdir() if path.suffix != ".lock")


def test_a_second_build_runs_no_compiler(stand_in, tmp_path):
    log = stand_in()
    path = build()
    calls = log.read_text()
    made = [line for line in calls.splitlines() if "-fsyntax-only" not in line]
    assert len(made) == len(compile_commands(find_compiler(), tmp_path, machine_isas())) + 1
    assert build() == path
    assert log.read_text() == calls
    assert files(tmp_path) == [path.name]


def test_sources_compiler_flags_instruction_sets_and_torch_make_another_library(stand_in, tmp_path, monkeypatch):
    stand_in()
    paths = [build()]
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in (*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")):
        (sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(building, "SOURCES", sources)
    assert build() == paths[0]
    with (sources / "vector.h").open("a") as file:
        file.write("// changed\n")
    paths.append(build())
    monkeypatch.setattr(building, "_FLAGS", (*building._FLAGS, "-g"))
    paths.append(build())
    monkeypatch.setattr(building, "machine_isas", lambda: ["plain"])
    paths.append(build())
    monkeypatch.setattr(torch, "__version__", "2.99")
    paths.append(build())
    (tmp_path / "compiler").write_text((tmp_path / "compiler").read_text().replace("stand-in 1.0", "stand-in 1.1"))
    paths.append(build())
    assert len(set(paths)) == 6


def test_of_many_that_build_at_once_one_does(stand_in, tmp_path):
    log, start = stand_in(), threading.Barrier(4)

    def build_together(_):
        start.wait()
        return build()

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build_together, range(4)))
    assert len(paths) == 1
    assert log.read_text().count("-shared") == 1


@pytest.mark.parametrize("failing", ["write_kv.cpp", "-shared"])
def test_a_failing_compiler_gets_a_second_try_and_leaves_nothing(stand_in, tmp_path, failing):
    log = stand_in(failing)
    with pytest.raises(BuildError, match=r"failed twice, with status 3:\nit is broken"):
        build()
    assert sum(failing in line for line in log.read_text().splitlines()) == 2
    assert files(tmp_path) == []
    stand_in()
    assert build().read_text() == "object\n"


def test_without_a_compiler_the_reference_is_chosen_and_a_warning_says_what_to_install(monkeypatch):
    monkeypatch.setattr(providers, "REGISTRY", {op: dict(names) for op, names in providers.REGISTRY.items()})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(loading, "_loaded", None)
    monkeypatch.setattr(loading, "_loading_problem", loading._loading_problem.__wrapped__)
    loading.register_cpu_providers()
    with pytest.warns(UserWarning, match=r"slow reference.*'no-such-compiler', which is not there\. Install g\+\+"):
        choice = providers.select("linear", torch.device("cpu"))
    assert choice.provider == "reference"
    assert "cpu cannot be used here: no C++ compiler" in choice.reason


def test_the_library_is_the_first_choice_on_a_cpu_for_dtypes_that_it_serves(monkeypatch, library):
    monkeypatch.setattr(providers, "REGISTRY", {op: dict(names) for op, names in providers.REGISTRY.items()})
    loading.register_cpu_providers()
    cpu = torch.device("cpu")
    for op in ("paged_attention", "write_kv"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert providers.select(op, cpu, dtype=dtype).overload is getattr(torch.ops.pagegraph, op).cpu
        assert providers.select(op, cpu, dtype=torch.float64).provider == "reference"
        assert providers.select(op, torch.device("cuda"), dtype=torch.bfloat16).provider != "cpu"


def test_every_instruction_set_of_the_machine_passes_the_self_check(library):
    assert library.isas[0] == "plain"
    assert set(library.isas) <= set(ISA_FLAGS)
    for isa in library.isas:
        library.use(isa)
        assert library.isa == isa
        assert loading.self_check_error() < 1e-5


def test_every_kernel_is_compiled_for_every_instruction_set_and_torch_s_headers_are_read_once(tmp_path):
    commands = compile_commands(building.Compiler(("c++",), ""), tmp_path, list(ISA_FLAGS))
    kernels = [path.stem for path in SOURCES.glob("*_kernels.cpp")]
    assert {path.stem for path in commands} == {
        "others",
        *(f"{kernel}_{isa}" for kernel in kernels for isa in ISA_FLAGS if isa not in BFLOAT16_ISAS),
        *(f"linear_{isa}" for isa in BFLOAT16_ISAS if isa in ISA_FLAGS),
    }
    assert {argument for command in commands.values() for argument in command if argument.endswith(".cpp")} == {
        str(path) for path in SOURCES.glob("*.cpp")
    }
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    assert [path.stem for path, command in commands.items() if include in command] == ["others"]


AVX2 = "fpu sse2 avx fma avx2"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2 avx", ["plain"]),
        ("fpu sse2 avx avx2", ["plain"]),  # AVX2 without fma
        (AVX2, ["plain", "avx2"]),
        (f"{AVX2} avx512f", ["plain", "avx2"]),  # the first AVX-512 machines lack the rest of it
        (f"{AVX512} avx512_bf16 amx_tile", ["plain", "avx2", "avx512", "avx512bf16"]),
        (f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8", list(ISA_FLAGS)),
    ],
)
def test_only_the_instruction_sets_of_the_machine_are_built(stand_in, tmp_path, flags, expected):
    if "amx" not in ISA_FLAGS:
        pytest.skip("this machine is no x86")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    assert machine_isas(cpuinfo) == expected


def test_where_the_machine_does_not_say_what_it_has_all_are_built(tmp_path):
    assert machine_isas(tmp_path / "missing") == list(ISA_FLAGS)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert machine_isas(tmp_path / "cpuinfo") == list(ISA_FLAGS)


def test_what_the_machine_says_is_what_the_processor_answers(library):
    """The library asks it by cpuid; that of AMX also needs the kernel's permission."""
    assert library.isas == [isa for isa in machine_isas() if isa != "amx" or "amx" in library.isas]


ASK = """
import ctypes, sys, torch
from ops.cpu.build import ISA_FLAGS
library = ctypes.CDLL(sys.argv[1])
library.pagegraph_isa.restype = ctypes.c_char_p
has = [isa for isa in ISA_FLAGS if library.pagegraph_has_isa(isa.encode())]
print(library.pagegraph_isa().decode(), *has)
"""


def test_a_library_with_all_instruction_sets_can_be_built_and_uses_those_of_the_machine(library, tmp_path):
    """Unoptimised, which takes half the time, and finds what a compiler or linker can object to."""
    compiler = find_compiler()
    commands = compile_commands(compiler, tmp_path, supported_isas(compiler, list(ISA_FLAGS)))
    for command in commands.values():
        building.run_compiler([argument for argument in command if argument not in ("-O2", "-O3")])
    path = tmp_path / "all.so"
    torch_cpu = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
    building.run_compiler(
        [*compiler.command, "-shared", *map(str, commands), *torch_cpu, "-Wl,-z,defs", "-o", str(path)]
    )
    asked = subprocess.run([sys.executable, "-c", ASK, str(path)], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == [library.isas[-1], *library.isas]


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(stand_in, monkeypatch):
    if "amx" not in ISA_FLAGS:
        pytest.skip("this machine is no x86")
    log = stand_in("-mamx-bf16")
    assert supported_isas(find_compiler(), list(ISA_FLAGS)) == [isa for isa in ISA_FLAGS if isa != "amx"]
    monkeypatch.setattr(building, "machine_isas", lambda: list(ISA_FLAGS))
    build()
    compiled = [line for line in log.read_text().splitlines() if "-fsyntax-only" not in line]
    assert compiled
    assert not any("linear_amx" in line or "-DPAGEGRAPH_HAS_AMX" in line for line in compiled)
    (linear,) = [line for line in compiled if "/linear.cpp" in line]
    assert "-DPAGEGRAPH_HAS_AVX512BF16" in linear


def test_kernels_include_nothing_whose_inline_functions_the_linker_could_mix_up():
    """An inline function of the standard library compiled with AVX-512 could be the one that every caller gets."""
    allowed = {"stddef.h", "stdint.h", "string.h", "immintrin.h"}  # intrinsics are inlined always
    ours = {path.name for path in SOURCES.glob("*.h")}
    kinds = ("kernels", *BFLOAT16_ISAS)
    todo, seen = [path.name for kind in kinds for path in SOURCES.glob(f"*_{kind}.cpp")], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        for included in re.findall(r"#include [<\"]([^>\"]+)", (SOURCES / name).read_text()):
            assert included in allowed | ours, f"{name} includes {included}"
            if included in ours - seen:
                todo.append(included)
    assert "vector.h" in seen


def test_a_wrong_result_means_the_next_narrower_instruction_set(monkeypatch, library):
    if len(library.isas) == 1:
        pytest.skip("this machine has one instruction set only")
    monkeypatch.setattr(loading, "self_check_error", lambda: 0.0 if library.isa == "plain" else 0.5)
    with pytest.warns(UserWarning, match=r"ops paged_attention, .* for \w+ are wrong by 5.0e-01"):
        loading.choose_isa(library)
    assert library.isa == "plain"
    monkeypatch.setattr(loading, "self_check_error", lambda: float("inf"))
    with (
        pytest.warns(UserWarning, match="wrong by inf"),
        pytest.raises(RuntimeError, match=r"wrongly with all of \['plain'"),
    ):
        loading.choose_isa(library)


def test_the_choice_can_be_capped(library):
    loading.choose_isa(library, "plain")
    assert library.isa == "plain"
    with pytest.raises(ValueError, match=r"'sse9' is not available here; these are: \['plain'"):
        loading.choose_isa(library, "sse9")


def test_threads_are_those_of_torch(library):
    """It brings no OpenMP of its own: its parallel loops run in torch's."""
    assert b"gomp" not in library.path.read_bytes()


def test_cxx_may_be_a_command_with_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "env c++")
    compiler = building.find_compiler()
    assert compiler.command == ("env", "c++")
    assert compiler.version == building.Compiler(("c++",), building.run_compiler(["c++", "--version"])).version


FROM_A_FILE = """
import sys
from pathlib import Path
from ops.cpu import library as loading
path, when = Path(sys.argv[1]), sys.argv[2]
assert when == "at once" or "no C++ compiler" in loading.problem()
library = loading.load(path)
assert loading.problem() is None
assert loading.library_file() == path
assert loading.load() is library and loading.load(path.with_name("copy.so")) is library
assert loading.self_check_error() < 1e-5
try:
    loading.load(path.with_name("other.so"))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("when", ["at once", "after the reference was chosen"])
def test_a_library_that_was_built_elsewhere_is_loaded_without_a_compiler(library, tmp_path, when):
    path = tmp_path / "artifact.so"
    content = library.path.read_bytes()
    for name, data in ((path.name, content), ("copy.so", content), ("other.so", content + b" ")):
        (tmp_path / name).write_bytes(data)
    environment = {**os.environ, "PAGEGRAPH_CACHE_DIR": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    command = [sys.executable, "-c", FROM_A_FILE, str(path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert ("slow reference" in done.stderr) is (when != "at once")
    assert f"the C++ ops of {tmp_path / 'other.so'} cannot be loaded" in done.stdout
    assert f"uses those of {path}, which differ" in done.stdout
    assert not (tmp_path / "cache").exists()


def test_an_instruction_set_that_could_not_be_chosen_is_chosen_by_the_next_load(library, monkeypatch):
    monkeypatch.setattr(library, "is_checked", False)
    monkeypatch.setenv(loading.ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match="'sse9' is not available"):
        loading.load()
    monkeypatch.setenv(loading.ISA_VARIABLE, "plain")
    assert loading.load() is library
    assert (library.isa, library.is_checked) == ("plain", True)
