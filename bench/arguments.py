"""Types of the benchmarks' command line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """An argparse type: a number that is not smaller than `least`."""

    def number(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def sizes(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [int(at_least(1)(part)) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return [part for part in text.split(",") if part]
