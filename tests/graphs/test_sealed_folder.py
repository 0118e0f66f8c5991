"""Sealed folders: what is refused, and that a published one is whole or absent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphs import sealed_folder
from graphs.sealed_folder import MANIFEST, DamagedFolderError, publish, seal, unseal

ROOT = Path(__file__).parents[2]
CONTENT = {"abi": 1, "name": "tiny é", "nested": {"b": [1.5, None], "a": True}}
FILES = {"unit-0.pt2": b"code" * 8, "lib/ops.so": b"\x7fELF\0\xff", "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder with CONTENT and FILES."""
    folder = tmp_path / "sealed"
    write(folder)
    return folder


def write(folder: Path) -> None:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    seal(folder, CONTENT)


def refused(folder: Path) -> DamagedFolderError:
    with pytest.raises(DamagedFolderError) as caught:
        unseal(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.member in str(caught.value)
    return caught.value


def forge(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest as somebody would who knows how it is written."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    manifest["sha256"] = sealed_folder._sha256(rest)
    (folder / MANIFEST).write_bytes(sealed_folder._canonical(manifest))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_content_comes_back(folder: Path) -> None:
    assert unseal(folder) == CONTENT
    manifest = json.loads((folder / MANIFEST).read_bytes())
    assert manifest["members"].keys() == FILES.keys()
    assert manifest["members"]["unit-0.pt2"]["bytes"] == 32


def test_content_comes_back_as_json_has_it(tmp_path: Path) -> None:
    seal(tmp_path, {"sizes": (1, 2), "by number": {10: "a", 9: "b"}})
    assert unseal(tmp_path) == {"sizes": [1, 2], "by number": {"10": "a", "9": "b"}}


def test_a_folder_can_be_moved(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("elsewhere")
    assert unseal(tmp_path / "elsewhere") == unseal(tmp_path / "link") == CONTENT


@pytest.mark.parametrize("name", [*(name for name in FILES if FILES[name]), MANIFEST])
def test_every_changed_byte_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for index, byte in enumerate(data):
        for other in {byte ^ 1, byte ^ 0x20, byte ^ 0xFF, 0, ord(" "), ord("\n")} - {byte}:
            path.write_bytes(data[:index] + bytes([other]) + data[index + 1 :])
            assert refused(folder).member == name
    path.write_bytes(data)
    assert unseal(folder) == CONTENT


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_other_lengths_are_refused(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for other in (*(data[:length] for length in range(len(data))), data + b"\n", data + b"\0", data + data):
        if other != data:
            path.write_bytes(other)
            assert refused(folder).member == name


def test_the_error_says_what_was_expected_and_found(folder: Path) -> None:
    (folder / "unit-0.pt2").write_bytes(b"code" * 7)
    message = str(refused(folder))
    assert "'bytes': 32" in message
    assert "'bytes': 28" in message


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    error = refused(folder)
    assert error.member == name
    assert "found nothing" in str(error)


@pytest.mark.parametrize("name", ["more", ".hidden", "lib/more", "lib/manifest.json", "new/more"])
def test_another_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    error = refused(folder)
    assert error.member == name
    assert "expected nothing, found a file" in str(error)


def test_links_are_refused_and_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (folder / "unit-0.pt2").rename(outside)
    (folder / "unit-0.pt2").symlink_to(outside)  # the very bytes that are expected
    assert refused(folder).member == "unit-0.pt2"
    (folder / "unit-0.pt2").unlink()
    outside.rename(folder / "unit-0.pt2")
    (folder / "lib").rename(tmp_path / "lib")
    (folder / "lib").symlink_to(tmp_path / "lib")
    assert refused(folder).member == "lib"
    (folder / "lib").unlink()
    (tmp_path / "lib").rename(folder / "lib")
    (folder / MANIFEST).rename(tmp_path / MANIFEST)
    (folder / MANIFEST).symlink_to(tmp_path / MANIFEST)
    assert refused(folder).member == MANIFEST


def test_what_unseal_would_refuse_is_not_sealed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    with pytest.raises(DamagedFolderError, match="pipe"):
        seal(tmp_path, {})
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("name", ["../outside", "lib/../../outside", "/outside", "{outside}"])
def test_paths_that_leave_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(FILES["unit-0.pt2"])
    name = name.format(outside=outside)
    forge(folder, lambda manifest: manifest["members"].update({name: manifest["members"]["unit-0.pt2"]}))
    error = refused(folder)
    assert error.member == name
    assert "stays in the folder" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(members=[]),
        lambda manifest: manifest.update(content="text"),
        lambda manifest: manifest.update(more=1),
        lambda manifest: manifest.pop("content"),
        lambda manifest: manifest["members"].update(empty=3),
        lambda manifest: manifest["members"].update(empty={"bytes": 0}),
    ],
)
def test_a_forged_manifest_of_another_form_is_refused(folder: Path, change: Callable[[dict], object]) -> None:
    forge(folder, change)
    refused(folder)


@pytest.mark.parametrize("text", [b"[]", b"3", b'{"content": NaN}', b"[" * 100_000, b"\xff\xfe", b""])
def test_what_is_no_manifest_is_refused(folder: Path, text: bytes) -> None:
    (folder / MANIFEST).write_bytes(text)
    assert refused(folder).member == MANIFEST


def test_a_published_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "key"
    with publish(target) as folder:
        write(folder)
        assert not target.exists()
        assert folder.stat().st_dev == target.parent.stat().st_dev
    assert unseal(target) == CONTENT
    assert names(target.parent) == ["key"]


def test_all_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced = tmp_path / "key", []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with publish(target) as folder:
        write(folder)
    inodes = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert len(inodes) == len(FILES) + 3  # with the manifest and two folders
    assert {inode for inode, published in synced if not published} == inodes
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def test_a_folder_whose_writer_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with publish(tmp_path / "key") as folder:
            write(folder)
            raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        fail()
    assert names(tmp_path) == []


def test_others_may_read_a_published_folder(tmp_path: Path) -> None:
    with publish(tmp_path / "key"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "key").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(FileExistsError, match=name), publish(tmp_path / name) as folder:
            write(folder)
    assert names(tmp_path) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "mine"


def test_an_empty_folder_makes_way(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with publish(tmp_path / "key") as folder:
        write(folder)
    assert unseal(tmp_path / "key") == CONTENT


def test_of_two_writers_at_once_one_wins(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def run(number: int) -> str:
        try:
            with publish(tmp_path / "key") as folder:
                write(folder)
                (folder / MANIFEST).unlink()
                seal(folder, {"number": number})
                barrier.wait()
        except FileExistsError:
            return "second"
        return f"first {number}"

    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            first, second = sorted(pool.map(run, range(2)))
        assert second == "second"
        assert first == f"first {unseal(tmp_path / 'key')['number']}"
        assert names(tmp_path) == ["key"]
        shutil.rmtree(tmp_path / "key")


WRITER = """
import sys
from pathlib import Path
from graphs.sealed_folder import publish
with publish(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()  # until it is killed
"""


def test_a_killed_writer_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "key"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as killed, subprocess.Popen(command, cwd=ROOT, **pipes) as live:
        left, kept = (Path(writer.stdout.readline().strip()) for writer in (killed, live))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        assert not target.exists()
        with publish(target) as folder:
            write(folder)
        assert unseal(target) == CONTENT
        assert not left.exists()
        assert (kept / "half").read_text() == "half"  # its writer lives
        live.send_signal(signal.SIGKILL)
        live.wait()
    with pytest.raises(FileExistsError), publish(target):
        pass
    assert names(tmp_path) == ["key"]


def test_only_scratch_folders_of_the_target_are_cleaned_up(tmp_path: Path) -> None:
    others = (".key", ".key-old", ".key.pagegraph", ".other.pagegraph-x", "key.pagegraph-x")
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".key.pagegraph-x").mkdir()
    with publish(tmp_path / "key"):
        pass
    assert names(tmp_path) == sorted([*others, "key"])


def test_a_scratch_folder_taken_by_a_cleaner_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    try_lock = sealed_folder._try_lock

    def late(scratch: Path) -> object:
        attempts.append(scratch)
        if len(attempts) == 1:
            scratch.rmdir()
        return try_lock(scratch)

    monkeypatch.setattr(sealed_folder, "_try_lock", late)
    with publish(tmp_path / "key") as folder:
        assert folder.parent == attempts[1] != attempts[0]
    assert names(tmp_path) == ["key"]
