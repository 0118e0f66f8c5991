"""Triton's compiled kernels, saved for an artifact and restored from one, on entries as Triton writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.triton import kernel_cache

ROOT = Path(__file__).resolve().parents[2]


def entry(cache: Path, name: str, *files: str) -> None:
    (cache / name).mkdir(parents=True)
    for file in files:
        (cache / name / file).write_text(f"{name} {file}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(kernel_cache, "_cache", lambda: folder)
    monkeypatch.setattr(kernel_cache, "_kernel_names", lambda: {"attend_part"})
    return folder


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_our_kernels_and_launchers_move_and_others_do_not(cache: Path, tmp_path: Path) -> None:
    entry(cache, "OURS", "attend_part.json", "attend_part.cubin", "__grp__attend_part.json")
    entry(cache, "LAUNCHER", "__triton_launcher.cpython-312-x86_64-linux-gnu.so")
    entry(cache, "UTILS", "cuda_utils.so", "cuda_utils.so.lock")
    entry(cache, "OTHER", "triton_poi_fused_0.json", "triton_poi_fused_0.cubin")
    assert kernel_cache.save(tmp_path / "saved") == 3
    saved = content(tmp_path / "saved")
    assert sorted({name.split("/")[0] for name in saved}) == ["LAUNCHER", "OURS", "UTILS"]
    assert not any(name.endswith(".lock") for name in saved)
    before = content(cache)
    for name in ("OURS", "LAUNCHER"):
        for file in (cache / name).iterdir():
            file.unlink()
        (cache / name).rmdir()
    kernel_cache.restore(tmp_path / "saved")
    assert content(cache) == before


def test_what_is_there_already_is_left_alone(cache: Path, tmp_path: Path) -> None:
    entry(tmp_path / "saved", "OURS", "attend_part.json")
    entry(cache, "OURS", "newer.json")
    kernel_cache.restore(tmp_path / "saved")
    assert content(cache) == {"OURS/newer.json": "OURS newer.json"}


def test_an_empty_cache_is_made(cache: Path, tmp_path: Path) -> None:
    entry(tmp_path / "saved", "OURS", "attend_part.json")
    kernel_cache.restore(tmp_path / "saved")
    assert content(cache) == {"OURS/attend_part.json": "OURS attend_part.json"}


def test_the_names_are_those_of_the_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "from ops.triton import kernel_cache; print(*sorted(kernel_cache._kernel_names()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    names = done.stdout.split()
    assert {"attend_part", "merge_parts", "attend_queries", "_write_kv_kernel", "_norm_kernel"} <= set(names), (
        done.stderr
    )
