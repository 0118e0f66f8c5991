"""Types of the benchmarks' command line arguments."""

from __future__ import annotations


def sizes(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    return [int(part) for part in text.split(",") if part]


def names(text: str) -> list[str]:
    """Names, separated by commas."""
    return [part for part in text.split(",") if part]
