"""Host memory for the blocks of preempted requests."""

import logging
import warnings

import pytest
import torch

from graphs import swap_space
from graphs.kv_cache import KVCache
from graphs.swap_space import SwapSpace, num_swap_blocks
from models.report import CachePlan, CallSite
from ops.providers import select

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def site(cache: int, heads: int, k_dim: int, v_dim: int) -> CallSite:
    return CallSite(f"layers.{cache}", 4, heads, k_dim, v_dim, scale=1.0, cache=cache)


PLAN = CachePlan((site(0, 2, 8, 8), site(1, 3, 12, 10)))


def make(
    host_blocks: int = 7, *, blocks: int = 6, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU
) -> tuple[KVCache, SwapSpace]:
    """A KV cache of random bits and a swap space for it."""
    cache = KVCache(PLAN, blocks, 4, dtype, device, select("copy_blocks", device))
    for tensor in cache.tensors:
        tensor.view(torch.uint8).random_(0, 256)
    return cache, SwapSpace(cache, host_blocks, select("swap_blocks", device))


def bits(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).to(CPU, copy=True) for tensor in cache.tensors]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def no_allocation(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("[enforce fail] out of memory")


def test_the_host_mirrors_the_cache() -> None:
    cache, space = make()
    assert space.reserve()
    assert space._host is not None
    assert [tensor.shape for tensor in space._host] == [(7, *tensor.shape[1:]) for tensor in cache.tensors]
    assert {(tensor.dtype, tensor.device) for tensor in space._host} == {(torch.bfloat16, CPU)}
    assert all(tensor.is_contiguous() for tensor in space._host)
    assert space.nbytes == sum(tensor.nbytes for tensor in space._host) == 7 * cache.bytes_per_block
    space._host[0][:] = 1.0
    space._host[1][:] = 2.0
    assert (space._host[0] == 1.0).all()  # the pieces of the buffer do not overlap


def test_blocks_come_back_bit_for_bit_and_others_stay() -> None:
    cache, space = make()
    before = bits(cache)
    space.swap_out([(1, 6), (2, 0), (5, 1)])
    for tensor in cache.tensors:
        tensor[[1, 2, 5]] = 0
    space.swap_in([(0, 1), (6, 2), (1, 4)])  # to other blocks than they came from
    for tensor, old in zip(bits(cache), before, strict=True):
        for block, held in enumerate((0, 2, 1, 3, 5)):
            assert torch.equal(tensor[block], old[held])
        assert not tensor[5].any()


def test_nothing_is_taken_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = make()
    monkeypatch.setattr(swap_space.torch, "empty", no_allocation)
    space = SwapSpace(cache, 10**9, select("swap_blocks", CPU))
    assert space.num_blocks == 10**9
    assert space.nbytes == 10**9 * cache.bytes_per_block


def test_memory_is_taken_once() -> None:
    _, space = make()
    space.swap_out([(1, 6)])
    host = space._host
    assert space.reserve()
    space.swap_out([(2, 5)])
    assert space._host is host


@pytest.mark.parametrize("free", [GIB, 0])
def test_without_memory_it_says_so_once_and_before_a_swap(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Whether the allocation fails or is known to be too large."""
    cache, space = make()
    before = bits(cache)
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: free)
    monkeypatch.setattr(swap_space.torch, "empty", no_allocation)
    reason = "0 GiB is free" if free == 0 else "enforce fail"
    with pytest.warns(UserWarning, match=rf"recomputed, not swapped out: .*{reason}.*lower swap_space"):
        assert not space.reserve()
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not space.reserve()
        with pytest.raises(RuntimeError, match="no swap space"):
            space.swap_out([(1, 1)])
    with pytest.raises(AssertionError, match="nothing has been swapped out"):
        space.swap_in([(1, 1)])
    assert same(bits(cache), before)


def test_a_space_of_no_blocks_is_never_there() -> None:
    _, space = make(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not space.reserve()
    assert space.nbytes == 0
    with pytest.raises(RuntimeError, match="no swap space"):
        space.swap_out([(1, 0)])


@pytest.mark.parametrize("host_blocks", [1, 7])
def test_measuring_moves_blocks_and_leaves_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch, host_blocks: int
) -> None:
    cache, space = make(host_blocks)
    before = bits(cache)
    clock = iter([10.0, 10.5, 20.0, 20.25, 30.0, 30.75])
    assert space.reserve()
    monkeypatch.setattr(swap_space.time, "perf_counter", lambda: next(clock))
    moved = min(host_blocks, cache.num_blocks) * cache.bytes_per_block
    assert space.measure_copy_rate() == 2 * moved / 0.25  # the quickest round, both ways
    assert same(bits(cache), before)


def test_measuring_moves_no_more_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, space = make()
    assert space.reserve()
    sizes = []
    monkeypatch.setattr(space, "_swap", lambda src, dst, pairs: sizes.append(len(pairs)))
    for limit, blocks in ((3 * cache.bytes_per_block + 1, 3), (cache.bytes_per_block - 1, 1)):
        monkeypatch.setattr(swap_space, "MEASURED_BYTES", {"cpu": limit})
        assert space.measure_copy_rate() > 0
        assert sizes == [blocks] * 6
        sizes.clear()


def test_measuring_would_overwrite_swapped_out_blocks() -> None:
    _, space = make()
    with pytest.raises(AssertionError, match="reserve"):
        space.measure_copy_rate()
    space.swap_out([(1, 1)])
    with pytest.raises(AssertionError, match="in use"):
        space.measure_copy_rate()


@pytest.mark.parametrize(
    ("device", "asked", "free", "pool", "expected"),
    [
        (CPU, 4.0, 100, 0, 4.0),
        (CPU, 4.0, 8, 0, 4.0),
        (CPU, 4.0, 6, 0, 3.0),
        (CPU, 4.0, 8, 4, 2.0),  # the pool's pages are still to be taken
        (CPU, 4.0, 3, 4, 0.0),
        (CPU, 0.0, 100, 0, 0.0),
        (CUDA, 4.0, 8, 4, 4.0),  # the pool is on the GPU
        (CUDA, 3.0, 8, 0, 3.0),
        (CUDA, 3.0, 7, 0, 2.0),  # 3 GiB of pinned memory take 4
        (CUDA, 4.0, 6, 0, 2.0),
        (CUDA, 0.0, 100, 0, 0.0),
        (CUDA, 4.0, 0, 0, 0.0),
    ],
)
def test_free_memory_caps_the_space(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    asked: float,
    free: int,
    pool: int,
    expected: float,
) -> None:
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: free * GIB)
    with caplog.at_level(logging.INFO, logger="graphs.swap_space"):
        blocks = num_swap_blocks(int(asked * GIB), GIB // 4, device, pool * GIB)
    assert blocks == 4 * expected
    capped = f"swap_space={asked:.3g} GiB is capped to {expected:.3g} GiB: half of what is free"
    assert caplog.messages == ([capped] if expected < asked else [])


def test_a_part_of_a_block_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: GIB)
    assert num_swap_blocks(1000, 300, CPU) == 3
    assert num_swap_blocks(299, 300, CPU) == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_swaps_with_pinned_memory() -> None:
    cache, space = make(device=CUDA)
    before = bits(cache)
    assert space.reserve()
    assert space._host is not None
    assert all(tensor.is_pinned() for tensor in space._host)
    assert space.measure_copy_rate() > 0
    assert same(bits(cache), before)
    space.swap_out([(1, 6), (2, 0)])
    for tensor in cache.tensors:
        tensor[[1, 2]] = 0
    space.swap_in([(6, 1), (0, 2)])
    assert same(bits(cache), before)
