"""Compiled kernels of ours as files, to go with an artifact: out of Triton's cache, and into that of another machine.

Triton finds an entry by a hash of the kernel's source, its constants, its own version and the GPU's architecture, so an
entry that does not fit is never used.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ops.triton.library import FILES

_LAUNCHERS = ("cuda_utils", "__triton_launcher")  # what Triton builds with a C compiler to launch kernels


def save(folder: Path) -> int:
    """Copy the entries of our kernels, and of what launches them, from Triton's cache; returns how many there were."""
    names = _kernel_names()
    entries = [entry for entry in _cache().glob("*/") if _is_ours(entry, names)]
    for entry in entries:
        shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("*.lock", "tmp.*"))
    return len(entries)


def restore(folder: Path) -> None:
    """Copy saved entries to Triton's cache, but for those that it has. Each appears by one rename."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        target = cache / entry.name
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".pagegraph-", dir=cache) as scratch:
                copied = shutil.copytree(entry, Path(scratch) / entry.name)
                with suppress(OSError):  # another process was first
                    copied.rename(target)


def _cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _kernel_names() -> set[str]:
    """The names of all kernels in the files of ops/triton, by which Triton names their files."""
    from triton.runtime.jit import JITFunction

    modules = [importlib.import_module(f"ops.triton.{file}") for file in sorted(set(FILES.values()))]
    return {value.__name__ for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}


def _is_ours(entry: Path, names: set[str]) -> bool:
    return any(
        (file.suffix == ".json" and file.stem in names) or (file.name.startswith(_LAUNCHERS) and file.suffix == ".so")
        for file in entry.iterdir()
    )
