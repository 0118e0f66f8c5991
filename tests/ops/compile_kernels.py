"""Compiles every kernel of ops/triton for GPUs that need not be there, and says what of a GPU each takes.

    python tests/ops/compile_kernels.py            # prints JSON
    python tests/ops/compile_kernels.py --write    # makes it the table that test_triton_compiled.py holds

Run by test_triton_compiled.py in a process of its own, since the other tests' process may interpret Triton.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.triton.library import FILES
from ops.triton.variants import Variant

ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
TABLE = Path(__file__).with_name("triton_resources.json")
WIDE_LOAD = re.compile(
    r"ld\.global[\w.:]*\.(?:v4\.\w32|v2\.\w64)\b"
    r"|cp\.async\.c[ag]\.shared\.global[\w.:]*\s+\[[^\]]+\],\s*\[[^\]]+\],\s*(?:16|0x10)\b"
)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_all() -> dict[str, Any]:
    """The table of this Triton: kernel file -> variant -> architecture -> resources. Raises what compiling raises."""
    variants = {
        (file, variant.name): variant
        for file in sorted(set(FILES.values()))
        for variant in importlib.import_module(f"ops.triton.{file}").COMPILED
    }
    table: dict[str, Any] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # much of the time goes into ptxas
        futures = {
            (*name, f"sm_{architecture}"): pool.submit(resources, variant, architecture)
            for name, variant in variants.items()
            for architecture in ARCHITECTURES
            if architecture in variant.archs
        }
        for (file, name, architecture), future in futures.items():
            table.setdefault(file, {}).setdefault(name, {})[architecture] = future.result()
    return table


def resources(variant: Variant, architecture: int) -> dict[str, int]:
    """What one compiled kernel takes.

    registers: of a thread. shared: bytes of a program, but for what the hardware reserves. local: bytes of a thread in
    local memory, spilled registers among them. wide_loads: instructions that load 16 bytes of global memory at once.
    """
    names = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature[name] for name in names},
        constexprs=dict(variant.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(variant.aligned)},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}
    return {
        "registers": usage["REG"],
        "shared": compiled.metadata.shared,
        "local": usage["STACK"] + usage["LOCAL"],
        "wide_loads": len(WIDE_LOAD.findall(compiled.asm["ptx"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}, other Triton versions' part kept")
    write = parser.parse_args().write
    table = {triton.__version__: compile_all()}
    if write:
        table = (json.loads(TABLE.read_text()) if TABLE.exists() else {}) | table
        text = json.dumps(table, indent=1, sort_keys=True)
        TABLE.write_text(re.sub(r"{([^{}]+)}", lambda innermost: " ".join(innermost[0].split()), text) + "\n")
    else:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
