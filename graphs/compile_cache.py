"""Compiled graphs that are kept: a model is compiled once on a machine, whichever process does it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.compiled_graph import CompiledGraph
from graphs.sealed_folder import MANIFEST, DamagedFolderError, publish, seal, unseal
from ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)

_DAMAGES = (DamagedFolderError, OSError, KeyError, TypeError)


@dataclass(frozen=True)
class Entry:
    """One graph in the cache. description: model, dtype, device and options; modified: seconds since the epoch."""

    key: str
    path: Path
    nbytes: int
    modified: float
    description: str


def graphs_folder() -> Path:
    """Where the entries lie, each in a folder named by its key. It may not exist yet."""
    return cache_folder() / "graphs"


def problem() -> str | None:
    """Why nothing can be kept, or None. Side effect: makes the folder."""
    folder = graphs_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def find(key: str) -> CompiledGraph | None:
    """The graph of a key (see structure_key), or None; of one that is damaged a warning tells."""
    folder = graphs_folder() / key
    try:
        return _read(folder)
    except _DAMAGES as error:
        logger.warning("the compile cache's entry %s cannot be used, so the model is compiled anew: %s", folder, error)
        return None


def find_or_make(key: str, description: str, make: Callable[[Path], CompiledGraph]) -> CompiledGraph:
    """The graph of a key; if there is none, `make` writes its files into a folder, which then becomes the entry.

    Of several processes that want the same one makes it, and the others wait. What is damaged is removed, with a
    warning, by the one that makes it again. The folder must be there (see `problem`).
    """
    folder = graphs_folder() / key
    with _locked(folder.with_suffix(".lock")):
        try:
            if (found := _read(folder)) is not None:
                return found
        except _DAMAGES as error:
            logger.warning("removing the compile cache's entry: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
        with publish(folder) as scratch:
            made = make(scratch)
            seal(scratch, {**made.to_json(), "description": description, "made": time.time()})
    return CompiledGraph(folder, made.program, made.outcomes)


def _read(folder: Path) -> CompiledGraph | None:
    """Raises what `_DAMAGES` lists."""
    return CompiledGraph.from_json(unseal(folder), folder) if folder.exists() else None


def entries() -> list[Entry]:
    """What the cache holds, the newest first."""
    return sorted(_entries(), key=lambda entry: -entry.modified)


def clear() -> int:
    """Remove all compiled graphs, and inductor's files; returns the bytes freed. Libraries of ops and models stay.

    Waits for processes that make a graph now. An engine that runs one goes on, but cannot be exported any more.
    """
    freed = 0
    for entry in entries():
        with _locked(entry.path.with_suffix(".lock")):
            shutil.rmtree(entry.path, ignore_errors=True)
            freed += entry.nbytes
    inductor = cache_folder() / "inductor"
    freed += _size(inductor)
    shutil.rmtree(inductor, ignore_errors=True)
    return freed


def _entries() -> Iterator[Entry]:
    for manifest in graphs_folder().glob(f"*/{MANIFEST}"):
        folder = manifest.parent
        try:
            content: Mapping[str, Any] = json.loads(manifest.read_text())["content"]
            description = str(content["description"])
        except (OSError, ValueError, LookupError, TypeError):
            description = "damaged"
        yield Entry(folder.name, folder, _size(folder), manifest.stat().st_mtime, description)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process removes it
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file, which is made if needed and stays: the kernel frees a killed holder's."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
