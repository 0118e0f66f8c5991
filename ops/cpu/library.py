"""Loads the C++ op library, checks it on this machine, and registers its ops as the provider `cpu`."""

import ctypes
import functools
import logging
import os
import warnings

import torch

from ops import reference
from ops.cpu.build import ISA_FLAGS, BuildError, build
from ops.providers import Provider, register
from ops.schema import define, overload

logger = logging.getLogger(__name__)

OPS = ("paged_attention", "write_kv", "linear")
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
ISA_VARIABLE = "PAGEGRAPH_ISA"


class CpuLibrary:
    """The loaded library. Its instruction set is one for the whole process."""

    def __init__(self, path: str) -> None:
        """Load the library at `path`, which registers its kernels with torch. The overloads must be defined."""
        torch.ops.load_library(path)
        self.path = path
        self._library = ctypes.CDLL(path)
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


@functools.cache
def load() -> CpuLibrary:
    """Build the library if needed, load it, and use the widest instruction set that computes correctly.

    $PAGEGRAPH_ISA (plain, avx2 or avx512) caps the choice. Once per process; takes some ms if the library is built.

    Raises BuildError or OSError if it cannot be built or loaded, ValueError for a $PAGEGRAPH_ISA that is unknown or not
    available, RuntimeError if no instruction set computes correctly.
    """
    path = build()
    for op in OPS:
        define(op, "cpu")
    library = CpuLibrary(str(path))
    choose_isa(library, os.environ.get(ISA_VARIABLE))
    logger.info("C++ ops use %s of %s", library.isa, library.isas)
    return library


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
            return
        warnings.warn(
            f"the C++ attention kernels for {isa} are wrong by {error:.1e} on this machine and are not used; "
            f"please report it with the output of lscpu",
            stacklevel=2,
        )
    raise RuntimeError(f"the C++ attention kernels compute wrongly with all of {available}")


def self_check_error() -> float:
    """Return the largest difference to the reference in a small case that takes every path of the kernels: some ms.

    Values are of order 1; a NaN counts as infinite.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        k_cache, v_cache = (torch.randn(24, 16, 2, d, generator=generator).to(dtype) for d in (80, 44))
        table = torch.arange(24).view(1, 24).expand(2, 24)
        lengths = torch.tensor([300, 70])
        for tokens, starts in ((2, [0, 1, 2]), (8, [0, 1, 8])):
            q = torch.randn(tokens, 14, 80, generator=generator)
            args = (q, k_cache, v_cache, table, lengths, torch.tensor(starts), 0.1, 280, 5.0, torch.ones(14))
            difference = overload("paged_attention", "cpu")(*args) - reference.paged_attention(*args)
            worst = max(worst, float(difference.abs().nan_to_num(nan=float("inf")).max()))
        weight, bias = torch.randn(37, 600, generator=generator).to(dtype), torch.randn(37, generator=generator)
        for rows in (1, 2, 7, 70):
            x = torch.randn(rows, 600, generator=generator) / 25
            difference = overload("linear", "cpu")(x, weight, bias) - reference.linear(x, weight, bias)
            worst = max(worst, float(difference.abs().nan_to_num(nan=float("inf")).max()))
    return worst


def register_cpu_providers() -> None:
    """Register the library's ops as provider `cpu`, above the reference, or warn why they are missing."""
    try:
        load()
    except (BuildError, OSError) as error:
        warnings.warn(f"attention runs on the slow reference implementation: {error}", stacklevel=2)
        return
    for op in OPS:
        register(op, "cpu", Provider(devices=frozenset({"cpu"}), priority=10, dtypes=DTYPES))
