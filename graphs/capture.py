"""The one place where the graph of an adapted model is captured and compiled.

Prefill, mixed and decode steps of any size go through the same graph: T, B, W, L, M, R and the number of blocks are
dynamic, and sizes of 1 are no special case.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.decorators import mark_unbacked
from tqdm import tqdm

from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel
from models.step_inputs import FIELDS, StepInputs, StepOutputs
from ops.cache_folder import cache_folder

# Sizes to trace with. Every dynamic one is marked as unbacked, so that no guard can depend on its value.
EXAMPLE_SIZES = StepSizes(tokens=13, sequences=3, table_width=5, rows=6, masked=2, previous_rows=9)


def compiler_missing(device: torch.device) -> str | None:
    """Say which compiler inductor would need on this machine and not find, or None."""
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler.split()[0])  # the first word: CXX may be "ccache g++"
    return None if found else f"the C++ compiler {compiler!r}, which inductor needs for {device.type},"


def use_lasting_compiler_cache() -> None:
    """Keep inductor's files under our cache folder, unless the user chose a place: its own default is in /tmp.

    Side effect: sets TORCHINDUCTOR_CACHE_DIR in this process's environment.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch itself puts its default into the environment when torch._dynamo is imported: that is not the user's choice.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "inductor")


class GraphLostError(RuntimeError):
    """Dynamo no longer has the graph that it compiled."""


class CapturedGraph:
    """`module` compiled into one graph that is a function of the step's inputs and of the caches.

    `compile` makes it. `graphs` then holds the one FX graph, for inspection. Dynamo is told to check no guards: our
    inputs differ from step to step in marked sizes only, while guards also watch the rest of the process (transformers'
    registry of living models, torch's defaults) and would compile again for nothing. What could still make Dynamo
    forget the graph, a `torch._dynamo.reset()` in the process, is counted in `num_recompiles` and makes calls raise
    GraphLostError.
    """

    def __init__(self, module: AdaptedModel, *, progress: bool = True) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.seconds = 0.0
        self._progress = progress
        self.num_recompiles = 0
        self._function = torch.compile(
            _own_function(module),
            backend=self._compile,
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        )

    def __call__(self, inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> StepOutputs:
        """Run the graph. Side effect: the caches."""
        try:
            return self._function(inputs, k_caches, v_caches)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if self.num_recompiles:
                raise GraphLostError("torch._dynamo.reset() in this process dropped the compiled graph") from error
            raise

    def compile(self, cache: KVCache, device: torch.device) -> None:
        """Compile now, on example inputs that read and write nothing but the null block."""
        use_lasting_compiler_cache()
        inputs = example_inputs(device)
        for tensor in (*cache.k, *cache.v):
            mark_unbacked(tensor, 0, shape_id="N")
        start = time.perf_counter()
        # Scales and softcaps are the model's own: constants. What other runs compiled says nothing about this model.
        settings = torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_local_pgo=False)
        with settings, _moving_bar("compile: tracing", self._progress) as self._bar:
            self(inputs, cache.k, cache.v)
        self.seconds = time.perf_counter() - start

    def _compile(self, graph: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        if self.graphs:
            # The sizes of this call are not marked: a graph of them would serve no other step, unnoticed.
            self.num_recompiles += 1
            raise GraphLostError
        self.graphs.append(graph)
        self._bar.set_description(f"compile: inductor, {len(graph.graph.nodes)} nodes")
        return compile_fx(graph, example)


def example_inputs(device: torch.device) -> StepInputs:
    """Inputs of EXAMPLE_SIZES, all zero (no sequence has a token of its own), with every dynamic dimension marked.

    Marked unbacked, dimensions of one name as one symbol: the graph is then the same for sizes of 0, 1 and more. (With
    `mark_dynamic`, the compiler's view of a strided tensor guards that T is above 1, and T = 1 gets a second graph.)
    """
    arena = InputArena(device)
    arena.carve(EXAMPLE_SIZES).seq_lens.fill_(1)
    inputs = arena.upload()
    for tensor, (_, dims) in zip(inputs, FIELDS.values(), strict=True):
        for index, dim in enumerate(dims):
            if dim != "G":
                mark_unbacked(tensor, index, shape_id=dim)
    return inputs


def _own_function(module: AdaptedModel) -> Callable[..., StepOutputs]:
    """Wrap a module in a function with a code object of its own.

    Dynamo keeps its cache, and the limit on its size, per code object: engines in one process must not share one.
    """

    def run(inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> StepOutputs:
        return module(inputs, k_caches, v_caches)

    return types.FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)


@contextmanager
def _moving_bar(description: str, enabled: bool) -> Iterator[tqdm]:
    """A bar of elapsed seconds that moves while the compiler, which reports no progress, is at work."""
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
            yield bar
        finally:
            done.set()
            thread.join()
