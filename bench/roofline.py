"""What the memory allows: its bandwidth, and the bytes that a decode step has to read."""

from __future__ import annotations

import statistics
import time

import torch

from bench.device_time import Stopwatch
from ops.memory import Spec, allocate
from runtime.engine import Engine


class Bandwidth:
    """Samples of a device's memory bandwidth, in bytes a second. nbytes: moved for one sample; label: how."""

    label: str

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.samples: list[float] = []

    def sample(self) -> float:
        """Take and keep one sample."""
        self.samples.append(self.nbytes / self._seconds())
        return self.samples[-1]

    @property
    def best(self) -> float:
        """The largest sample: what the memory can do when nothing else disturbs it."""
        return max(self.samples)

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    def _seconds(self) -> float:
        raise NotImplementedError


class ReadBandwidth(Bandwidth):
    """Measures a CPU's read bandwidth over at least 1 GiB of distinct buffers, which no cache can hold."""

    label = "read-only sum"

    def __init__(self, device: torch.device, nbytes: int = 5 << 28, buffers: int = 20) -> None:
        size = nbytes // buffers // 4
        self._buffers = allocate([Spec((size,), torch.float32)] * buffers, device)  # as weights and caches lie
        for buffer in self._buffers:
            buffer.fill_(1)
        super().__init__(sum(buffer.nbytes for buffer in self._buffers))

    def _seconds(self) -> float:
        start = time.perf_counter()
        total = sum(float(buffer.sum()) for buffer in self._buffers)
        seconds = time.perf_counter() - start
        assert total == self.nbytes / 4
        return seconds


class CopyBandwidth(Bandwidth):
    """Measures copies within a device, bytes read and bytes written, between buffers that no cache can hold."""

    label = "copy, read and written"

    def __init__(self, device: torch.device, nbytes: int = 1 << 30, copies: int = 4) -> None:
        """nbytes: of either buffer; copies: one after the other for a sample."""
        self._source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
        self._target = torch.empty_like(self._source)
        self._watch, self._copies = Stopwatch(device), copies
        super().__init__(2 * self._source.nbytes * copies)
        self._seconds()  # the first one warms up

    def _seconds(self) -> float:
        self._watch.start()
        for _ in range(self._copies):
            self._target.copy_(self._source)
        self._watch.stop()
        return self._watch.seconds()


def bandwidth_of(device: torch.device) -> Bandwidth:
    """The measure of a device's bandwidth that a decode step is held against."""
    return CopyBandwidth(device) if device.type == "cuda" else ReadBandwidth(device)


def bytes_per_step(engine: Engine, batch: int, context: int) -> int:
    """Bytes a decode step must read: every weight once, and the K and V of `context` tokens of `batch` sequences.

    An input embedding that is not also the output layer is left out: a step reads a few rows of it.
    """
    model = engine.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if embedding.data_ptr() != head.data_ptr():
        weights -= embedding.nbytes
    return weights + batch * context * engine.report.plan.bytes_per_token(engine.dtype.itemsize)
