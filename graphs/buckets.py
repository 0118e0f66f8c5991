"""The batch sizes at which decode graphs are captured, and which of them serves a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

_DENSE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LARGEST = 512  # by default: above, a step's kernels are long enough to hide their launches


def default_sizes(most: int) -> list[int]:
    """Dense at small batches, where padding costs most: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, then by 8 to 128 and by 16 to
    `most` or LARGEST, which is itself among them."""
    last = min(most, LARGEST)
    sizes = (*_DENSE, *range(40, 129, 8), *range(144, LARGEST + 1, 16))
    return [*(size for size in sizes if size < last), last]


def choose_sizes(asked: Sequence[int] | None, most: int, why: str) -> list[int]:
    """The sizes asked for (None: the default ones); those above `most`, which no batch can fill, make place for it.

    why: what limits a batch to `most` rows, for the log that names the sizes left out.
    """
    sizes = default_sizes(most) if asked is None else sorted(set(asked))
    left_out = [size for size in sizes if size > most]
    if not left_out:
        return sizes
    logger.info("cudagraph_capture_sizes: %d in place of %s: at most %d rows, %s", most, left_out, most, why)
    return sorted({*(size for size in sizes if size < most), most})


class Buckets:
    """Ascending batch sizes; `find` is one look-up in a table."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = sorted(set(sizes))
        self._make_table()

    def find(self, rows: int) -> int | None:
        """The smallest size that holds `rows` rows, or None if they are more than the largest."""
        return self._table[rows] if rows < len(self._table) else None

    def drop(self, size: int) -> None:
        """Take a size out: its batches are padded to the next one, or find none."""
        self.sizes.remove(size)
        self._make_table()

    def _make_table(self) -> None:
        self._table: list[int] = list(self.sizes[:1])
        for size in self.sizes:
            self._table += [size] * (size + 1 - len(self._table))
