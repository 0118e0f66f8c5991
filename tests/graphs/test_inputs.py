"""The arena: contiguous and aligned views at any size, at addresses that stay."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.inputs import InputArena, StepSizes
from models.step_inputs import FIELDS, StepInputs

CPU = torch.device("cpu")
SIZES = StepSizes(tokens=7, sequences=3, table_width=5, rows=2, masked=4, previous_rows=6)
EXPECTED = {
    "input_ids": (7,),
    "prev_row": (7,),
    "prev_tokens": (6,),
    "positions": (7,),
    "slot_mapping": (1, 7),
    "block_table": (1, 3, 5),
    "seq_lens": (3,),
    "query_start_loc": (4,),
    "logits_indices": (2,),
    "temperature": (2,),
    "top_k": (2,),
    "top_p": (2,),
    "min_p": (2,),
    "noise_key": (2,),
    "noise_position": (2,),
    "masked_ids": (2, 4),
}


def addresses(inputs: StepInputs) -> list[int]:
    return [tensor.data_ptr() for tensor in inputs]


def test_shapes_and_dtypes_are_those_of_the_abi() -> None:
    inputs = InputArena(CPU).carve(SIZES)
    assert {name: tuple(tensor.shape) for name, tensor in inputs._asdict().items()} == EXPECTED
    assert {name: tensor.dtype for name, tensor in inputs._asdict().items()} == {
        name: dtype for name, (dtype, _) in FIELDS.items()
    }


def test_cache_groups_are_a_dimension_of_slots_and_tables() -> None:
    inputs = InputArena(CPU).carve(dataclasses.replace(SIZES, groups=2))
    assert inputs.slot_mapping.shape == (2, 7)
    assert inputs.block_table.shape == (2, 3, 5)
    assert inputs.positions.shape == (7,)


@given(
    st.builds(
        StepSizes,
        tokens=st.integers(1, 300),
        sequences=st.integers(1, 40),
        table_width=st.integers(1, 40),
        rows=st.integers(1, 40),
        masked=st.integers(1, 9),
        previous_rows=st.integers(1, 40),
        groups=st.integers(1, 3),
    )
)
@settings(max_examples=50, deadline=None)
def test_views_are_contiguous_aligned_and_apart_at_any_size(sizes: StepSizes) -> None:
    arena = InputArena(CPU, capacity=64)
    inputs = arena.carve(sizes)
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in inputs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(tensor.is_contiguous() for tensor in inputs)
    # torch aligns the buffer to 64 bytes, so views that start at multiples of 64 are aligned in memory too.
    assert all(address % 64 == 0 for address in addresses(inputs))
    assert len({tensor.untyped_storage().data_ptr() for tensor in inputs}) == 1


def test_equal_sizes_have_equal_addresses_whatever_came_between() -> None:
    arena = InputArena(CPU)
    first = addresses(arena.carve(SIZES))
    arena.carve(dataclasses.replace(SIZES, tokens=100, rows=9))
    assert addresses(arena.carve(dataclasses.replace(SIZES))) == first
    assert addresses(arena.carve(SIZES)) == first


def test_the_arena_grows_once_and_then_stays() -> None:
    arena = InputArena(CPU, capacity=2048)
    small = addresses(arena.carve(SIZES))
    big = dataclasses.replace(SIZES, tokens=5000)
    grown = arena.carve(big)
    assert grown.input_ids.shape == (5000,)
    assert addresses(grown)[0] not in small
    grown.input_ids.fill_(7)
    assert (grown.input_ids == 7).all()
    after = addresses(arena.carve(SIZES))
    arena.carve(big)
    assert addresses(arena.carve(big)) == addresses(grown)
    assert addresses(arena.carve(SIZES)) == after
    assert after[0] == addresses(grown)[0]


def test_what_is_written_through_numpy_is_uploaded() -> None:
    arena = InputArena(CPU)
    host = arena.carve(SIZES)
    host.input_ids.numpy()[:] = range(7)
    host.block_table.numpy()[0, 1] = [4, 3, 2, 1, 0]
    host.temperature.numpy()[:] = 0.5
    device = arena.upload()
    assert device.input_ids.tolist() == list(range(7))
    assert device.block_table[0, 1].tolist() == [4, 3, 2, 1, 0]
    assert device.temperature.tolist() == [0.5, 0.5]
    assert addresses(arena.upload()) == addresses(device)


def test_content_of_another_layout_is_not_taken_for_zero() -> None:
    arena = InputArena(CPU)
    arena.carve(SIZES).input_ids.fill_(99)
    assert arena.carve(dataclasses.replace(SIZES, tokens=3)).input_ids.tolist() == [99, 99, 99]


def test_upload_is_one_copy_of_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = InputArena(CPU, capacity=1 << 14)
    arena._device = torch.full_like(arena._host, 255)  # a second buffer, as on a GPU
    host = arena.carve(SIZES)
    assert not {tensor.data_ptr() for tensor in host} & set(addresses(arena._device_views))
    for tensor in host:
        tensor.fill_(1)
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, *rest: bool, **kwargs: bool) -> torch.Tensor:
        copies.append(source.nbytes)
        return copy(self, source, *rest, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    device = arena.upload()
    used = sum(-(-math.prod(EXPECTED[name]) * dtype.itemsize // 64) * 64 for name, (dtype, _) in FIELDS.items())
    assert copies == [used]
    assert all((tensor == 1).all() for tensor in device)
    assert arena._device[used:].eq(255).all()
