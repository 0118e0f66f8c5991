"""The paged K and V tensors, and how many blocks of them are allotted."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from graphs import kv_cache
from graphs.kv_cache import CPU_POOL_BYTES, KVCache, free_host_memory, num_blocks_for_memory, usable_memory
from models.report import CachePlan, CallSite
from ops.memory import Spec
from ops.providers import select

CPU = torch.device("cpu")


def site(cache: int, *, heads: int = 2, k_dim: int = 8, v_dim: int = 8, writes: bool = True) -> CallSite:
    return CallSite(
        f"layers.{cache}",
        num_q_heads=4,
        num_kv_heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        scale=1.0,
        cache=cache,
        writes=writes,
    )


# Two caches of different geometry, the first of them read by a second site.
PLAN = CachePlan((site(0), site(1, heads=3, k_dim=12, v_dim=10), site(0, writes=False)))


def make(num_blocks: int = 5, block_size: int = 4, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(PLAN, num_blocks, block_size, dtype, CPU, select("copy_blocks", CPU))


def test_one_k_and_one_v_tensor_for_each_cache_of_the_plan() -> None:
    cache = make()
    assert [tuple(tensor.shape) for tensor in cache.k] == [(5, 4, 2, 8), (5, 4, 3, 12)]
    assert [tuple(tensor.shape) for tensor in cache.v] == [(5, 4, 2, 8), (5, 4, 3, 10)]
    tensors = [*cache.k, *cache.v]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    assert cache.nbytes == 5 * 4 * PLAN.bytes_per_token(2) == 5 * 4 * 2 * (2 * 16 + 3 * 22)
    assert cache.bytes_per_block == 4 * PLAN.bytes_per_token(2)
    assert [tensor.data_ptr() for tensor in cache.tensors] == [tensor.data_ptr() for tensor in tensors]


def test_the_null_block_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(specs: list[Spec], device: torch.device) -> list[torch.Tensor]:
        return [torch.full(spec.shape, torch.nan, dtype=spec.dtype, device=device) for spec in specs]

    monkeypatch.setattr(kv_cache, "allocate", poisoned)
    for tensor in (*(cache := make()).k, *cache.v):
        assert (tensor[0] == 0).all()
        assert tensor[1:].isnan().all()


def test_copy_blocks_copies_whole_blocks_in_every_tensor() -> None:
    cache = make(num_blocks=6)
    for index, tensor in enumerate((*cache.k, *cache.v)):
        tensor.copy_(torch.arange(6)[:, None, None, None].expand_as(tensor) + 10 * index)
    cache.copy_blocks([(1, 4), (2, 5), (1, 3)])
    for index, tensor in enumerate((*cache.k, *cache.v)):
        for block, held in enumerate([0, 1, 2, 1, 1, 2]):
            assert (tensor[block] == held + 10 * index).all()


def allot(monkeypatch: pytest.MonkeyPatch, memory: int, **changes: float) -> int:
    monkeypatch.setattr(kv_cache, "usable_memory", lambda device: memory)
    arguments = {"block_size": 16, "utilization": 1.0, "weight_bytes": 0, "needed": 0, "max_tokens": 10**12}
    arguments |= changes
    return num_blocks_for_memory(PLAN, dtype=torch.float32, device=CPU, **arguments)  # type: ignore[arg-type]


BYTES_PER_BLOCK = 16 * 4 * (2 * 16 + 3 * 22)


def test_memory_bounds_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allot(monkeypatch, 100 * BYTES_PER_BLOCK) == 100
    assert allot(monkeypatch, 100 * BYTES_PER_BLOCK, utilization=0.5) == 50
    assert allot(monkeypatch, 100 * BYTES_PER_BLOCK, weight_bytes=30 * BYTES_PER_BLOCK + 1) == 69
    assert allot(monkeypatch, 100 * BYTES_PER_BLOCK, utilization=0.5, weight_bytes=30 * BYTES_PER_BLOCK) == 20
    assert allot(monkeypatch, 100 * BYTES_PER_BLOCK, block_size=8) == 200


def test_what_could_ever_be_used_bounds_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 1000 * BYTES_PER_BLOCK
    assert allot(monkeypatch, memory, max_tokens=64) == 4 + 1  # the null block holds no tokens
    assert allot(monkeypatch, memory, max_tokens=65) == 5 + 1
    assert allot(monkeypatch, memory, max_tokens=1) == 1 + 1


def test_4_gib_bound_the_pool_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU_POOL_BYTES == 4 * 2**30
    assert allot(monkeypatch, 1 << 40) == 2**32 // BYTES_PER_BLOCK


@pytest.mark.parametrize("needed", [0, 3 << 30])
def test_a_gpu_has_no_such_bound_and_what_is_held_or_needed_is_taken_off(
    needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "usable_memory", lambda device: 80 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 << 30, 80 << 30))
    found = num_blocks_for_memory(
        PLAN,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cuda", 0),
        utilization=0.5,
        weight_bytes=7 << 30,  # already among what is held
        needed=needed,
        max_tokens=10**12,
    )
    assert found == ((10 << 30) - needed) // BYTES_PER_BLOCK


def test_no_room_says_how_much_there_is_and_what_to_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allot(monkeypatch, 2 * BYTES_PER_BLOCK) == 2
    with pytest.raises(ValueError, match="no room for a KV cache") as raised:
        allot(monkeypatch, 4 << 20, weight_bytes=3 << 20, utilization=0.75)
    message = str(raised.value)
    assert "0 MiB are left of 4 MiB" in message
    assert "gpu_memory_utilization=0.75" in message
    for knob in ("raise gpu_memory_utilization", "block_size", "kv_cache_memory_bytes", "num_blocks"):
        assert knob in message
    with pytest.raises(ValueError, match="no room"):
        allot(monkeypatch, BYTES_PER_BLOCK)
    with pytest.raises(ValueError, match="no room"):
        allot(monkeypatch, 100 * BYTES_PER_BLOCK, weight_bytes=1 << 40)


def fake_cgroups(monkeypatch: pytest.MonkeyPatch, root: Path, membership: str, limits: dict[str, str]) -> None:
    """Let kv_cache see files under `root` in place of /proc and /sys; `limits` maps absolute paths to contents."""
    for path, text in {"/proc/self/cgroup": membership, **limits}.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # Only the two absolute paths that the module starts from are moved; what it derives from them is real.
    monkeypatch.setattr(kv_cache, "Path", lambda path: root / path.lstrip("/"))


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, []),
        ("0::/\n", {"/sys/fs/cgroup/memory.max": "max\n"}, []),
        ("0::/\n", {"/sys/fs/cgroup/memory.max": "1000\n"}, [1000]),
        (
            "0::/outer/inner\n",
            {
                "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "/sys/fs/cgroup/outer/memory.max": "2000\n",
                "/sys/fs/cgroup/memory.max": "3000\n",
                "/sys/fs/cgroup/other/memory.max": "1\n",
                "/sys/fs/memory.max": "1\n",
            },
            [2000, 3000],
        ),
        (
            "5:cpu,cpuacct:/job\n4:memory:/job\n",
            {
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/memory.max": "1\n",
            },
            [4000, 9223372036854771712],
        ),
    ],
    ids=["none", "unlimited", "v2 root", "v2 nested", "v1"],
)
def test_limits_of_the_cgroup_and_of_those_above_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, limits: dict[str, str], expected: list[int]
) -> None:
    fake_cgroups(monkeypatch, tmp_path, membership, limits)
    assert list(kv_cache._cgroup_limits().values()) == expected
    total = psutil.virtual_memory().total
    assert usable_memory(CPU) == min([total, *expected])


def test_a_machine_without_cgroups_has_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kv_cache, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert kv_cache._cgroup_limits() == {}
    assert usable_memory(CPU) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, 900),
        (
            "0::/outer/inner\n",
            {
                "/sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "/sys/fs/cgroup/outer/inner/memory.current": "500\n",
                "/sys/fs/cgroup/outer/memory.max": "1000\n",
                "/sys/fs/cgroup/outer/memory.current": "600\n",
                "/sys/fs/cgroup/outer/memory.stat": "anon 380\nactive_file 20\ninactive_file 200\n",
                "/sys/fs/cgroup/memory.max": "5000\n",
            },
            1000 - (600 - 200),
        ),
        (
            "4:memory:/job\n",
            {
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "800\n",
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "700\n",
                "/sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            800 - (700 - 100),
        ),
        (
            "0::/\n",
            {
                "/sys/fs/cgroup/memory.max": "1000\n",
                "/sys/fs/cgroup/memory.current": "1100\n",
                "/sys/fs/cgroup/memory.stat": "inactive_file 0\n",
            },
            0,
        ),
    ],
    ids=["unlimited", "v2", "v1", "over the limit"],
)
def test_free_memory_is_what_machine_and_cgroups_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900, total=10**6))
    fake_cgroups(monkeypatch, tmp_path, membership, files)
    assert free_host_memory() == expected


def test_this_machine_has_free_memory() -> None:
    assert 0 < free_host_memory() < usable_memory(CPU)
