"""Runs the sections of a check in worker processes, so that what breaks one of them does not take the others along.

A worker runs sections one after the other and notes what it finds, a line of JSON each, in a file. Where a section
hangs, or kills the worker, or leaves it unfit for more (a kernel's wild access ends a process's use of the GPU), the
worker is replaced, and the next one goes on with the section after it. What was noted before stays. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 90.0  # that a worker may take to begin its first section: its imports
POLL_SECONDS = 0.05
UNFIT = 3  # exit status of a worker that cannot go on after a section

Note = Callable[[str, Any], None]
Results = dict[str, dict[str, Any]]


def work(
    sections: Mapping[str, Callable[[Note], None]], names: Sequence[str], file: Path, unfit: Callable[[], str | None]
) -> int:
    """What a worker does: run the sections `names` and return its exit status.

    A section is given a function that notes a key and a value of it. unfit: why this process can run no more, or None;
    asked after a section that failed.
    """
    with file.open("a", encoding="utf-8") as out:

        def write(section: str, key: str, value: Any) -> None:
            out.write(json.dumps([section, key, value], default=str) + "\n")
            out.flush()

        for name in names:
            write(name, "started", True)
            start = time.perf_counter()
            failed = False
            try:
                sections[name](lambda key, value, name=name: write(name, key, value))
            except Exception:
                failed = True
                write(name, "error", traceback.format_exc())
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            write(name, "seconds", round(time.perf_counter() - start, 2))
            if failed and (why := unfit()) is not None:
                write(name, "worker", why)
                return UNFIT
    return 0


def supervise(
    command: Callable[[Sequence[str]], Sequence[str]],
    budgets: Mapping[str, float],
    file: Path,
    deadline: float,
    tell: Callable[[str], None] = print,
) -> Results:
    """Run all sections, in the order of `budgets` (seconds each), and return what was noted, by section.

    command: the worker's command line for a list of sections; its notes go into `file`. deadline: by time.monotonic(),
    when the last worker is killed. A section that failed has an `error`, one that nobody came to has `skipped`.
    """
    left = list(budgets)
    while left and time.monotonic() < deadline:
        first = left[0]
        process = subprocess.Popen(command(left), start_new_session=True)
        try:
            why = _watch(process, budgets, file, deadline)
        finally:
            _kill(process)
        results = read(file)
        left = [name for name in left if "seconds" not in results.get(name, {})]
        if why is None:  # it came to the end
            break
        # The section that it was in is over too; the first, if it came to none, lest the next worker do the same.
        current = next((name for name in left if name in results), first if first in left else None)
        if current is not None:
            _append(file, current, "error", why)
            left.remove(current)
        tell(f"{current or 'worker'}: {why}")
    results = read(file)
    for name in budgets:
        found = results.setdefault(name, {})
        if "seconds" not in found and "error" not in found:
            found["skipped"] = "out of time"
    return {name: results[name] for name in budgets}


def read(file: Path) -> Results:
    """What was noted so far. A last line that is cut off is left out."""
    results: Results = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            section, key, value = json.loads(line)
        except ValueError:
            continue
        results.setdefault(section, {})[key] = value
    return results


def _watch(process: subprocess.Popen[bytes], budgets: Mapping[str, float], file: Path, deadline: float) -> str | None:
    """Wait for a worker's end; None if it ran all sections, otherwise what became of it."""
    size, current, since = -1, None, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            return "killed: the whole check is out of time"
        if (grown := file.stat().st_size if file.exists() else 0) != size:
            size = grown
            running = next((name for name, found in read(file).items() if is_running(found)), current)
            if running != current:
                current, since = running, now
        budget = START_SECONDS if current is None else budgets[current]
        if now - since > budget:
            return f"killed: over its {budget:g} s"
        time.sleep(POLL_SECONDS)
    if process.returncode == 0:
        return None
    if process.returncode == UNFIT:
        return "the process was of no more use"
    return f"the process died with status {process.returncode}"


def is_running(found: Mapping[str, Any]) -> bool:
    """Whether a section has begun and not ended."""
    return "started" in found and not {"seconds", "error"} & found.keys()


def _append(file: Path, section: str, key: str, value: Any) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * (text != "" and not text.endswith("\n")) + json.dumps([section, key, value]) + "\n")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a worker, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
