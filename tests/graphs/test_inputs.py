"""The arena: contiguous and aligned views at any size, at addresses that stay."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.inputs import InputArena, StepSizes, fill_padding, nbytes
from models.step_inputs import FIELDS, StepInputs

CPU = torch.device("cpu")
SIZES = StepSizes(tokens=7, sequences=3, table_width=5, rows=2, masked=4)
EXPECTED = {
    "input_ids": (7,),
    "prev_row": (7,),
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


PREVIOUS = torch.tensor([5, 6, 7])


def carved(inputs: StepInputs) -> dict[str, torch.Tensor]:
    """The inputs that lie in the arena."""
    return {name: tensor for name, tensor in inputs._asdict().items() if name != "prev_tokens"}


def addresses(inputs: StepInputs) -> list[int]:
    return [tensor.data_ptr() for tensor in carved(inputs).values()]


def test_shapes_and_dtypes_are_those_of_the_abi() -> None:
    inputs = InputArena(CPU, PREVIOUS).carve(SIZES)
    assert inputs.prev_tokens is PREVIOUS
    assert {name: tuple(tensor.shape) for name, tensor in carved(inputs).items()} == EXPECTED
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
        groups=st.integers(1, 3),
    )
)
@settings(max_examples=50, deadline=None)
def test_views_are_contiguous_aligned_and_apart_at_any_size(sizes: StepSizes) -> None:
    arena = InputArena(CPU, capacity=64)
    inputs = arena.carve(sizes)
    tensors = carved(inputs).values()
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(tensor.is_contiguous() for tensor in tensors)
    # torch aligns the buffer to 64 bytes, so views that start at multiples of 64 are aligned in memory too.
    assert all(address % 64 == 0 for address in addresses(inputs))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_equal_sizes_have_equal_addresses_whatever_came_between() -> None:
    arena = InputArena(CPU)
    first = addresses(arena.carve(SIZES))
    arena.carve(dataclasses.replace(SIZES, tokens=100, rows=9))
    assert addresses(arena.carve(dataclasses.replace(SIZES))) == first
    assert addresses(arena.carve(SIZES)) == first


def test_a_step_beyond_the_capacity_moves_no_other() -> None:
    arena = InputArena(CPU, capacity=2048)
    small = addresses(arena.carve(SIZES))
    big = dataclasses.replace(SIZES, tokens=5000)
    grown = arena.carve(big)
    assert grown.input_ids.shape == (5000,)
    assert addresses(grown)[0] not in small
    grown.input_ids.fill_(7)
    assert (grown.input_ids == 7).all()
    assert addresses(arena.carve(SIZES)) == small
    assert addresses(arena.carve(big)) == addresses(grown)
    larger = arena.carve(dataclasses.replace(SIZES, tokens=50000))
    larger.input_ids.fill_(8)
    assert addresses(arena.carve(SIZES)) == small
    assert (arena.carve(SIZES).input_ids != 8).all()


def test_a_capacity_of_just_the_bytes_of_a_step_holds_it() -> None:
    arena = InputArena(CPU, capacity=nbytes(SIZES))
    first = addresses(arena.carve(SIZES))
    arena.carve(dataclasses.replace(SIZES, tokens=100))
    assert addresses(arena.carve(SIZES)) == first


def test_more_sizes_than_are_kept_keep_their_addresses() -> None:
    arena = InputArena(CPU, capacity=1 << 16)
    first = addresses(arena.carve(SIZES))
    for tokens in range(8, 300):
        arena.carve(dataclasses.replace(SIZES, tokens=tokens))
    assert addresses(arena.carve(SIZES)) == first


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


class FakeEvent:
    """An event of CUDA, whose calls are written down."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def synchronize(self) -> None:
        self._calls.append(f"wait {self._name}")

    def record(self) -> None:
        self._calls.append(f"record {self._name}")


def test_upload_is_one_copy_of_what_is_used_from_memory_that_is_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = InputArena(CPU, PREVIOUS, capacity=1 << 14)
    buffers, calls = arena._base, []
    buffers.device = torch.full_like(buffers.host, 255)  # a second buffer and its staging, as for a GPU
    buffers.staging = [torch.zeros_like(buffers.host) for _ in "ab"]
    buffers.copied = [FakeEvent(calls, name) for name in "ab"]  # type: ignore[misc]
    host = arena.carve(SIZES)
    device = arena.upload()
    assert not set(addresses(host)) & set(addresses(device))
    for tensor in carved(host).values():
        tensor.fill_(1)
    copies: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, *rest: bool, **kwargs: bool) -> torch.Tensor:
        copies.append((self.data_ptr(), source.nbytes))
        return copy(self, source, *rest, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    calls.clear()
    for _ in range(3):
        device = arena.upload()
    used = sum(-(-math.prod(EXPECTED[name]) * FIELDS[name][0].itemsize // 64) * 64 for name in EXPECTED)
    assert used == nbytes(SIZES)
    assert [size for target, size in copies if target == buffers.device.data_ptr()] == [used] * 3
    assert len(copies) == 6  # the others go into the staging
    assert all((tensor == 1).all() for tensor in carved(device).values())
    assert buffers.device[used:].eq(255).all()
    # Every second upload uses the same piece, after its last copy has been made.
    assert calls in [[f"{what} {name}" for name in order for what in ("wait", "record")] for order in ("aba", "bab")]


def test_padding_is_a_token_at_position_0_of_the_null_block() -> None:
    arena = InputArena(CPU, PREVIOUS)
    host = arena.carve(StepSizes(tokens=5, sequences=5, table_width=3, rows=5, masked=2))
    for tensor in carved(host).values():
        tensor.fill_(9)
    fill_padding(host, 2)
    for name, tensor in carved(host).items():
        first, rest = (tensor[:, :2], tensor[:, 2:]) if FIELDS[name][1][0] == "G" else (tensor[:2], tensor[2:])
        assert (first == 9).all(), name
        ones, counted, none = ("seq_lens", "top_p"), ("query_start_loc", "logits_indices"), ("prev_row", "masked_ids")
        if name in counted:
            assert rest.tolist() == list(range(2, 2 + len(rest))), name
        else:
            assert (rest == (1 if name in ones else -1 if name in none else 0)).all(), name
