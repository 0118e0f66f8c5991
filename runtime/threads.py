"""How many CPU threads this process should compute with."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ops.cpu.library import load, problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processors:
    """What the process may use: the CPUs of its affinity mask by physical core, and its share of their time.

    quota: CPUs' worth of time that the process's cgroups allow, None if they set no limit.
    """

    cores: tuple[tuple[int, ...], ...]
    quota: float | None

    @property
    def num_cpus(self) -> int:
        """Logical CPUs in the affinity mask."""
        return sum(map(len, self.cores))

    @property
    def num_threads(self) -> int:
        """One thread for each core, since two on one core share what computes, and no more than the quota feeds."""
        return len(self.cores) if self.quota is None else max(1, min(len(self.cores), int(self.quota)))

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:g}"
        return f"{self.num_cpus} CPUs on {len(self.cores)} cores, {quota}"


def use_threads(asked: int | None) -> int:
    """Let PyTorch compute with `asked` threads, or with what the process may use; returns the number.

    $OMP_NUM_THREADS, if set, decides where None is asked for. Where cores have several CPUs, all cores are used and no
    quota shares them with others, each worker stays on a core of its own, if the C++ ops could be built.

    Side effects: torch.set_num_threads and the workers' affinity, both for the whole process; one line in the log, as a
    warning if there are more threads than CPUs.
    """
    found = processors()
    if asked is None and "OMP_NUM_THREADS" in os.environ:
        number, why = torch.get_num_threads(), "by OMP_NUM_THREADS"
    else:
        number, why = (found.num_threads, "one for each core") if asked is None else (asked, "as asked for")
        torch.set_num_threads(number)
    pinned = 0
    # With fewer threads than cores others may compute beside us, and would choose the same cores.
    if 1 < number == len(found.cores) < found.num_cpus and found.quota is None and problem() is None:
        pinned = load().pin_workers([core[0] for core in found.cores])
    level = logging.WARNING if number > found.num_cpus else logging.INFO
    logger.log(level, "threads: %d, %s, of %s; %d workers on cores of their own", number, why, found, pinned)
    return number


def processors(root: Path = Path("/")) -> Processors:
    """Read affinity mask, topology and cgroup (v2 and v1) of this process from below `root`: Linux.

    Elsewhere all CPUs count as cores.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_core(root, cpu), []).append(cpu)
    return Processors(tuple(map(tuple, cores.values())), _quota(root))


def _core(root: Path, cpu: int) -> str:
    """A name for the core of a CPU: the list of the CPUs that it shares it with."""
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return siblings.read_text().strip() if siblings.exists() else str(cpu)


def _quota(root: Path) -> float | None:
    """The smallest limit of the cgroups that this process is in, in CPUs."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return None
    limits = []
    for _, controllers, path in groups:
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mount = root / "sys/fs/cgroup/cpu"
        else:
            continue
        group = mount / path.strip().lstrip("/")
        for folder in (group, *group.parents):
            limits += _limit(folder)
            if folder == mount:
                break
    return min(limits, default=None)


def _limit(group: Path) -> list[float]:
    """The limit of one cgroup, if it has one."""
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    if (group / "cpu.cfs_quota_us").exists():
        old_quota = int((group / "cpu.cfs_quota_us").read_text())
        return [old_quota / int((group / "cpu.cfs_period_us").read_text())] if old_quota > 0 else []
    return []
