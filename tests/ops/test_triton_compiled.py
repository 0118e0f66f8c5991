"""The Triton kernels compiled for sm_80, sm_90 and sm_100, on any machine: nothing spills, registers as they were."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.triton.library import FILES

SCRIPT = Path(__file__).with_name("compile_kernels.py")
TABLE = Path(__file__).with_name("triton_resources.json")
pytestmark = pytest.mark.compile  # 40 s, once Triton's cache has all of it 6
WRITE = f"python tests/ops/{SCRIPT.name} --write"


@pytest.fixture(scope="module")
def compiled():
    """The Triton version, and "file: variant, architecture" -> resources."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ((version, table),) = json.loads(run.stdout).items()
    return version, flat(table)


def flat(table):
    return {
        f"{file}: {variant}, {architecture}": resources
        for file, variants in table.items()
        for variant, architectures in variants.items()
        for architecture, resources in architectures.items()
    }


def test_every_file_has_kernels_for_every_architecture(compiled):
    found = {(kernel.split(":")[0], kernel.rsplit(", ")[-1]) for kernel in compiled[1]}
    assert found == {(file, architecture) for file in FILES.values() for architecture in ("sm_80", "sm_90", "sm_100")}


def test_no_kernel_uses_local_memory(compiled):
    assert {kernel: found["local"] for kernel, found in compiled[1].items() if found["local"]} == {}


def test_decode_attention_loads_16_bytes_at_once(compiled):
    decode = {kernel: found["wide_loads"] for kernel, found in compiled[1].items() if ": decode" in kernel}
    assert decode
    assert [kernel for kernel, count in decode.items() if count == 0] == []


def test_registers_and_shared_memory_are_those_of_the_table(compiled):
    version, found = compiled
    known = json.loads(TABLE.read_text())
    if version not in known:
        pytest.skip(f"{TABLE.name} knows Triton {sorted(known)}, this is {version}; to add it: {WRITE}")
    expected = flat(known[version])
    changed = {
        kernel: (expected.get(kernel, "missing in the table"), found.get(kernel, "no such kernel"))
        for kernel in sorted(expected.keys() | found.keys())
        if expected.get(kernel) != found.get(kernel)
    }
    report = "\n".join(f"{kernel}: {before} -> {after}" for kernel, (before, after) in changed.items())
    assert not changed, f"if this is meant: {WRITE}\n{report}"
