"""How long does it take from the start of a process to the first token, with all that may be kept from one to the next?

python -m bench.cold_start --model smollm2

Every case is a fresh process with cache folders of its own, which hold only what its name says. The model lies in its
folder, and the operating system may have the files in memory; nothing else is warm.

    cold              nothing is kept: the C++ ops are built, the graph is compiled
    cold+ops          the C++ ops are built already, the graph is compiled
    eager-start       as cold, but the first token comes uncompiled while another process compiles the graph
    eager-start+ops   as cold+ops, likewise
    cached            the compiled graph is in the cache; inductor's own folder is empty
    artifact          an exported artifact is loaded; the caches are empty, and there is no compiler on the PATH
    hugging-face      transformers' from_pretrained, and generate of one token, uncompiled

The cases take turns in every round. Counted beside: runs of a C++ compiler (of both processes, where there are two),
and in the process that serves graphs that Dynamo traced, and modules imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.arguments import at_least, names
from bench.models import NAMES, resolve_model
from bench.rounds import alternate, machine
from models.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The capital of France is"
PROMPT_IDS = [1, 2, 3, 4, 5]  # for a model without tokenizer
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang")
PHASES = ("start", "imports", "fetch", "load", "compile", "capture", "other", "first step")


@dataclass(frozen=True)
class Case:
    """A way to start.

    what: the child's task. kept: folders of the cache that are there already. target: seconds for `target_of`, a phase
    or the total.
    """

    what: str
    kept: tuple[str, ...] = ()
    target: float | None = None
    target_of: str = "total"
    eager_start: bool = False
    has_compiler: bool = True


CASES = {
    "cold": Case("compile", (), 35.0, "compile"),
    "cold+ops": Case("compile", ("cpu_ops",), 35.0, "compile"),
    "eager-start": Case("compile", (), 8.0, eager_start=True),
    "eager-start+ops": Case("compile", ("cpu_ops",), 8.0, eager_start=True),
    "cached": Case("compile", ("cpu_ops", "graphs"), 8.0),
    "artifact": Case("load", (), 4.0, has_compiler=False),
    "hugging-face": Case("hugging face"),
}


@dataclass(frozen=True)
class Setting:
    """What all cases have in common: the task's fields, a filled cache to take from, and the most seconds for one."""

    task: Mapping[str, Any]
    prepared: Path
    limit: float


def prepare(what: str, setting: Setting) -> None:
    """Do the task `what`, which fills the cache that cases take from, in a process that is not measured."""
    with tempfile.TemporaryDirectory(prefix="pagegraph-cold-") as scratch:
        run_child({**setting.task, "what": what}, environment(Path(scratch), setting.prepared), setting.limit)


def start(name: str, setting: Setting) -> dict[str, Any]:
    """Run one case in a fresh process and folder; prints a line. Returns phases in seconds, counters and tokens."""
    case = CASES[name]
    task = {**setting.task, "what": case.what}
    if case.eager_start:
        task["knobs"] = {**task["knobs"], "eager_start": True}
    with tempfile.TemporaryDirectory(prefix="pagegraph-cold-") as folder:
        scratch = Path(folder)
        for kept in case.kept:
            if (setting.prepared / kept).is_dir():  # a GPU has no C++ ops
                shutil.copytree(setting.prepared / kept, scratch / "cache" / kept)
        variables = environment(scratch, scratch / "cache", has_compiler=case.has_compiler)
        result = run_child(task, variables, setting.limit)
        result["compiler_runs"] = len((scratch / "compilers.log").read_text().splitlines())
    result["total"] = sum(result["phases"].values())
    print(f"  {name}: {result['total']:.1f} s", flush=True)
    return result


def environment(scratch: Path, cache: Path, *, has_compiler: bool = True) -> dict[str, str]:
    """Variables of a child: folders below `scratch` in place of all others, and a PATH on which compilers are counted.

    Side effect: makes them, and an empty compilers.log that gets a line with each run of a compiler.
    """
    log, binaries, temporary = scratch / "compilers.log", scratch / "bin", scratch / "tmp"
    log.touch()
    for folder in (binaries, temporary):
        folder.mkdir()
    path = os.environ.get("PATH", os.defpath)
    for compiler in COMPILERS:
        if has_compiler and (found := shutil.which(compiler)):
            wrapper = binaries / compiler
            wrapper.write_text(f'#!/bin/sh\necho {compiler} >> "{log}"\nexec "{found}" "$@"\n')
            wrapper.chmod(0o755)
    own = {
        "PAGEGRAPH_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TMPDIR": str(temporary),
        "PATH": f"{binaries}{os.pathsep}{path}" if has_compiler else str(binaries),
        "HF_HUB_OFFLINE": "1",
    }
    left_out = () if has_compiler else ("CC", "CXX")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **own}


def run_child(task: Mapping[str, Any], variables: Mapping[str, str], limit: float) -> dict[str, Any]:
    """Run `bench.cold_start_child` and return what it printed. What it leaves running is ended.

    Raises RuntimeError, with the end of its output, if it fails or takes over `limit` seconds.
    """
    command = [sys.executable, "-m", "bench.cold_start_child"]
    # Files, not pipes: processes that it leaves behind would keep those open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        task = {**task, "spawned": time.time()}
        child = subprocess.Popen(
            [*command, json.dumps(task)], cwd=ROOT, env=variables, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status = str(child.wait(limit))
        except subprocess.TimeoutExpired:
            status = f"over {limit:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        err.seek(0)
        lines = out.read().splitlines()
        if status != "0":
            said = "\n".join([*lines, *err.read().splitlines()][-20:])
            raise RuntimeError(f"{task['what']} failed, with status {status}:\n{said}")
        return json.loads(lines[-1])


def summarise(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and counters of the last one."""
    phases = {phase: [run["phases"][phase] for run in runs if phase in run["phases"]] for phase in PHASES}
    return {
        "target_s": CASES[name].target,
        "target_of": CASES[name].target_of,
        "total_s": statistics.median(run["total"] for run in runs),
        "phases_s": {phase: statistics.median(seconds) for phase, seconds in phases.items() if seconds},
        "totals_s": [run["total"] for run in runs],
        "compiler_runs": runs[-1]["compiler_runs"],
        "counters": runs[-1]["counters"],
        "tokens": runs[-1]["tokens"],
    }


def print_table(cases: Mapping[str, Mapping[str, Any]]) -> None:
    """One line a case: total beside its target, phases, and counts."""
    shown = [phase for phase in PHASES if any(case["phases_s"].get(phase, 0) >= 0.005 for case in cases.values())]
    counted = ("C++ runs", "graphs", "modules")
    print(" " * 16 + "".join(f"{heading:>11}" for heading in ("total", "target", *shown, *counted)))
    for name, case in cases.items():
        target = "" if case["target_s"] is None else f"{case['target_s']:g}"
        target = f"{case['target_of']} {target}" if target and case["target_of"] != "total" else target
        phases = [f"{case['phases_s'][phase]:.2f}" if phase in case["phases_s"] else "" for phase in shown]
        counts = [case["compiler_runs"], case["counters"]["graphs"], case["counters"]["num_modules"]]
        print(f"{name:16}" + "".join(f"{cell:>11}" for cell in (f"{case['total_s']:.2f}", target, *phases, *counts)))


def main(argv: list[str] | None = None) -> None:
    """Print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"{NAMES} (default: smollm2)")
    parser.add_argument("--cases", type=names, default=list(CASES), help="separated by commas (default: all)")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="(default: 3)")
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds for one process (default: 300)")
    parser.add_argument("--backend", help="inductor or eager (default: inductor)")
    parser.add_argument("--dtype", help="of all contestants (default: auto)")
    parser.add_argument("--device", help="(default: auto)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"--cases: there is no {unknown[0]!r}; there are {', '.join(CASES)}")
    folder = resolve_model(args.model)
    prompt = PROMPT_IDS if Checkpoint(folder).load_tokenizer() is None else PROMPT
    knobs = {name: vars(args)[name] for name in ("backend", "dtype", "device") if vars(args)[name] is not None}
    with tempfile.TemporaryDirectory(prefix="pagegraph-cold-") as scratch:
        artifact = Path(scratch) / "artifact"
        task = {"model": str(folder), "artifact": str(artifact), "knobs": knobs, "prompt": prompt}
        setting = Setting(task, Path(scratch) / "cache", args.limit)
        if any(CASES[name].kept or CASES[name].what == "load" for name in args.cases):
            print("compiling once, for what is kept", flush=True)
            prepare("export" if "artifact" in args.cases else "compile", setting)
        results = alternate({name: partial(start, name, setting) for name in args.cases}, args.rounds)
    cases = {name: summarise(name, runs) for name, runs in results.items()}
    print(f"\n{args.model}: seconds from the start of a process to the first token, medians of {args.rounds} rounds")
    print_table(cases)
    tokens = {name: case["tokens"] for name, case in cases.items()}
    if any(others != tokens[args.cases[0]] for others in tokens.values()):
        print(f"first tokens differ: {tokens}")
    print(json.dumps({"bench": "cold_start", "machine": machine(), "args": vars(args), "cases": cases}))


if __name__ == "__main__":
    main()
