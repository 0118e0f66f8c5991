"""Time on a device: CUDA events in a GPU's stream; on a CPU, where a call returns when it is done, the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from graphs.cuda_graph import CudaGraphs

Call = Callable[[], object]

_SLEEP = 200_000  # cycles, 0.1 ms: the device is still busy when the start is marked, so launching is not in the time


class Stopwatch:
    """Measures what a device does between `start` and `stop`. Neither waits for it; `seconds` does."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if device.type == "cuda" else []
        self._times = [0.0, 0.0]

    def start(self) -> None:
        """The span begins with what is queued next."""
        self._note(0)

    def stop(self) -> None:
        """The span ends with what has been queued last."""
        self._note(1)

    def seconds(self) -> float:
        """How long the span was; waits for its end."""
        if not self._events:
            return self._times[1] - self._times[0]
        start, stop = self._events
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def _note(self, index: int) -> None:
        if self._events:
            self._events[index].record()
        else:
            self._times[index] = time.perf_counter()


class Repeated:
    """Calls that follow each other on a device, from a CUDA graph if they can be captured: without the host's part.

    not_captured: why they are made from Python instead, so that launching them may be what takes the time; None if
    they are captured. What captured calls return is lost.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self._calls, self._device = calls, device
        self._replay: Call = self._call_all
        self.not_captured: str | None = f"no CUDA graphs on {device.type}"
        self._call_all()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            try:
                self._replay = CudaGraphs(device).capture(self._call_all).replay
                self.not_captured = None
            except RuntimeError as error:
                self.not_captured = str(error).strip().splitlines()[0]

    def seconds(self) -> float:
        """Make all calls once more; seconds of one call."""
        watch = Stopwatch(self._device)
        if self._device.type == "cuda":
            torch.cuda._sleep(_SLEEP)
        watch.start()
        self._replay()
        watch.stop()
        return watch.seconds() / len(self._calls)

    def median(self, rounds: int = 7) -> float:
        """The middle one of several `seconds`, after one that does not count."""
        self.seconds()
        return statistics.median(self.seconds() for _ in range(rounds))

    @torch.no_grad()
    def _call_all(self) -> None:
        for call in self._calls:
            call()
