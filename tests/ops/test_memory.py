"""Tensors side by side in one region on huge pages, and ordinary ones."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from ops import memory
from ops.memory import HUGE_PAGE, Spec, allocate, huge_page_bytes

CPU = torch.device("cpu")
BIG = Spec((9 << 20,), torch.float32)  # 36 MiB
MIXED = [
    Spec((7, 3), torch.bfloat16),
    BIG,
    Spec((), torch.int64),
    Spec((0, 5), torch.float32),
    Spec((3, 0), torch.float16),
    Spec((5, 1, 33), torch.float64),
    Spec((4, 1 << 20), torch.bfloat16),
    Spec((3,), torch.bool),
]


@pytest.fixture
def regions(monkeypatch):
    """Weak references to the regions that are taken, in order."""
    taken = []
    take = memory._huge_region

    def watched(nbytes):
        region, start = take(nbytes)
        taken.append(weakref.ref(region))
        return region, start

    monkeypatch.setattr(memory, "_huge_region", watched)
    return taken


def test_sizes_are_whole_cache_lines():
    assert [spec.nbytes for spec in MIXED] == [64, 36 << 20, 64, 64, 64, 1344, 8 << 20, 64]


def test_shapes_dtypes_and_alignment(regions):
    tensors = allocate(MIXED, CPU)
    assert len(regions) == 1
    for tensor, spec in zip(tensors, MIXED, strict=True):
        assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (spec.shape, spec.dtype, CPU)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
    starts = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    assert starts[0] % HUGE_PAGE == 0
    assert starts == sorted(starts)


def test_tensors_do_not_overlap_and_have_storages_of_their_own(regions):
    tensors = allocate(MIXED, CPU)
    values = [torch.randn(spec.shape).to(spec.dtype) for spec in MIXED]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    filled = [tensor for tensor in tensors if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == len(filled)
    assert all(tensor.storage_offset() == 0 for tensor in filled)


def test_the_region_is_freed_with_the_last_of_its_tensors(regions):
    tensors = allocate([BIG, Spec((0,), torch.float32), Spec((4,), torch.int32)], CPU)
    (region,) = regions
    last = tensors[2][1:3]  # a view counts
    last.fill_(7)
    del tensors
    gc.collect()
    assert region() is not None
    assert last.tolist() == [7, 7]
    del last
    gc.collect()
    assert region() is None


def test_two_calls_take_two_regions(regions):
    first, second = allocate([BIG], CPU), allocate([BIG], CPU)
    assert len(regions) == 2
    assert abs(first[0].data_ptr() - second[0].data_ptr()) >= BIG.nbytes


@pytest.mark.parametrize("count", [0, 1, 3])
def test_small_requests_are_ordinary_memory(regions, count):
    below = Spec(((16 << 20) - 256,), torch.uint8)
    tensors = allocate([Spec((), torch.int8)] * count + [below], CPU)
    assert [tuple(tensor.shape) for tensor in tensors] == [()] * count + [below.shape]
    assert regions == []
    allocate([below, Spec((4,), torch.int64), Spec((), torch.int8), Spec((129,), torch.int8)], CPU)
    assert len(regions) == 1


def test_nothing_is_nothing():
    assert allocate([], CPU) == []


def test_other_devices_and_systems_are_left_to_torch(regions, monkeypatch):
    (tensor,) = allocate([BIG], torch.device("meta"))
    assert tensor.is_meta
    assert tensor.shape == BIG.shape
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    (tensor,) = allocate([BIG], CPU)
    assert tensor.shape == BIG.shape
    assert regions == []


def test_a_kernel_without_huge_pages_is_no_failure(monkeypatch):
    class Refusing(memory.mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Refusing)
    (tensor,) = allocate([BIG], CPU)
    assert tensor.fill_(1).sum() == BIG.shape[0]


def test_huge_pages_lie_under_what_was_touched():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel has transparent huge pages switched off")
    tensors = allocate([BIG], CPU)
    tensors[0].fill_(1)
    found = huge_page_bytes(tensors)
    assert found is not None
    if found == 0:
        pytest.skip("the kernel had no huge page to give")
    assert found % HUGE_PAGE == 0


def test_no_tensors_and_other_devices_have_no_huge_pages():
    if not os.path.exists("/proc/self/smaps"):
        pytest.skip("this system has no /proc/self/smaps")
    assert huge_page_bytes([]) == 0
    assert huge_page_bytes([torch.empty(5, device="meta"), torch.empty(0)]) == 0


def test_a_system_that_does_not_say_is_told_apart_from_none(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert huge_page_bytes([torch.empty(5)]) is None
