"""The provider `triton`: where the kernel of each op lies, and whether this machine can run it."""

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ops.providers import Provider, register
from ops.schema import define

# Op -> the file of ops/triton that has a function of the op's name. Triton takes a second to import, and a kernel's
# decorator looks for TRITON_INTERPRET, so neither happens before the first call.
FILES = {
    "paged_attention": "attention",
    "write_kv": "cache",
    "copy_blocks": "blocks",
    "swap_blocks": "blocks",
    "sample": "sample",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "silu_and_mul": "activation",
    "gelu_and_mul": "activation",
    "rope_write_kv": "cache",
}
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores, asynchronous copies


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of any device: `TRITON_INTERPRET=1`, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def problem() -> str | None:
    """Why the kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if interpreting() or not torch.cuda.is_available():  # on a CPU it is only chosen to be interpreted or compiled
        return None
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0 (Ampere)"
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return "Triton needs a C compiler (gcc or clang, or $CC) to build what launches its kernels"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python.h to build what launches its kernels (the package python3-dev of most systems)"
    return None


def register_triton_providers() -> None:
    """Define and register the provider `triton`: first choice on CUDA; interpreted, on a CPU too, but not unasked."""
    devices = frozenset({"cuda", "cpu"} if interpreting() else {"cuda"})
    for op in FILES:
        kernel = functools.partial(_call, op)
        define(op, "triton", CUDA=kernel, **({"CPU": kernel} if interpreting() else {}))
        priority = -1 if interpreting() else 20
        register(op, "triton", Provider(devices=devices, priority=priority, dtypes=DTYPES, prepare=problem))


def _call(op: str, *args: Any) -> Any:
    tensors = (arg[0] if isinstance(arg, list) and arg else arg for arg in args)
    device = next((arg.device for arg in tensors if isinstance(arg, torch.Tensor) and arg.is_cuda), None)
    with torch.cuda.device(device) if device is not None else nullcontext():  # Triton launches on the current one
        return kernel(op)(*args)


@functools.cache
def kernel(op: str) -> Any:
    """The function of an op, imported now: it takes and returns what the op's schema says."""
    return getattr(importlib.import_module(f"ops.triton.{FILES[op]}"), op)
