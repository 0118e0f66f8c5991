"""Which batch sizes are captured, and which of them serves a batch (BEHAVIOURS 29, 34)."""

import logging

import pytest

from graphs.buckets import LARGEST, Buckets, choose_sizes, default_sizes


def test_a_batch_is_padded_to_the_next_size_and_no_further() -> None:
    buckets = Buckets([1, 2, 4, 8, 16])
    assert [buckets.find(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]
    assert buckets.find(17) is None
    assert buckets.find(10_000) is None


def test_sizes_are_sorted_and_counted_once() -> None:
    assert Buckets([8, 2, 2, 5]).sizes == [2, 5, 8]
    assert [Buckets([8, 2, 5]).find(rows) for rows in range(1, 10)] == [2, 2, 5, 5, 5, 8, 8, 8, None]


def test_a_dropped_size_leaves_its_batches_to_the_next() -> None:
    buckets = Buckets([1, 2, 4])
    buckets.drop(2)
    assert [buckets.find(rows) for rows in (1, 2, 4, 5)] == [1, 4, 4, None]
    buckets.drop(4)
    assert [buckets.find(rows) for rows in (1, 2)] == [1, None]
    buckets.drop(1)
    assert buckets.find(1) is None


@pytest.mark.parametrize("most", [1, 2, 5, 32, 33, 100, 256, 500, 511, 512, 1000])
def test_default_sizes_are_dense_at_first_and_end_at_the_most(most: int) -> None:
    sizes = default_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, LARGEST)
    buckets = Buckets(sizes)
    for rows in range(1, sizes[-1] + 1):
        size = buckets.find(rows)
        assert size is not None
        assert 0 <= size - rows < (rows if rows <= 32 else 8 if rows <= 128 else 16)


def test_default_sizes_of_the_default_number_of_requests() -> None:
    assert default_sizes(256)[:12] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48]
    assert len(default_sizes(256)) == 30


@pytest.mark.parametrize(
    ("asked", "most", "kept"),
    [
        ([1, 2, 4, 8], 5, [1, 2, 4, 5]),
        ([16, 8, 4, 2, 1], 5, [1, 2, 4, 5]),
        ([1, 2, 4, 8, 16], 3, [1, 2, 3]),
        ([1, 2, 4, 8, 16], 4, [1, 2, 4]),
        ([4, 8], 100, [4, 8]),
        ([64], 3, [3]),
        (None, 5, [1, 2, 3, 4, 5]),
        (None, 1, [1]),
    ],
)
def test_sizes_that_no_batch_can_fill_make_place_for_the_largest_batch(
    asked: list[int] | None, most: int, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_sizes(asked, most, "max_num_seqs") == kept
    left_out = sorted(size for size in asked or () if size > most)
    said = f"cudagraph_capture_sizes: {most} in place of {left_out}: at most {most} rows, max_num_seqs"
    assert [record.getMessage() for record in caplog.records] == ([said] if left_out else [])
