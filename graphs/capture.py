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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.decorators import mark_unbacked
from tqdm import tqdm

from graphs.fusion import GraphRule, fuse
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel
from models.report import RuleOutcome
from models.step_inputs import FIELDS, StepInputs, StepOutputs
from ops.cache_folder import cache_folder

# Sizes to trace with. Every dynamic one is marked as unbacked, so that no guard can depend on its value.
EXAMPLE_SIZES = StepSizes(tokens=13, sequences=3, table_width=5, rows=6, masked=2)
EXAMPLE_PREVIOUS_ROWS = 9


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


class CapturedGraph:
    """`module` compiled into one graph that is a function of the step's inputs and of the caches.

    `compile` makes it. `graphs` then holds the one FX graph, for inspection, and `outcomes` what `rules` did to it.

    Dynamo is left behind once it has traced: a call hands the compiled function its flat arguments, which a `_Binding`
    finds. Dynamo's way to it would load every parameter through the module in each step and look at guards, and a
    `torch._dynamo.reset()`, or anything else that a guard watches, would compile again.
    """

    def __init__(self, module: AdaptedModel, rules: Sequence[GraphRule] = (), *, progress: bool = True) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.outcomes: list[RuleOutcome] = []
        self.seconds = 0.0
        self._module, self._rules, self._progress = module, rules, progress
        self._compiled: Callable[..., Any]
        self._binding: _Binding

    @property
    def num_recompiles(self) -> int:
        """Graphs that were compiled beside the first one."""
        return max(0, len(self.graphs) - 1)

    def __call__(self, inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> StepOutputs:
        """Run the graph. Side effect: the caches."""
        return self._binding.outputs(self._compiled(*self._binding.arguments((*inputs, *k_caches, *v_caches))))

    def compile(self, cache: KVCache, device: torch.device) -> None:
        """Compile now, on example inputs that read and write nothing but the null block."""
        use_lasting_compiler_cache()
        inputs = example_inputs(device)
        for tensor in (*cache.k, *cache.v):
            mark_unbacked(tensor, 0, shape_id="N")
        start = time.perf_counter()
        traced = torch.compile(
            _own_function(self._module),
            backend=lambda graph, example: self._compile(graph, example, device),
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},  # it is called only once
        )
        # Scales and softcaps are the model's own: constants. What this or another process compiled before says nothing
        # about this model: Dynamo would make head counts dynamic that differ from those of an earlier engine.
        settings = torch._dynamo.config.patch(
            specialize_float=True, automatic_dynamic_shapes=False, automatic_dynamic_local_pgo=False
        )
        with settings, _moving_bar("compile: tracing", self._progress) as self._bar:
            found = traced(inputs, cache.k, cache.v)
        arguments, results = self._first_call
        self._binding = _Binding(self.graphs[0], (*inputs, *cache.k, *cache.v), arguments, found, results)
        self._binding.note_names(dict(_state(self._module)))
        del self._first_call
        self.seconds = time.perf_counter() - start

    def rebind(self) -> None:
        """Take the module's parameters and buffers anew: some may have been replaced by others of their size."""
        self._binding.rebind(dict(_state(self._module)))

    def _compile(self, graph: fx.GraphModule, example: list[Any], device: torch.device) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.outcomes = fuse(graph.graph, self._rules, device)
        graph.recompile()
        self.graphs.append(graph)
        self._bar.set_description(f"compile: inductor, {len(graph.graph.nodes)} nodes")
        self._compiled = compile_fx(graph, example)

        def first_call(*arguments: Any) -> Any:
            results = self._compiled(*arguments)
            self._first_call = arguments, results
            return results

        return first_call


class _Binding:
    """How a step's tensors, and the parameters, become the flat arguments of a compiled graph, and its results ours.

    It is read off one call that came through Dynamo: a tensor of the call is an input if it is that very object, and a
    parameter otherwise; a number is the size, or the storage offset, of the input that has its symbol there.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: tuple[Tensor, ...],
        arguments: tuple[Any, ...],
        outputs: StepOutputs,
        results: Sequence[Any],
    ) -> None:
        position = {id(tensor): index for index, tensor in enumerate(inputs)}
        examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes: dict[
            str, tuple[int, int | None]
        ] = {}  # by symbol: which input, and the dimension or None for the offset
        for argument, example in zip(arguments, examples, strict=True):
            if id(argument) in position:
                for dim, size in enumerate(example.shape):
                    sizes.setdefault(str(size), (position[id(argument)], dim))
                sizes.setdefault(str(example.storage_offset()), (position[id(argument)], None))
        self._constants: list[Any] = list(arguments)
        self._tensors: list[tuple[int, int]] = []
        self._sizes: list[tuple[int, int, int | None]] = []
        for index, (argument, example) in enumerate(zip(arguments, examples, strict=True)):
            if id(argument) in position:
                self._tensors.append((index, position[id(argument)]))
                self._constants[index] = None  # example inputs are not kept alive
            elif not isinstance(argument, Tensor):
                self._sizes.append((index, *sizes[str(example)]))
        self._results = [next(i for i, result in enumerate(results) if result is output) for output in outputs]

    def note_names(self, state: Mapping[str, Tensor]) -> None:
        """Remember which constants are which of a module's parameters and buffers."""
        names = {id(tensor): name for name, tensor in state.items()}
        self._names = {index: names[id(c)] for index, c in enumerate(self._constants) if id(c) in names}

    def rebind(self, state: Mapping[str, Tensor]) -> None:
        """Replace those constants by the tensors that now have their names."""
        for index, name in self._names.items():
            self._constants[index] = state[name]

    def arguments(self, inputs: tuple[Tensor, ...]) -> list[Any]:
        """The flat arguments for a step's inputs and caches."""
        flat = self._constants.copy()
        for index, source in self._tensors:
            flat[index] = inputs[source]
        for index, source, dim in self._sizes:
            flat[index] = inputs[source].storage_offset() if dim is None else inputs[source].shape[dim]
        return flat

    def outputs(self, results: Sequence[Any]) -> StepOutputs:
        """Our outputs among the graph's results."""
        return StepOutputs(*(results[index] for index in self._results))


def _state(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, those that are no part of the state dict too."""
    return chain(module.named_parameters(), module.named_buffers())


def example_inputs(device: torch.device) -> StepInputs:
    """Inputs of EXAMPLE_SIZES, all zero (no sequence has a token of its own), with every dynamic dimension marked.

    Marked unbacked, dimensions of one name as one symbol: the graph is then the same for sizes of 0, 1 and more. (With
    `mark_dynamic`, the compiler's view of a strided tensor guards that T is above 1, and T = 1 gets a second graph.)
    """
    arena = InputArena(device, torch.zeros(EXAMPLE_PREVIOUS_ROWS, dtype=torch.int64, device=device))
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
