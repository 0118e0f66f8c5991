"""What is read of a CPU, and which device can run what was compiled for another."""

from pathlib import Path

import pytest
import torch

from graphs.device import describe, instruction_sets, mismatch

X86 = """\
processor\t: 0
model name\t: a CPU with avx512f in its name
flags\t\t: fpu sse4_2 avx avx2 fma f16c avx512_bf16x
bugs\t\t: avx512f

processor\t: 1
flags\t\t: fpu avx512bw
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"
CPU = {"type": "cpu", "machine": "x86_64", "isa": ["avx2", "fma"]}
GPU = {"type": "cuda", "capability": "9.0", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [(X86, ["avx2", "fma", "f16c"]), (ARM, ["asimd", "bf16", "sve"]), ("processor\t: 0\n", []), ("", [])],
)
def test_instruction_sets_are_those_of_the_first_processor(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert instruction_sets(tmp_path / "cpuinfo") == expected


def test_where_the_system_says_nothing_there_are_no_instruction_sets(tmp_path: Path) -> None:
    assert instruction_sets(tmp_path / "cpuinfo") == []


def test_this_cpu_fits_itself() -> None:
    here = describe(torch.device("cpu"))
    assert here.keys() == {"type", "machine", "isa"}
    assert mismatch(here, here) is None


def test_a_cpu_may_have_more_instruction_sets() -> None:
    assert mismatch(CPU, {**CPU, "isa": ["avx2", "avx512f", "fma"]}) is None
    assert mismatch({**CPU, "isa": []}, CPU) is None


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ({**CPU, "isa": ["avx2", "fma", "amx_tile"]}, CPU, ("isa", "avx2 fma amx_tile", "a CPU without amx_tile")),
        (CPU, {"type": "cpu", "machine": "x86_64"}, ("isa", "avx2 fma", "a CPU without avx2 fma")),
        (CPU, {**CPU, "machine": "aarch64"}, ("machine", "x86_64", "aarch64")),
        (CPU, GPU, ("type", "cpu", "cuda")),
        (GPU, CPU, ("type", "cuda", "cpu")),
        (GPU, {**GPU, "capability": "10.0"}, ("capability", "9.0", "10.0")),
        (GPU, {**GPU, "cuda": "12.8"}, ("cuda", "13.0", "12.8")),
    ],
)
def test_the_first_field_that_differs_is_named(expected: dict, found: dict, difference: tuple) -> None:
    assert mismatch(expected, found) == difference
