"""From an adapted module to its compiled graph: out of the compile cache, or captured, cut and compiled now."""

from __future__ import annotations

import gc
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tqdm import tqdm

from graphs import compile_cache
from graphs.compiled_graph import Compiled, CompiledGraph, save_constants
from graphs.device import describe
from graphs.fusion import GraphRule
from graphs.kv_cache import KVCache
from graphs.program import ProgramRunner
from graphs.structure_key import structure_key
from models.adapted import AdaptedModel, named_tensors
from models.report import RewriteReport

logger = logging.getLogger(__name__)

MANY_SITES = 6  # attention sites from which on the graph may be cut into units


@dataclass(frozen=True)
class Source:
    """What a compiled graph is made from. cache: one of any number of blocks.

    optimize: "startup" compiles equal layers once, "latency" the whole model as one unit.
    """

    module: AdaptedModel
    report: RewriteReport
    cache: KVCache
    device: torch.device
    rules: Sequence[GraphRule]
    optimize: str

    @cached_property
    def key(self) -> str | None:
        """That of the compile cache; None if nothing can tell whether a kept graph would be this model's."""
        names = [rule.name for rule in self.rules]
        return structure_key(self.module, self.report, self.cache, self.device, names, self.optimize)

    @property
    def description(self) -> str:
        """For people who look at the cache."""
        dtype = str(self.cache.k[0].dtype).removeprefix("torch.")
        device = describe(self.device)
        on = " ".join(str(device[field]) for field in ("type", "machine", "capability") if field in device)
        return (
            f"{self.report.architecture}, {len(self.report.plan.sites)} attention sites, {dtype}, {on}, {self.optimize}"
        )


def find_compiled(source: Source) -> Compiled | None:
    """The graph, if the compile cache has it."""
    key = source.key
    graph = None if key is None else compile_cache.find(key)
    return None if graph is None else _loaded(source, graph)


def compile_graph(source: Source, *, progress: bool = True) -> Compiled:
    """Take a model's graph from the compile cache, or compile it, and keep it there.

    What cannot be kept (a model with hooks, a cache folder that cannot be written) is compiled all the same, with a
    warning. So is what inductor cannot compile ahead of time: for this process alone.
    Raises BuildError, with the compiler's output, if the C++ compiler fails twice.
    """
    from graphs.compiler import AheadOfTimeError

    start = time.perf_counter()
    with _moving_bar("compile", progress) as tell:
        try:
            compiled = compile_ahead_of_time(source, tell)
        except AheadOfTimeError as error:
            warnings.warn(f"compiled for this process only, and slower to start each time: {error}", stacklevel=2)
            compiled = _in_memory(source, str(error), tell)
    program = compiled.runner.program
    how = (
        "out of the cache"
        if compiled.num_graphs == 0
        else f"{program.num_units} units, called {len(program.calls)} times"
    )
    logger.info("compile: one graph, %s, in %.1f s", how, time.perf_counter() - start)
    return compiled


def compile_ahead_of_time(source: Source, tell: Callable[[str], None] = lambda _: None) -> Compiled:
    """As `compile_graph`, but raise AheadOfTimeError for what inductor cannot compile ahead of time.

    tell: is given what is being done.
    """
    num_graphs = 0

    def make(folder: Path) -> CompiledGraph:
        nonlocal num_graphs
        from graphs.capture import capture  # these import Dynamo and inductor, which a cached graph needs not
        from graphs.compiler import UnitCompiler
        from graphs.partition import partition

        share = source.optimize == "startup"
        many_units = share and len(source.report.plan.sites) >= MANY_SITES
        with _no_collection(), UnitCompiler(source.device, many_units=many_units) as compiler:
            tell("tracing")
            captured = capture(source.module, source.cache, source.device, source.rules)
            num_graphs = captured.num_graphs
            program, units = partition(captured, share=share)
            compiler.compile(units, program.num_calls, folder, tell)
        save_constants(folder, captured.constants)
        return CompiledGraph(folder, program, captured.outcomes)

    key, problem = source.key, compile_cache.problem()
    if key is None:
        problem = "the model has forward hooks, which may do anything"
    if key is None or problem is not None:
        warnings.warn(f"the compiled graph is not kept for the next start: {problem}", stacklevel=4)
        kept = tempfile.TemporaryDirectory(prefix="pagegraph-")
        return _loaded(source, make(Path(kept.name)), num_graphs, kept)
    return _loaded(source, compile_cache.find_or_make(key, source.description, make), num_graphs)


def _loaded(
    source: Source, graph: CompiledGraph, num_graphs: int = 0, kept: tempfile.TemporaryDirectory[str] | None = None
) -> Compiled:
    runner = graph.runner(dict(named_tensors(source.module)), source.device)
    return Compiled(runner, graph.outcomes, graph, num_graphs, kept=kept)


def _in_memory(source: Source, problem: str, tell: Callable[[str], None]) -> Compiled:
    from graphs.capture import capture
    from graphs.compiler import compile_in_memory
    from graphs.partition import partition

    captured = capture(source.module, source.cache, source.device, source.rules)
    program, units = partition(captured, share=source.optimize == "startup")
    runner = ProgramRunner(
        program, compile_in_memory(units, tell), captured.constants, dict(named_tensors(source.module))
    )
    return Compiled(runner, captured.outcomes, None, captured.num_graphs, problem)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage among the millions of objects that Dynamo and inductor make, and keep.

    It would take a tenth of the compilation's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _moving_bar(description: str, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A bar of elapsed seconds that moves while the compiler, which reports no progress, is at work.

    Yields what changes its text.
    """
    done = threading.Event()
    # None: off where stderr is no terminal, which a moving clock would only fill.
    with tqdm(desc=description, bar_format="{desc} {elapsed}{postfix}", disable=None if enabled else True) as bar:

        def move() -> None:
            while not done.wait(0.5):
                bar.update()
                bar.refresh()

        thread = threading.Thread(target=move, daemon=True)
        thread.start()
        try:
            yield lambda text: bar.set_description(f"{description}: {text}")
        finally:
            done.set()
            thread.join()
