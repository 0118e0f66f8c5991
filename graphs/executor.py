"""What runs a step: the adapted module as it is, or the graph compiled from it."""

from __future__ import annotations

import logging
import warnings
from typing import Protocol

import torch

from graphs.capture import CapturedGraph, GraphLostError, compiler_missing
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel
from models.step_inputs import StepInputs, StepOutputs

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs steps over the caches it was made with."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run one step. Side effect: the caches. Outputs are on the inputs' device."""

    @property
    def num_recompiles(self) -> int:
        """Compilations after warm-up."""


class EagerExecutor:
    """Runs the adapted module uncompiled."""

    num_recompiles = 0

    def __init__(self, module: AdaptedModel, cache: KVCache) -> None:
        self._module, self._cache = module, cache

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        return self._module(inputs, self._cache.k, self._cache.v)


class CompiledExecutor:
    """Runs the one compiled graph, compiled when this is made; should Dynamo lose it, the module uncompiled."""

    def __init__(self, module: AdaptedModel, cache: KVCache, device: torch.device, *, progress: bool = True) -> None:
        self._cache = cache
        self._eager = EagerExecutor(module, cache)
        self._lost = False
        self.graph = CapturedGraph(module, progress=progress)
        with torch.no_grad():
            self.graph.compile(cache, device)

    @property
    def num_recompiles(self) -> int:
        """See Executor."""
        return self.graph.num_recompiles

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        if not self._lost:
            try:
                return self.graph(inputs, self._cache.k, self._cache.v)
            except GraphLostError as error:
                self._lost = True
                logger.warning("%s: this engine runs uncompiled from now on; make a new one to compile again", error)
        return self._eager.run(inputs)


def make_executor(
    module: AdaptedModel, cache: KVCache, device: torch.device, backend: str, *, progress: bool = True
) -> Executor:
    """Make the executor of a backend: "inductor" (compiles now; without a compiler warns and is eager) or "eager"."""
    if backend == "inductor":
        missing = compiler_missing(device)
        if missing is None:
            executor = CompiledExecutor(module, cache, device, progress=progress)
            logger.info("compile: one graph in %.1f s", executor.graph.seconds)
            return executor
        warnings.warn(f"{missing} is not on this machine: running uncompiled (backend='eager')", stacklevel=4)
    return EagerExecutor(module, cache)
