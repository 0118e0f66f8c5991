"""Memory for weights and caches: on a CPU one region on transparent huge pages, elsewhere torch's own."""

import logging
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20  # bytes; of x86-64, and of arm64 with pages of 4 KiB
_ALIGNMENT = 64  # bytes, a cache line
_SMALLEST = 8 * HUGE_PAGE  # below, up to a whole page of waste is worse than what huge pages bring


@dataclass(frozen=True)
class Spec:
    """A tensor to be allocated: shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, rounded up to whole cache lines, one at least."""
        return max(1, -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT)) * _ALIGNMENT


def allocate(specs: Sequence[Spec], device: torch.device) -> list[Tensor]:
    """Allocate contiguous tensors with any content, on a CPU side by side in one region.

    The region is private anonymous memory for which the kernel is asked for transparent huge pages (`madvise`, so it
    works where they are not the system's default): translating addresses then costs 512 times fewer page-table entries.
    Pages become real when first touched. Where the kernel has no huge pages, and below 16 MiB, it is ordinary memory.
    The region is freed with the last of its tensors.
    """
    total = sum(spec.nbytes for spec in specs)
    if device.type != "cpu" or total < _SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    region, start = _huge_region(total)
    tensors = []
    for spec in specs:
        # A storage each: the compiler takes views of one storage for aliases of each other.
        count = max(1, math.prod(spec.shape))  # an empty view is no view for torch
        flat = torch.frombuffer(region, dtype=spec.dtype, count=count, offset=start)
        tensors.append(flat[: math.prod(spec.shape)].view(spec.shape))
        start += spec.nbytes
    return tensors


def huge_page_bytes(tensors: Sequence[Tensor]) -> int | None:
    """Bytes of transparent huge pages under CPU tensors of one `allocate`, or None where the kernel does not say.

    Reads Linux' /proc/self/smaps: some ms. Whole memory areas are counted, and neighbouring regions may share one.
    """
    starts = {tensor.data_ptr() for tensor in tensors if tensor.numel() and tensor.device.type == "cpu"}
    found, inside = 0, False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                first = line.split(None, 1)[0]
                if "-" in first and not first.endswith(":"):
                    begin, end = (int(bound, 16) for bound in first.split("-"))
                    inside = any(begin <= start < end for start in starts)
                elif inside and first == "AnonHugePages:":
                    found += int(line.split()[1]) << 10
    except OSError:
        return None
    return found


def _huge_region(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory, and the offset of `nbytes` in it that begin at a huge page, so that all of them can lie on such pages."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without them
        logger.info("no transparent huge pages: %s", error)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return memory, -address % HUGE_PAGE
