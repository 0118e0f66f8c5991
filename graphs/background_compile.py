"""Compiling in another process, while this one serves uncompiled: the result comes by way of the compile cache."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)

_NICENESS = 10  # below the process that serves
_SHOWN_LINES = 15  # of what a failed compilation printed


@dataclass(frozen=True)
class Job:
    """What another process needs to make the same graph.

    skeleton: the model before it was adapted, without weights, pickled; dtype: what its weights are cast to, None if
    they are not; key: that of the compile cache. The rest is as in `runtime.compile`.
    """

    skeleton: bytes
    dtype: torch.dtype | None
    key: str
    device: torch.device
    providers: Mapping[str, str]
    rules: Collection[str] | None
    block_size: int
    optimize: str


class BackgroundCompile:
    """A process of lower priority that compiles a job and puts the graph into the compile cache.

    It is no thread, since Dynamo and inductor would keep the interpreter from the steps. It outlives this process
    unless it is stopped.
    """

    def __init__(self, job: Job) -> None:
        """Start it."""
        self.started = time.perf_counter()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed by `stop`, or with this object)
        # Our packages are found where this process found them: their names are common, and the folder may be another's.
        # The job is read before anything slow is imported: this process waits until it has been.
        code = f"import sys; data = sys.stdin.buffer.read(); sys.path[:] = {sys.path!r}; "
        code += "from graphs.background_compile import main; main(data)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PAGEGRAPH_CACHE_DIR": str(cache_folder().resolve())},
            # Ctrl-C is this process's, and `stop` ends compilers too. No new session: Linux shares a CPU out by session
            # first, so a lower priority in another one counts for nothing (1.3 tokens/s beside it, instead of 12).
            process_group=0,
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe, suppress(BrokenPipeError):  # if it has failed already, `problem` says why
            pipe.write(pickle.dumps(job))
        logger.info("compile: in the background, by process %d; steps run uncompiled until then", self._process.pid)

    @property
    def is_running(self) -> bool:
        """Whether it is still at work."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    @property
    def problem(self) -> str | None:
        """Of one that has ended: what it failed with, or None."""
        if self._process.wait() == 0:
            return None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return "\n".join([f"the background compilation ended with status {self._process.returncode}:", *lines])

    def stop(self) -> None:
        """End it and the compilers that it runs, if it still runs."""
        if self.is_running:  # else its id may be another's by now
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
        self._output.close()


def main(data: bytes) -> None:
    """What the process does: compile a pickled job. What goes wrong is raised.

    Side effects: its priority; all its temporary files lie in a folder that goes when it ends, or is stopped.
    """
    os.nice(_NICENESS)
    with tempfile.TemporaryDirectory(prefix="pagegraph-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # the compilers' too

        def stop(*_: object) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)  # nothing here is to be tidied up, and no compiler to be waited for

        signal.signal(signal.SIGTERM, stop)
        _compile(data)


def _compile(data: bytes) -> None:
    from graphs.compile import Source, compile_ahead_of_time
    from graphs.kv_cache import KVCache
    from graphs.rules import GRAPH_RULES
    from models.adapted import adapt

    job: Job = pickle.loads(data)
    model = pickle.loads(job.skeleton)
    adaptation = adapt(model, job.device, job.providers, job.dtype, job.rules)
    adaptation.materialise(job.device, own=False, dtype=job.dtype)  # uninitialised: nobody touches these weights
    choices = adaptation.report.providers
    dtype = job.dtype or model.dtype
    cache = KVCache(adaptation.report.plan, 2, job.block_size, dtype, job.device, choices["copy_blocks"])
    rules = [make(choices) for name, make in GRAPH_RULES.items() if job.rules is None or name in job.rules]
    source = Source(adaptation.module, adaptation.report, cache, job.device, rules, job.optimize)
    if source.key != job.key:
        raise RuntimeError(f"this process would make another graph, {source.key}, than the one wanted, {job.key}")
    compile_ahead_of_time(source)
