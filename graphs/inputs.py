"""The arena that the inputs of a step live in: one buffer on the host, one on the device, one copy between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.step_inputs import FIELDS, StepInputs

_ALIGNMENT = 64  # bytes, a cache line; also what vector loads in compiled kernels may assume


@dataclass(frozen=True)
class StepSizes:
    """The dynamic sizes of one step; see models/step_inputs.py. Each is at least 1, so no tensor is ever empty."""

    tokens: int  # T
    sequences: int  # B
    table_width: int  # W
    rows: int  # L
    masked: int = 1  # M
    previous_rows: int = 1  # R
    groups: int = 1  # G

    def shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """Give the sizes of dimensions that are named as in FIELDS."""
        sizes = {
            "T": self.tokens,
            "B": self.sequences,
            "B+1": self.sequences + 1,
            "W": self.table_width,
            "L": self.rows,
            "M": self.masked,
            "R": self.previous_rows,
            "G": self.groups,
        }
        return tuple(sizes[dim] for dim in dims)


class InputArena:
    """Carves the tensors of a step out of one buffer, so that they are contiguous at any size.

    The same sizes get the same addresses as long as the arena did not grow, and `upload` moves everything at once.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        """capacity: bytes to begin with; the arena grows when a step needs more."""
        self.device = device
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        pinned = self.device.type == "cuda"
        self._host = torch.zeros(capacity, dtype=torch.uint8, pin_memory=pinned)
        self._device = self._host if self.device.type == "cpu" else torch.zeros_like(self._host, device=self.device)
        self._sizes: StepSizes | None = None
        self._host_views: StepInputs
        self._device_views: StepInputs

    def carve(self, sizes: StepSizes) -> StepInputs:
        """Return the host tensors of a step. Their content is whatever was there before."""
        if sizes == self._sizes:
            return self._host_views
        if (needed := _nbytes(sizes)) > self._host.numel():
            self._allocate(max(needed, 2 * self._host.numel()))
        self._sizes, self._used = sizes, needed
        self._host_views = _views(self._host, sizes)
        self._device_views = self._host_views if self._device is self._host else _views(self._device, sizes)
        return self._host_views

    def upload(self) -> StepInputs:
        """Copy what was carved last to the device, in one transfer, and return the device's tensors."""
        if self._device is not self._host:
            self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        return self._device_views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _nbytes(sizes: StepSizes) -> int:
    return sum(_aligned(math.prod(sizes.shape(dims)) * dtype.itemsize) for dtype, dims in FIELDS.values())


def _views(buffer: Tensor, sizes: StepSizes) -> StepInputs:
    views, start = [], 0
    for dtype, dims in FIELDS.values():
        shape = sizes.shape(dims)
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(buffer[start : start + nbytes].view(dtype).view(shape))
        start += _aligned(nbytes)
    return StepInputs(*views)
