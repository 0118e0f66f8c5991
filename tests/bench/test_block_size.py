"""Waste and tables on hand-made lengths, block tables over one buffer, and the verdict."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from bench.block_size import Layers, num_blocks, parse, spread, table_bytes, tail_waste, verdict


def test_blocks_are_whole() -> None:
    assert [num_blocks(length, 4) for length in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_slots_after_the_last_token_are_wasted() -> None:
    assert tail_waste([3, 4, 5], 1) == 0
    assert tail_waste([3, 4, 5], 4) == 1 - 12 / 16
    assert tail_waste([3, 4, 5], 8) == 1 - 12 / 24


def test_a_table_has_an_entry_of_four_bytes_for_each_block() -> None:
    assert table_bytes([3, 4, 5], 4) == pytest.approx(4 * (1 + 1 + 2) / 3)


def sizes(**changes: Any) -> argparse.Namespace:
    args = {"sizes": [1, 4, 8], "batch": 3, "context": 10, "kv_heads": 2, "group": 2, "head_dim": 8, "bytes": 1 << 14}
    return argparse.Namespace(**{**args, "dtype": "float32", **changes})


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_every_block_size_has_distinct_blocks_beyond_the_null_block(block_size: int) -> None:
    layers = Layers(sizes())
    table = layers.table(block_size)
    slots = layers.caches[0][0].shape[0]
    assert table.shape == (3, num_blocks(10, block_size))
    assert table.unique().numel() == table.numel()
    assert int(table.min()) * block_size >= 8
    assert (int(table.max()) + 1) * block_size <= slots
    assert slots % block_size == 0


def test_layers_make_up_the_bytes_asked_for() -> None:
    layers = Layers(sizes(bytes=10_000))
    assert len(layers.caches) == 3  # of 2 * 3 * 10 * 2 * 8 * 4 = 3,840 bytes each
    assert layers.nbytes == 3 * 3840


def test_attention_reads_the_blocks_of_its_table() -> None:
    from ops import reference
    from ops.cpu.library import load

    load()
    layers = Layers(sizes())
    for block_size in (1, 4, 8):
        seen: list[torch.Tensor] = []
        for caches in layers.caches:
            k, v = (cache.view(-1, block_size, 2, 8) for cache in caches)
            table = layers.table(block_size)
            common = (layers.q, k, v, table, layers.seq_lens, layers.starts, layers.scale, 0, 0.0, None)
            seen.append(torch.ops.pagegraph.paged_attention.cpu(*common) - reference.paged_attention(*common))
        layers.attention(block_size, layers.table(block_size))
        assert max(float(difference.abs().max()) for difference in seen) < 1e-5


def row(block_size: int, waste: float, time: float) -> dict[str, Any]:
    """A row whose quartiles are 0.01 around its median."""
    return {
        "block_size": block_size,
        "tail_waste": {"conv": waste, "code": waste / 2},
        "over_fastest": {"low": time - 0.01, "median": time, "high": time + 0.01},
    }


def test_the_verdict_is_the_largest_block_that_wastes_little_and_is_not_clearly_slower() -> None:
    rows = [row(4, 0.002, 1.3), row(8, 0.004, 1.059), row(16, 0.009, 1.061), row(32, 0.02, 1.0)]
    assert verdict(rows, waste=0.01, slack=0.05) == (
        "8 is justified (the default is 16): of those about as fast as the fastest, the largest that wastes under 1%. "
        "It wastes 0.40% (conv) and 0.20% (code), and takes 1.06 [1.05, 1.07] times the fastest's time"
    )
    assert verdict(rows, waste=0.01, slack=0.06).startswith("16 is justified")
    assert verdict(rows, waste=0.02, slack=0.05).startswith("32 is justified")


def test_without_a_fast_block_that_wastes_little_the_smallest_fast_one_is_justified() -> None:
    text = verdict([row(16, 0.005, 1.5), row(32, 0.02, 1.04), row(64, 0.04, 1.0)], waste=0.01, slack=0.05)
    assert text.startswith("32 is justified (the default is 16): of those about as fast as the fastest, the smallest; ")


def test_a_spread_is_of_the_ratios_within_rounds() -> None:
    assert spread([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == {"low": 2.5, "median": 3.0, "high": 3.5}


@pytest.mark.parametrize("given", ["8,16,24", "16,8", "1,2,4"])
def test_sizes_that_cannot_share_a_buffer_or_lack_the_default_are_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--sizes", given])
    assert "--sizes must ascend, divide the largest, and have 16" in capsys.readouterr().err
