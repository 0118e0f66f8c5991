"""From a schedule to tokens: blocks are moved, inputs filled, the graph run."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from graphs.background_compile import BackgroundCompile
from graphs.buckets import Buckets, choose_sizes
from graphs.compiled_graph import Compiled, compiler_missing
from graphs.cuda_graph import CudaGraphs, RecordedGraphs
from graphs.executor import CompiledExecutor, EagerExecutor, Executor
from graphs.graph_executor import GraphExecutor, graph_sizes
from graphs.inputs import InputArena, StepSizes, nbytes
from graphs.kv_cache import KVCache
from graphs.self_check import SelfCheck, self_check
from graphs.swap_space import SwapSpace
from runtime.batch import InputFiller
from runtime.beam_search import Candidates
from runtime.config import EngineConfig
from runtime.loaded_model import LoadedModel
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.metrics import PhaseSeconds, StepSeconds
from runtime.schedule import Schedule, ScheduledRow

if TYPE_CHECKING:  # with transformers
    from models.adapted import AdaptedModel

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class StepInFlight:
    """A step that was launched.

    `tokens` is where its tokens lie on the host, once `drawn` has happened if the device is a GPU. error: why it could
    not be launched. followed: whether the step after it has been launched, or an interruption may have cut that off.
    """

    schedule: Schedule
    launched: float  # time.perf_counter()
    tokens: Tensor | None = None
    logits: Tensor | None = None
    drawn: torch.cuda.Event | None = None
    error: Exception | None = None
    followed: bool = False

    def collect(self) -> tuple[list[int], list[Candidates]]:
        """Wait for the step; returns the drawn tokens, and the candidates of rows that sample for a beam search.

        Raises what the step failed with.
        """
        if self.error is not None:
            raise self.error
        if self.tokens is None or self.logits is None:  # only blocks were moved
            return [], []
        if self.drawn is not None:
            self.drawn.synchronize()
        return self.tokens.tolist(), _candidates([row for row in self.schedule.rows if row.samples], self.logits)


def _on_device(method: Callable[Concatenate[ModelRunner, _P], _R]) -> Callable[Concatenate[ModelRunner, _P], _R]:
    """Make the runner's GPU the current one for a call: events, streams and captures belong to that."""

    @functools.wraps(method)
    def run(self: ModelRunner, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return method(self, *args, **kwargs)

    return run


class ModelRunner:
    """Owns what lives on the device beside the weights: caches, swap space, inputs, and the executor over them.

    Made, it has compiled the graph, over a cache of two blocks, in `seconds.compile`. `attach` gives it the caches of a
    pool, whose size may depend on what `measure` found, and captures the graphs of decode steps, in `seconds.capture`.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, seconds: PhaseSeconds, *, progress: bool = True
    ) -> None:
        self._loaded, self._config, self._seconds, self._progress = loaded, config, seconds, progress
        self._device = loaded.facts.device
        self._background: BackgroundCompile | None = None
        self._keeps = False
        self.compiled: Compiled | None = None  # what runs, or is captured
        self.executor: Executor
        self.cache: KVCache
        self.swap_space: SwapSpace
        self._compile()

    @_on_device
    def _compile(self) -> None:
        start = time.perf_counter()
        self.cache = self._make_cache(2)
        if (graph := self._loaded.graph) is not None:
            self.compiled = Compiled(graph.runner(self._loaded.tensors(), self._device), graph.outcomes, graph)
            self.executor = CompiledExecutor(self.compiled, self.cache, self._loaded.tensors)
        elif self._config.backend == "eager":
            self.executor = EagerExecutor(self._loaded.module, self.cache)
        else:
            self.executor = self._make_compiled()
        self._seconds.compile = time.perf_counter() - start

    def _make_compiled(self) -> Executor:
        """The executor of the compiled graph, or one that serves until there is a graph, or for want of a compiler."""
        from graphs.compile import Source, compile_graph, find_compiled  # these import transformers
        from graphs.rules import GRAPH_RULES

        loaded, config = self._loaded, self._config
        report = loaded.facts.report
        rules = [make(report.providers) for name, make in GRAPH_RULES.items() if config.applies(name)]
        source = Source(loaded.module, report, self.cache, self._device, rules, config.optimize)
        if (compiled := find_compiled(source)) is not None:
            return self._compiled_executor(compiled)
        if (missing := compiler_missing(self._device)) is not None:
            warnings.warn(f"{missing} is not on this machine: running uncompiled (backend='eager')", stacklevel=6)
            return EagerExecutor(loaded.module, self.cache)
        if (job := loaded.background_job(config, source.key)) is not None:
            self._background, self._find_compiled = BackgroundCompile(job), lambda: find_compiled(source)
            return EagerExecutor(loaded.module, self.cache)
        return self._compiled_executor(compile_graph(source, progress=self._progress))

    def _compiled_executor(self, compiled: Compiled) -> Executor:
        self.compiled = compiled
        self._loaded.facts.report.outcomes += compiled.outcomes
        return CompiledExecutor(compiled, self.cache, self._loaded.tensors)

    @_on_device
    def measure(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Bytes that the largest step and the graphs take on the GPU beside weights and caches: tried on two blocks."""
        rows = self._config.max_num_seqs
        width = -(-max_model_len // self._config.block_size)
        arena = InputArena(self._device)
        host = arena.carve(StepSizes(max_num_batched_tokens, min(rows, max_num_batched_tokens), width, rows))
        for tensor in host:  # no sequence has a token of its own: all are padding
            tensor.zero_()
        host.seq_lens.fill_(1)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.executor.run(arena.upload())
        needed = torch.cuda.max_memory_allocated(self._device) - before
        if self._config.captures(self._device):
            graphs = self._make_graphs(max_model_len, rows, "max_num_seqs").measure()
            logger.info("trial: %.0f MiB for the largest step, %.0f MiB for the graphs", needed / 2**20, graphs / 2**20)
            needed += graphs
        torch.cuda.empty_cache()
        return needed

    @_on_device
    def attach(self, manager: KVCacheManager, max_model_len: int) -> None:
        """Take the memory of the caches and serve over the blocks of `manager`; capture decode steps if configured."""
        config, choices = self._config, self._loaded.facts.report.providers
        self._manager, self._max_model_len = manager, max_model_len
        num_blocks = manager.num_usable_blocks + 1
        self.cache = self._make_cache(num_blocks)
        self.swap_space = SwapSpace(self.cache, manager.host_pool.num_blocks, choices["swap_blocks"])
        logger.info(
            "kv cache: %d blocks of %d tokens, %.0f MiB", num_blocks, config.block_size, self.cache.nbytes / 2**20
        )
        self.executor.use(self.cache)
        if config.captures(self._device):
            self._capture(max_model_len)
        else:
            self._arena = InputArena(self._device, self._token_places(config.max_num_seqs))
        self._filler = InputFiller(self._arena, manager, self.executor.padded)
        # Two, for two steps may be in flight.
        pinned = self._device.type == "cuda"
        self._host_tokens = [torch.empty(len(self._arena.previous), dtype=torch.int64, pin_memory=pinned) for _ in "ab"]

    def wait_for_compiler(self) -> None:
        """Wait until a background compilation, if there is one, has ended."""
        if self._background is not None:
            self._background.wait()

    def keep_compiling(self) -> bool:
        """Have `stop_compiling` leave a background compilation at work; whether there is one."""
        self._keeps = True
        return self._background is not None and self._background.is_running

    def take_compiled(self) -> bool:
        """Run the compiled graph from now on, if a background compilation has made it; whether it has just now.

        If it failed, a warning says why, and steps stay uncompiled. No step may be in flight.
        """
        if self._background is None or self._background.is_running:
            return False
        background, problem = self._background, self._background.problem
        try:
            compiled = self._find_compiled()
        except Exception as error:  # no room to unpack it, a library that is missing: steps can go on as they are
            compiled, problem = None, problem or f"the compiled graph cannot be loaded: {error}"
        if compiled is not None:
            self.executor = self._compiled_executor(compiled)
            self._seconds.eager = time.perf_counter() - background.started
            logger.info("compile: done in the background after %.1f s", self._seconds.eager)
        else:
            logger.warning("steps stay uncompiled: %s", problem or "the compiled graph is not in the cache any more")
        background.stop()  # it has ended
        self._background = None
        return compiled is not None

    def stop_compiling(self) -> None:
        """End a background compilation, unless it was to be kept."""
        if self._background is not None and not self._keeps:
            self._background.stop()
            self._background = None

    @property
    def graphs(self) -> GraphExecutor | None:
        """The executor, if it replays graphs."""
        return self.executor if isinstance(self.executor, GraphExecutor) else None

    @_on_device
    def capture_missing(self) -> bool:
        """Capture a bucket that a step missed, if there is one (cuda_graphs="lazy"). No step may be in flight."""
        if self.graphs is None or not self.graphs.is_missing:
            return False
        self._filler.forget()  # first, for what is captured lies in the same arena, whatever becomes of it
        return self.graphs.capture_missing()

    @_on_device
    def rebind(self) -> None:
        """Run with the weights as they are now; see Executor. No step may be in flight."""
        self._filler.forget()
        self.executor.rebind()

    @_on_device
    def self_check(self, module: AdaptedModel) -> list[SelfCheck]:
        """Compare the executor's decode steps with those of the uncompiled `module`; see graphs/self_check.py.

        No step may be in flight, and no block in use or cached: they are overwritten.
        """
        self._filler.forget()
        eager, facts = EagerExecutor(module, self.cache), self._loaded.facts
        return self_check(self.executor, eager, self.cache, self._arena, self._max_model_len, facts.vocab_size)

    @_on_device
    def copy_rate(self) -> float:
        """Blocks that move to or from the swap space a second, measured; 0 if there is no swap space after all."""
        if not self.swap_space.reserve():
            return 0.0
        return self.swap_space.measure_copy_rate() / self.cache.bytes_per_block

    @_on_device
    def launch(self, schedule: Schedule, seconds: StepSeconds) -> StepInFlight:
        """Queue a step on the device; on a CPU, run it. What goes wrong is raised when the step is collected.

        Side effects: the caches, in the order swap-out, swap-in, copies, forward; the manager's transfers are finished;
        the phases' `seconds` grow.
        """
        step = StepInFlight(schedule, time.perf_counter())
        try:
            self._launch(step, seconds)
        except Exception as error:
            step.error = error
        return step

    def _launch(self, step: StepInFlight, seconds: StepSeconds) -> None:
        schedule = step.schedule
        if schedule.swap_outs:
            self.swap_space.swap_out(schedule.swap_outs)
            self._manager.finish_swap_outs()  # each at once: an interrupted step must not move anything again
        if schedule.swap_ins:
            self.swap_space.swap_in(schedule.swap_ins)
            self._manager.finish_swap_ins()
        if schedule.copies:
            self.cache.copy_blocks(schedule.copies)
            self._manager.finish_copies()
        self._manager.finish_transfers()  # also of requests whose swapped blocks the prefix cache had
        moved = time.perf_counter()
        seconds.transfer += moved - step.launched
        if not schedule.rows:
            return
        inputs = self._filler.fill(schedule)
        filled = time.perf_counter()
        seconds.prepare += filled - moved
        outputs = self.executor.run(inputs)
        count = schedule.num_draws
        drawn, places = outputs.tokens[:count], self._arena.previous
        if drawn.data_ptr() != places.data_ptr():  # a graph has put them there itself
            places[:count] = drawn
        self._host_tokens.reverse()
        step.tokens, step.logits = self._host_tokens[0][:count], outputs.logits
        step.tokens.copy_(drawn, non_blocking=True)
        if drawn.is_cuda:
            step.drawn = torch.cuda.Event()
            step.drawn.record()
        seconds.forward += time.perf_counter() - filled

    def _capture(self, max_model_len: int) -> None:
        most, why = self._config.max_num_seqs, "max_num_seqs"
        if (usable := self._manager.num_usable_blocks) < most:
            most, why = usable, "the blocks of the KV cache"
        graphs = self._make_graphs(max_model_len, most, why)
        start = time.perf_counter()
        if self._config.cuda_graphs != "lazy":
            graphs.capture(progress=self._progress)
            self._seconds.capture = time.perf_counter() - start
            logger.info("capture: %d graphs in %.1f s", len(graphs.captured), self._seconds.capture)
        self._arena, self.executor = graphs.arena, graphs

    def _make_graphs(self, max_model_len: int, most: int, why: str) -> GraphExecutor:
        """A graph executor over the one that there is, for at most `most` rows, because of `why`."""
        buckets = Buckets(choose_sizes(self._config.cudagraph_capture_sizes, most, why))
        sizes = graph_sizes(buckets.sizes[-1], -(-max_model_len // self._config.block_size))
        places = self._token_places(max(self._config.max_num_seqs, buckets.sizes[-1]))
        arena = InputArena(self._device, places, nbytes(sizes))
        maker = CudaGraphs(self._device) if self._device.type == "cuda" else RecordedGraphs()
        return GraphExecutor(self.executor, arena, buckets, sizes.table_width, maker, debug=self._config.debug)

    def _make_cache(self, num_blocks: int) -> KVCache:
        facts, size = self._loaded.facts, self._config.block_size
        choice = facts.report.providers["copy_blocks"]
        return KVCache(facts.report.plan, num_blocks, size, facts.dtype, self._device, choice)

    def _token_places(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)


def _candidates(sampled: list[ScheduledRow], logits: Tensor) -> list[Candidates]:
    """The likeliest tokens of the rows of beam searches, as many as each search looks at. logits: [draws, V]."""
    wanted, start = {}, 0
    for row in sampled:
        if row.request.lead.search is not None:
            wanted[start] = row.request.lead.search.num_candidates
        start += row.num_draws
    if not wanted:
        return []
    rows = logits[torch.tensor(list(wanted), device=logits.device)]
    # float32 as in transformers; at least, for a float64 model.
    logprobs = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
    values, ids = logprobs.topk(min(max(wanted.values()), logprobs.shape[-1]))
    offered = zip(wanted.values(), ids.tolist(), values.tolist(), strict=True)
    return [list(zip(row_ids[:count], row_values[:count], strict=True)) for count, row_ids, row_values in offered]
