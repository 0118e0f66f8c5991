"""What compiled code asks of a device."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Those that inductor or our own ops compile for, if the machine has them, as Linux names them.
_INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "asimd", "bf16", "sve", "sve2"),
)


def describe(device: torch.device) -> dict[str, Any]:
    """A CPU's architecture and instruction sets, or a GPU's compute capability and CUDA's version. JSON."""
    if device.type == "cpu":
        return {"type": "cpu", "machine": platform.machine(), "isa": instruction_sets()}
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {"type": device.type, "capability": capability, "cuda": torch.version.cuda}


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of this CPU that compiled code may use; none where Linux does not say."""
    words: set[str] = set()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        words.update(next((line.split() for line in lines if line.startswith(("flags", "Features"))), ()))
    return [name for name in _INSTRUCTION_SETS if name in words]


def mismatch(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field, as (name, expected, found), by which code for one device cannot run on another; or None.

    A CPU may have more instruction sets than the code was made for.
    """
    for field in sorted(expected, reverse=True):  # the type first, then the machine: they say more than what follows
        value, other = expected[field], found.get(field)
        if field == "isa":
            if missing := [name for name in value if name not in (other or ())]:
                return field, " ".join(value), f"a CPU without {' '.join(missing)}"
        elif value != other:
            return field, value, other
    return None
