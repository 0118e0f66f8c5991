"""Folders that are whole or refused: a manifest with the hash of every file, and publishing by one rename.

The hashes find damage, not malice: who can write the folder can write its manifest.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

MANIFEST = "manifest.json"
"""The file that says what belongs to a sealed folder."""

_LOCK, _BUILT = "lock", "built"  # in a scratch folder: held while its writer lives, and what will be published


class DamagedFolderError(ValueError):
    """A folder that is not as it was sealed, or that cannot be sealed. Says where, what was expected and found."""

    def __init__(self, folder: Path, member: str, expected: object, found: object) -> None:
        super().__init__(f"{folder} is damaged: {member}: expected {expected}, found {found}")
        self.folder, self.member = folder, member


def seal(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of `folder`, last of all: `content` (JSON), and size and SHA-256 of every file.

    Raises DamagedFolderError if anything in the folder is neither a folder nor a plain file.
    """
    paths = _files(folder)
    members = dict(zip(paths, _measure(paths.values()), strict=True))
    rest = json.loads(_canonical({"content": content, "members": members}))  # as it will be read
    (folder / MANIFEST).write_bytes(_canonical({**rest, "sha256": _sha256(rest)}))


def unseal(folder: Path) -> dict[str, Any]:
    """The content that `folder` was sealed with, once every byte of it has been found to be as it was then.

    No file of the folder but the manifest is opened before all names have been checked: members lie in the folder,
    none is missing, none is a link, and no other file is there.

    Raises DamagedFolderError.
    """
    manifest = _read_manifest(folder)
    members = manifest["members"]
    for name in members:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise DamagedFolderError(folder, name, "a path that stays in the folder", "one that leaves it")
    paths = _files(folder)
    for name in sorted(paths.keys() ^ members.keys()):
        if name in members:
            raise DamagedFolderError(folder, name, "a file", "nothing")
        raise DamagedFolderError(folder, name, "nothing", "a file")
    for name, found in zip(paths, _measure(paths.values()), strict=True):
        if found != members[name]:
            raise DamagedFolderError(folder, name, members[name], found)
    return manifest["content"]


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` by one rename when the block ends, and is removed if it fails.

    So `target` is whole or absent, whenever the writer is killed; what a killed writer has left is removed by the next.
    An empty folder at `target` makes way.

    Raises FileExistsError at the end of the block if there is something at `target`: another writer was first.
    Side effects: the parents of `target` are made; a hidden folder lies beside it until the end.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.pagegraph-"
    _remove_abandoned(target.parent, prefix)
    scratch, lock = _new_scratch(target.parent, prefix)
    with lock:
        try:
            built = scratch / _BUILT
            built.mkdir()
            yield built
            _sync(built)
            try:
                built.rename(target)
            except OSError as error:
                if not os.path.lexists(target):
                    raise
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
            _sync_one(target.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if not a byte of it has changed: it must be as `seal` writes it."""
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise DamagedFolderError(folder, MANIFEST, "a file", "something else" if os.path.lexists(path) else "nothing")
    text = path.read_bytes()
    try:
        manifest = json.loads(text)
        is_as_written = text == _canonical(manifest)
    except (ValueError, RecursionError) as error:
        raise DamagedFolderError(folder, MANIFEST, "JSON", error) from error
    if not is_as_written:
        raise DamagedFolderError(folder, MANIFEST, "JSON as it was written", "other spaces, order or escapes")
    fields = {"content": dict, "members": dict, "sha256": str}
    if not isinstance(manifest, dict) or {key: type(value) for key, value in manifest.items()} != fields:
        raise DamagedFolderError(folder, MANIFEST, f"an object of {', '.join(fields)}", "something else")
    found = _sha256({key: value for key, value in manifest.items() if key != "sha256"})
    if found != manifest["sha256"]:
        raise DamagedFolderError(folder, MANIFEST, f"sha256 {manifest['sha256']}", found)
    return manifest


def _canonical(data: Mapping[str, Any]) -> bytes:
    """JSON in the one form that we write. Raises ValueError for numbers that JSON does not have."""
    return (json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _sha256(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(data)).hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """Every file below `folder` but the manifest, by its path from there. Links are not followed, but refused."""
    found: dict[str, Path] = {}
    todo = [folder]
    while todo:
        for entry in os.scandir(todo.pop()):
            path = Path(entry.path)
            name = path.relative_to(folder).as_posix()
            if entry.is_dir(follow_symlinks=False):
                todo.append(path)
            elif not entry.is_file(follow_symlinks=False):
                raise DamagedFolderError(folder, name, "a file", "a link or a device")
            elif name != MANIFEST:
                found[name] = path
    return found


def _measure(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What the manifest says of each file. Hashing frees the interpreter, so several are read at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_measure_one, paths))


def _measure_one(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _new_scratch(parent: Path, prefix: str) -> tuple[Path, TextIO]:
    """A scratch folder and its held lock. One that a process which cleans up took for abandoned is given up."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        if (lock := _try_lock(scratch)) is not None:
            return scratch, lock


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the scratch folders whose lock nobody holds: the kernel lets go of a killed writer's."""
    for scratch in parent.iterdir():
        if scratch.name.startswith(prefix):
            with suppress(PermissionError):  # another user's
                if (lock := _try_lock(scratch)) is not None:
                    with lock:
                        shutil.rmtree(scratch, ignore_errors=True)


def _try_lock(scratch: Path) -> TextIO | None:
    """The lock of a scratch folder, held until it is closed; None if another has it, or the folder has gone."""
    try:
        lock = (scratch / _LOCK).open("w")
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (scratch / _LOCK).exists():  # else it was removed between the two
            return lock
    lock.close()
    return None


def _sync(folder: Path) -> None:
    """Have everything below `folder` written to the disk, so that no rename can come before it."""
    for path in folder.rglob("*"):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
