"""The C++ op library: registered as the provider `cpu`, loaded and checked on this machine when first chosen."""

import ctypes
import functools
import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ops import reference
from ops.cpu.build import ISA_FLAGS, BuildError, build
from ops.providers import Provider, register
from ops.schema import define, overload

logger = logging.getLogger(__name__)

OPS = (
    "paged_attention",
    "write_kv",
    "linear",
    "grouped_linear",
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "gelu_and_mul",
    "rope_write_kv",
)
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
ISA_VARIABLE = "PAGEGRAPH_ISA"


class CpuLibrary:
    """The loaded library. Its instruction set is one for the whole process.

    Attributes:
        path: the file that it was loaded from.
        sha256: of that file's content.
        is_checked: whether the instruction set in use was chosen by `choose_isa`.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`, which registers its kernels with torch. The overloads must be defined."""
        torch.ops.load_library(path)
        self.path, self.is_checked = path, False
        self.sha256 = _sha256(path)
        self._library = ctypes.CDLL(str(path))
        self._library.pagegraph_isa.restype = ctypes.c_char_p

    @property
    def isas(self) -> list[str]:
        """The instruction sets that this machine can run, from narrow to wide."""
        return [isa for isa in ISA_FLAGS if self._library.pagegraph_has_isa(isa.encode())]

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return bytes(self._library.pagegraph_isa()).decode()

    def use(self, isa: str) -> None:
        """Use that instruction set from the next op call on. Raises ValueError if the machine lacks it."""
        if not self._library.pagegraph_use_isa(isa.encode()):
            raise ValueError(f"instruction set {isa!r} is not available here; these are: {self.isas}")

    def pin_workers(self, cpus: Sequence[int]) -> int:
        """Keep PyTorch's thread i on `cpus[i]`, but for the calling one; returns how many were pinned. Linux."""
        return int(self._library.pagegraph_pin_workers((ctypes.c_int * len(cpus))(*cpus), len(cpus)))


_loaded: CpuLibrary | None = None
_LOADING = threading.RLock()


def load(path: Path | None = None) -> CpuLibrary:
    """Return the library, loaded once per process, with the widest instruction set that computes correctly.

    $PAGEGRAPH_ISA (plain, avx2, avx512, avx512bf16 or amx) caps the choice. The first call takes some ms if the library
    is built.

    Args:
        path: of a library that was built before, here or elsewhere; no compiler is needed. None: the one that is
            loaded, else the one for this machine, which is built if needed.

    Raises BuildError or OSError if it cannot be built or loaded, ValueError for a $PAGEGRAPH_ISA that is unknown or not
    available, or if a library of other content than that of `path` is loaded, RuntimeError if no instruction set
    computes correctly.
    """
    global _loaded
    with _LOADING:
        if _loaded is None:
            path = build() if path is None else path
            _define_overloads()
            _loaded = CpuLibrary(path)
        elif path is not None and _sha256(path) != _loaded.sha256:
            # torch takes each kernel once.
            raise ValueError(
                f"the C++ ops of {path} cannot be loaded: this process uses those of {_loaded.path}, which differ, and "
                "holds one library only; use a new process"
            )
        if not _loaded.is_checked:
            choose_isa(_loaded, os.environ.get(ISA_VARIABLE))
            logger.info("C++ ops use %s of %s", _loaded.isa, _loaded.isas)
        return _loaded


def loaded() -> CpuLibrary | None:
    """The library, if this process has loaded it."""
    return _loaded


def library_file() -> Path:
    """The file of the library that this process uses; loads it as `load` does if none is loaded."""
    return load().path


@functools.cache
def _define_overloads() -> None:
    for op in OPS:
        define(op, "cpu")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def choose_isa(library: CpuLibrary, widest: str | None = None) -> None:
    """Use the widest instruction set, up to `widest` if given, whose results agree with the reference.

    Warns of each that does not. Raises ValueError and RuntimeError as `load` does.
    """
    available = library.isas
    if widest is not None:
        library.use(widest)
        available = available[: available.index(widest) + 1]
    for isa in reversed(available):
        library.use(isa)
        error = self_check_error()
        if error < 1e-4:
            library.is_checked = True
            return
        warnings.warn(
            f"the C++ ops {', '.join(OPS)} for {isa} are wrong by {error:.1e} on this machine and are not used; "
            f"please report it with the output of lscpu",
            stacklevel=2,
        )
    raise RuntimeError(f"the C++ ops {', '.join(OPS)} compute wrongly with all of {available}")


def self_check_error() -> float:
    """Return the largest difference to the reference in a small case that takes every path of the kernels: some ms.

    Values are of order 1; a NaN counts as infinite. Differences of bfloat16 results that their rounding explains do not
    count.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0

    def compare(out: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal worst
        rounding = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
        error = (out.float() - expected).abs() - rounding * expected.abs()
        worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))

    for dtype in (torch.float32, torch.bfloat16):
        k_cache, v_cache = (torch.randn(24, 16, 2, d, generator=generator).to(dtype) for d in (80, 44))
        table = torch.arange(24).view(1, 24).expand(2, 24)
        lengths = torch.tensor([300, 70])
        for tokens, starts in ((2, [0, 1, 2]), (8, [0, 1, 8])):
            q = torch.randn(tokens, 14, 80, generator=generator)
            args = (q, k_cache, v_cache, table, lengths, torch.tensor(starts), 0.1, 280, 5.0, torch.ones(14))
            compare(overload("paged_attention", "cpu")(*args), reference.paged_attention(*args))
        weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((37, 601), (37,)))
        for x_dtype in {torch.float32, dtype}:
            for rows in (1, 2, 7, 33, 70):
                x = (torch.randn(rows, 601, generator=generator) / 25).to(x_dtype)
                out = overload("linear", "cpu")(x, weight, bias.to(x_dtype))
                compare(out, reference.linear(x.float(), weight, bias.float()))
        experts, ends = torch.stack([weight, -weight, weight.flip(0)]), torch.tensor([2, 2, 70], dtype=torch.int32)
        compare(overload("grouped_linear", "cpu")(x, experts, ends), reference.grouped_linear(x.float(), experts, ends))
        gamma, *rope = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((86,), (3, 70), (3, 70)))
        for x_dtype in {torch.float32, dtype}:
            x = torch.randn(3, 4, 86, generator=generator).to(x_dtype)
            compare(overload("rms_norm", "cpu")(x, gamma, 1e-6, 1.0), reference.rms_norm(x.float(), gamma, 1e-6, 1.0))
            normed, total = overload("add_rms_norm", "cpu")(x, x.flip(0), gamma, 1e-6, 0.0)
            compare(total, x.float() + x.flip(0).float())
            compare(normed, reference.rms_norm(total.float(), gamma, 1e-6, 0.0))
            compare(overload("silu_and_mul", "cpu")(x), reference.silu_and_mul(x.float()))
            for tanh in (True, False):
                compare(overload("gelu_and_mul", "cpu")(x, tanh), reference.gelu_and_mul(x.float(), tanh))
            caches, expected = ([torch.zeros(2, 2, 2, 86, dtype=like) for _ in "kv"] for like in (dtype, torch.float32))
            slots = torch.tensor([3, 1, 2])
            out = overload("rope_write_kv", "cpu")(x, x[:, :2], x[:, 2:], *rope, *caches, slots)
            q, (cos, sin) = x.float(), (angles.float() for angles in rope)
            compare(out, reference.rope_write_kv(q, q[:, :2], q[:, 2:], cos, sin, expected[0], expected[1], slots))
            for cache, values in zip(caches, expected, strict=True):
                compare(cache, values)
    return worst


def problem() -> str | None:
    """Load the library, unless one is loaded; return why it cannot be used here, with a warning, or None."""
    return None if _loaded is not None and _loaded.is_checked else _loading_problem()


@functools.cache
def _loading_problem() -> str | None:
    try:
        load()
    except (BuildError, OSError, RuntimeError) as error:
        warnings.warn(f"{', '.join(OPS)} run on the slow reference implementations: {error}", stacklevel=2)
        return str(error)
    return None


def register_cpu_providers() -> None:
    """Register the library's ops as provider `cpu`, above the reference. It is built and loaded on first use."""
    for op in OPS:
        dtypes = DTYPES - {torch.float16} if op in ("linear", "grouped_linear") else DTYPES
        register(op, "cpu", Provider(devices=frozenset({"cpu"}), priority=10, dtypes=dtypes, prepare=problem))
