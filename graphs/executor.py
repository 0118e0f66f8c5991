"""What runs a step: the adapted module as it is, or the graph compiled from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from graphs.inputs import StepSizes
from graphs.kv_cache import KVCache
from models.report import RuleOutcome
from models.step_inputs import StepInputs, StepOutputs

if TYPE_CHECKING:  # the latter imports transformers
    from graphs.compiled_graph import Compiled
    from models.adapted import AdaptedModel


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
    """Runs the one compiled graph of a model. state: the model's tensors by name, as they are when it is called."""

    def __init__(self, compiled: Compiled, cache: KVCache, state: Callable[[], Mapping[str, Tensor]]) -> None:
        self.compiled = compiled
        self._cache, self._state = cache, state

    @property
    def num_recompiles(self) -> int:
        """See Executor. Nothing goes through Dynamo once the graph has been captured."""
        return max(0, self.compiled.num_graphs - 1)

    @property
    def outcomes(self) -> list[RuleOutcome]:
        """See Executor."""
        return list(self.compiled.outcomes)

    def padded(self, sizes: StepSizes) -> StepSizes:
        """See Executor: any sizes do."""
        return sizes

    def use(self, cache: KVCache) -> None:
        """See Executor."""
        self._cache = cache

    def rebind(self) -> None:
        """See Executor."""
        self.compiled.runner.rebind(self._state())

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        return self.compiled.runner(inputs, self._cache.k, self._cache.v)
