"""The paged K and V tensors of a model, and how many blocks of them fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from models.report import CachePlan
from ops.memory import Spec, allocate
from ops.providers import Choice

CPU_POOL_BYTES = 4 << 30


class KVCache:
    """One K and one V tensor per cache of the plan, each [num_blocks, block_size, kv heads, head dim]."""

    def __init__(
        self, plan: CachePlan, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, copy: Choice
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._copy = copy.overload
        # Uninitialised: a fresh pool costs no memory traffic, and no op may depend on what a free block holds.
        rows = [(site.num_kv_heads, site.k_dim) for site in plan.caches]
        rows += [(site.num_kv_heads, site.v_dim) for site in plan.caches]
        tensors = allocate([Spec((num_blocks, block_size, *row), dtype) for row in rows], device)
        self.k, self.v = tensors[: len(plan.caches)], tensors[len(plan.caches) :]
        for tensor in self.tensors:
            tensor[0] = 0  # the null block: padding reads its first slot

    @property
    def tensors(self) -> list[Tensor]:
        """All K tensors and then all V tensors, as ops on whole blocks take them."""
        return [*self.k, *self.v]

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all K and V tensors."""
        return self.nbytes // self.num_blocks

    def copy_blocks(self, src_dst: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, in one call; pairs of block ids. Side effect: the destination blocks."""
        device = self.k[0].device
        pairs = torch.tensor(src_dst, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copy(self.tensors, pairs.to(device, non_blocking=True))  # pinned: nothing waits for the device


def usable_memory(device: torch.device) -> int:
    """Bytes the process may use on `device` in all: a GPU's total memory, or what the machine and its cgroup allow."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([psutil.virtual_memory().total, *_cgroup_limits().values()])


def free_host_memory() -> int:
    """Bytes of the host's memory that the process can still take: what is available, and what its cgroups leave."""
    left = [limit - _cgroup_usage(group) for group, limit in _cgroup_limits().items()]
    return max(0, min([psutil.virtual_memory().available, *left]))


def _cgroup_limits() -> dict[Path, int]:
    """Memory limits in bytes, by folder, of this process's cgroup and of those above it (v2 and v1), if limited."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return {}
    limits = {}
    for _, controllers, path in groups:
        root, file = Path("/sys/fs/cgroup"), "memory.max"
        if controllers == "memory":
            root, file = root / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            if (limit := folder / file).exists() and (text := limit.read_text().strip()).isdigit():
                limits[folder] = int(text)
    return limits


def _cgroup_usage(group: Path) -> int:
    """Bytes that a cgroup uses, less the inactive page cache: what Kubernetes calls its working set (v2 and v1)."""
    for usage, reclaimable in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        if (group / usage).exists():
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return int((group / usage).read_text()) - int(stat[reclaimable])
    return 0


def num_blocks_for_memory(
    plan: CachePlan,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    utilization: float,
    weight_bytes: int,
    needed: int,
    max_tokens: int,
) -> int:
    """Number of blocks (the null block included) that a pool may have, by memory and by what could ever be used.

    On a CPU: min(utilization * usable memory - weights, max_tokens, 4 GiB); on a GPU without the last bound, less what
    is in use there (weights, other processes) and what is `needed` besides. Raises ValueError if not even one usable
    block fits.
    """
    budget = int(utilization * usable_memory(device))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget -= total - free + needed
    else:
        budget = min(budget - weight_bytes, CPU_POOL_BYTES)
    bytes_per_block = plan.bytes_per_token(dtype.itemsize) * block_size
    fitting = budget // bytes_per_block
    if fitting < 2:
        raise ValueError(
            f"no room for a KV cache: {budget / 2**20:.0f} MiB are left of {usable_memory(device) / 2**20:.0f} MiB at "
            f"gpu_memory_utilization={utilization}, and two blocks need {2 * bytes_per_block / 2**20:.1f} MiB; raise "
            "gpu_memory_utilization, lower block_size, or set kv_cache_memory_bytes or num_blocks"
        )
    return min(fitting, -(-max_tokens // block_size) + 1)
