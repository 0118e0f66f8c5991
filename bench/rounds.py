"""Contestants measured in alternation, so that a machine which changes its speed changes it for all of them."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """A function that calls `run` and returns the seconds that it took."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def alternate(
    runners: Mapping[K, Callable[[], T]], rounds: int | Mapping[K, int], *, warm_up: int = 0
) -> dict[K, list[T]]:
    """Call every runner once a round and return what each returned, by round. Another one begins in every round.

    rounds: how many, for all or by name; who has fewer takes part in the first ones. warm_up: rounds before those,
    whose results are not kept.
    """
    turns = {name: rounds if isinstance(rounds, int) else rounds[name] for name in runners}
    results: dict[K, list[T]] = {name: [] for name in runners}
    order = list(runners)
    for index in range(-warm_up, max(turns.values(), default=0)):
        for name in order:
            if index < turns[name]:
                result = runners[name]()
                if index >= 0:
                    results[name].append(result)
        order.append(order.pop(0))
    return results


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the rounds' ratios, over the rounds in which both took part."""
    return statistics.median(a / b for a, b in zip(over, under, strict=False))


def affordable(seconds: float, limit: float, rounds: int) -> int:
    """How many rounds of `seconds` each fit into `limit` seconds: `rounds` at most, 0 if not even one does."""
    return min(rounds, int(limit / seconds))


def machine() -> dict[str, Any]:
    """What the figures are from: the processor, the threads in use, and the versions that matter."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
