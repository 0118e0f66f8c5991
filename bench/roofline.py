"""What the memory allows: read bandwidth, and the bytes that a decode step has to read."""

from __future__ import annotations

import statistics
import time

import torch

from ops.memory import Spec, allocate
from runtime.engine import Engine


class ReadBandwidth:
    """Measures a device's read bandwidth over at least 1 GiB of distinct buffers, which no cache can hold."""

    def __init__(self, device: torch.device, nbytes: int = 5 << 28, buffers: int = 20) -> None:
        size = nbytes // buffers // 4
        self._buffers = allocate([Spec((size,), torch.float32)] * buffers, device)  # as weights and caches lie
        for buffer in self._buffers:
            buffer.fill_(1)
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers)
        self.samples: list[float] = []

    def sample(self) -> float:
        """Read everything once, as a sum; returns and keeps one sample in bytes a second."""
        start = time.perf_counter()
        total = sum(float(buffer.sum()) for buffer in self._buffers)  # float() waits for a GPU
        self.samples.append(self.nbytes / (time.perf_counter() - start))
        assert total == self.nbytes / 4
        return self.samples[-1]

    @property
    def best(self) -> float:
        """The largest sample: what the memory can do when nothing else disturbs it."""
        return max(self.samples)

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)


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
