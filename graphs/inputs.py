"""The arena that the inputs of a step live in: one buffer on the host, one on the device, one copy between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.step_inputs import FIELDS, StepInputs

_ALIGNMENT = 64  # bytes, a cache line; also what vector loads in compiled kernels may assume
_KEPT = 128  # sizes whose views are kept: each costs some 50 us to make, and decode steps repeat a few sizes


@dataclass(frozen=True)
class StepSizes:
    """The dynamic sizes of one step; see models/step_inputs.py. Each is at least 1, so no tensor is ever empty."""

    tokens: int  # T
    sequences: int  # B
    table_width: int  # W
    rows: int  # L
    masked: int = 1  # M
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
            "R": self.rows,  # as if the last step had drawn as many: in an arena it is the size of `previous`
            "G": self.groups,
        }
        return tuple(sizes[dim] for dim in dims)


@dataclass
class _Buffers:
    """The bytes of an arena: written on the `host`, read on the `device`; on a CPU both are one.

    For a GPU a copy is taken from pinned memory that nobody writes until it has been made: of `staging` every second
    upload uses the same piece, and first waits for `copied`, that piece's last copy.
    """

    host: Tensor
    device: Tensor
    staging: list[Tensor]
    copied: list[torch.cuda.Event]

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> _Buffers:
        host = torch.zeros(nbytes, dtype=torch.uint8)
        if device.type == "cpu":
            return cls(host, host, [], [])
        staging = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        return cls(host, torch.zeros_like(host, device=device), staging, [torch.cuda.Event() for _ in staging])

    def upload(self, used: int) -> None:
        """Queue one copy of the first `used` bytes to the device."""
        if not self.staging:
            return
        self.staging.reverse()
        self.copied.reverse()
        self.copied[0].synchronize()
        self.staging[0][:used].copy_(self.host[:used])
        self.device[:used].copy_(self.staging[0][:used], non_blocking=True)
        self.copied[0].record()


@dataclass(frozen=True)
class _Carved:
    buffers: _Buffers
    used: int
    host: StepInputs
    device: StepInputs


class InputArena:
    """Carves the tensors of a step out of one buffer, so that they are contiguous at any size.

    The same sizes get the same addresses for good, as long as they fit into the `capacity` that the arena began with:
    captured graphs read them there. Larger steps get a second buffer, which grows. `upload` moves everything at once.

    `previous` [R] int64 on the device holds the tokens that the last step drew: an input that stays on the device.
    """

    def __init__(self, device: torch.device, previous: Tensor | None = None, capacity: int = 1 << 16) -> None:
        """capacity: bytes to begin with. previous: None for one row, zero."""
        self.device = device
        self.previous = torch.zeros(1, dtype=torch.int64, device=device) if previous is None else previous
        self._base = _Buffers.allocate(capacity, device)
        self._overflow: _Buffers | None = None
        self._kept: dict[StepSizes, _Carved] = {}
        self._carved: _Carved
        self._sizes: StepSizes | None = None

    def carve(self, sizes: StepSizes) -> StepInputs:
        """Return the host tensors of a step. Their content is whatever was there before."""
        if sizes != self._sizes:
            self._carved, self._sizes = self._kept.get(sizes) or self._carve(sizes), sizes
        return self._carved.host

    def upload(self) -> StepInputs:
        """Copy what was carved last to the device, in one transfer, and return the device's tensors."""
        self._carved.buffers.upload(self._carved.used)
        return self._carved.device

    def _carve(self, sizes: StepSizes) -> _Carved:
        if (used := nbytes(sizes)) <= self._base.host.numel():
            buffers = self._base
        else:
            if self._overflow is None or used > self._overflow.host.numel():
                self._overflow = _Buffers.allocate(2 * used, self.device)
            buffers = self._overflow
        host = self._views(buffers.host, sizes)
        carved = _Carved(
            buffers, used, host, host if buffers.device is buffers.host else self._views(buffers.device, sizes)
        )
        if buffers is self._base:
            if len(self._kept) == _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[sizes] = carved
        return carved

    def _views(self, buffer: Tensor, sizes: StepSizes) -> StepInputs:
        views, start = [], 0
        for name, (dtype, dims) in FIELDS.items():
            if name == "prev_tokens":
                views.append(self.previous)
                continue
            shape = sizes.shape(dims)
            length = math.prod(shape) * dtype.itemsize
            views.append(buffer[start : start + length].view(dtype).view(shape))
            start += _aligned(length)
        return StepInputs(*views)


def nbytes(sizes: StepSizes) -> int:
    """Bytes of an arena that a step of these sizes takes."""
    shapes = ((dtype, sizes.shape(dims)) for name, (dtype, dims) in FIELDS.items() if name != "prev_tokens")
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in shapes)


def fill_padding(host: StepInputs, first: int = 0) -> None:
    """Make sequences of a decode step, from the one with index `first` on, padding: one token each, at position 0 of
    the null block, drawn greedily and read by nobody. Every field but those of the rows before is written."""
    for name in ("input_ids", "positions", "temperature", "top_k", "min_p", "noise_key", "noise_position"):
        getattr(host, name).numpy()[first:] = 0
    host.seq_lens.numpy()[first:] = 1
    host.top_p.numpy()[first:] = 1
    host.prev_row.numpy()[first:] = -1
    host.masked_ids.numpy()[first:] = -1
    host.slot_mapping.numpy()[:, first:] = 0
    host.block_table.numpy()[:, first:] = 0
    host.query_start_loc.numpy()[first:] = range(first, len(host.seq_lens) + 1)
    host.logits_indices.numpy()[first:] = range(first, len(host.seq_lens))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
