"""What runs a step: the adapted module as it is, or the graph compiled from it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch

from graphs.capture import CapturedGraph, compiler_missing
from graphs.fusion import GraphRule
from graphs.inputs import StepSizes
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel
from models.report import RuleOutcome
from models.step_inputs import StepInputs, StepOutputs

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs steps over one pair of caches at a time."""

    def padded(self, sizes: StepSizes) -> StepSizes:
        """The sizes that the inputs of a step are to be filled at: its own, or larger ones."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run one step. Side effect: the caches. Outputs are on the inputs' device; the next run may overwrite them."""

    def use(self, cache: KVCache) -> None:
        """Run over other caches from now on: like those before, but for the number of their blocks."""

    @property
    def num_recompiles(self) -> int:
        """Compilations after warm-up."""

    @property
    def outcomes(self) -> list[RuleOutcome]:
        """What rules did to the graph."""

    def rebind(self) -> None:
        """Use the module's parameters as they are now: some may be other tensors."""


class EagerExecutor:
    """Runs the adapted module uncompiled."""

    num_recompiles = 0

    def __init__(self, module: AdaptedModel, cache: KVCache) -> None:
        self.outcomes: list[RuleOutcome] = []  # there is no graph
        self._module, self._cache = module, cache

    def padded(self, sizes: StepSizes) -> StepSizes:
        """See Executor: any sizes do."""
        return sizes

    def use(self, cache: KVCache) -> None:
        """See Executor."""
        self._cache = cache

    def rebind(self) -> None:
        """See Executor: the module is asked in each step."""

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        return self._module(inputs, self._cache.k, self._cache.v)


class CompiledExecutor:
    """Runs the one compiled graph, compiled when this is made."""

    def __init__(
        self,
        module: AdaptedModel,
        cache: KVCache,
        device: torch.device,
        rules: Sequence[GraphRule] = (),
        *,
        progress: bool = True,
    ) -> None:
        self._cache = cache
        self.graph = CapturedGraph(module, rules, progress=progress)
        with torch.no_grad():
            self.graph.compile(cache, device)

    @property
    def num_recompiles(self) -> int:
        """See Executor."""
        return self.graph.num_recompiles

    @property
    def outcomes(self) -> list[RuleOutcome]:
        """See Executor."""
        return self.graph.outcomes

    def padded(self, sizes: StepSizes) -> StepSizes:
        """See Executor: any sizes do."""
        return sizes

    def use(self, cache: KVCache) -> None:
        """See Executor."""
        self._cache = cache

    def rebind(self) -> None:
        """See Executor."""
        self.graph.rebind()

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        return self.graph(inputs, self._cache.k, self._cache.v)


def make_executor(
    module: AdaptedModel,
    cache: KVCache,
    device: torch.device,
    backend: str,
    rules: Sequence[GraphRule] = (),
    *,
    progress: bool = True,
) -> Executor:
    """Make the executor of a backend: "inductor" (compiles now, after `rules` rewrote the graph; without a compiler
    warns and is eager) or "eager"."""
    if backend == "inductor":
        missing = compiler_missing(device)
        if missing is None:
            executor = CompiledExecutor(module, cache, device, rules, progress=progress)
            logger.info("compile: one graph in %.1f s", executor.graph.seconds)
            return executor
        warnings.warn(f"{missing} is not on this machine: running uncompiled (backend='eager')", stacklevel=4)
    return EagerExecutor(module, cache)
