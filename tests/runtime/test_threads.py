"""How many threads an engine computes with: from made-up file systems, and on this machine."""

import logging
import os
from pathlib import Path

import pytest
import torch

from runtime.threads import Processors, processors, use_threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def eight_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four cores with two CPUs each, on which this process may use CPUs 0, 1, 4 and 6."""
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 6}, raising=False)
    return tmp_path


def test_cpus_of_one_core_count_once(eight_cpus):
    found = processors(eight_cpus)
    assert found == Processors(((0, 4), (1,), (6,)), None)
    assert (found.num_cpus, found.num_threads) == (4, 3)
    assert str(found) == "4 CPUs on 3 cores, no quota"


@pytest.mark.parametrize(
    ("limits", "quota", "threads"),
    [
        ({"": "max 100000", "a": "max 100000"}, None, 3),
        ({"": "max 100000", "a": "250000 100000", "a/b": "max 100000"}, 2.5, 2),
        ({"a": "400000 100000", "a/b": "150000 100000"}, 1.5, 1),
        ({"a/b": "20000 100000"}, 0.2, 1),
        ({"a/b": "900000 100000"}, 9.0, 3),
    ],
)
def test_the_smallest_quota_above_the_process_counts(eight_cpus, limits, quota, threads):
    write(eight_cpus / "proc/self/cgroup", "0::/a/b\n")
    for group, text in limits.items():
        write(eight_cpus / "sys/fs/cgroup" / group / "cpu.max", text + "\n")
    found = processors(eight_cpus)
    assert (found.quota, found.num_threads) == (quota, threads)


def test_quotas_of_the_first_cgroup_version_count(eight_cpus):
    write(eight_cpus / "proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/job\n")
    for group, quota in (("", -1), ("job", 200000)):
        write(eight_cpus / "sys/fs/cgroup/cpu" / group / "cpu.cfs_quota_us", f"{quota}\n")
        write(eight_cpus / "sys/fs/cgroup/cpu" / group / "cpu.cfs_period_us", "100000\n")
    assert processors(eight_cpus).quota == 2.0


def test_a_system_without_these_files_has_a_core_for_each_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert processors(tmp_path) == Processors(((0,), (3,)), None)


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_asked_for_is_used_and_told(threads_restored, caplog):
    caplog.set_level(logging.INFO, "runtime.threads")
    assert use_threads(1) == torch.get_num_threads() == 1
    assert caplog.messages[-1].startswith("threads: 1, as asked for, of ")


def test_the_environment_decides_where_nothing_is_asked_for(threads_restored, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "runtime.threads")
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads(None) == torch.get_num_threads() == 1
    assert "by OMP_NUM_THREADS" in caplog.messages[-1]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert use_threads(None) == torch.get_num_threads() == processors().num_threads


def test_more_threads_than_cpus_are_warned_of(threads_restored, caplog):
    number = processors().num_cpus + 1
    assert use_threads(number) == number
    assert [record.levelname for record in caplog.records] == ["WARNING"]


SMT = ((0, 2), (1, 3))  # two cores of two CPUs


def test_workers_are_pinned_only_where_every_core_is_theirs(threads_restored, monkeypatch):
    pinned = []

    class Library:
        def pin_workers(self, cpus):
            pinned.append(cpus)
            return len(cpus) - 1

    monkeypatch.setattr("runtime.threads.problem", lambda: None)
    monkeypatch.setattr("runtime.threads.load", Library)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found, shared, single = (Processors(c, q) for c, q in ((SMT, None), (SMT, 1.5), (((0,), (1,)), None)))
    for machine, asked in ((found, None), (found, 1), (shared, 2), (single, 2)):
        monkeypatch.setattr("runtime.threads.processors", lambda machine=machine: machine)
        use_threads(asked)
    assert pinned == [[0, 1]]
