"""The one place where the graph of an adapted model is captured.

Prefill, mixed and decode steps of any size go through the same graph: T, B, W, L, M, R and the number of blocks are
dynamic, and sizes of 1 are no special case.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx
from torch._dynamo.decorators import mark_unbacked

from graphs.fusion import GraphRule, fuse, is_call
from graphs.inputs import StepSizes
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel, named_tensors
from models.report import RuleOutcome
from models.step_inputs import FIELDS, StepInputs, StepOutputs
from ops.schema import overload

# Sizes to trace with. Every dynamic one is marked as unbacked, so that no guard can depend on its value.
EXAMPLE_SIZES = StepSizes(tokens=13, sequences=3, table_width=5, rows=6, masked=2)
EXAMPLE_PREVIOUS_ROWS = 9


@dataclass(frozen=True)
class Capture:
    """A model's graph, and what its placeholders and outputs are.

    A tensor that goes in has a *slot*: the fields of StepInputs first, then the K caches, the V caches, the tensors of
    the module that `state` names (see `named_tensors`), and `constants`, which have no name.
    `slots` gives that of every tensor placeholder; placeholders that are sizes have none.
    """

    graph: fx.GraphModule
    slots: dict[fx.Node, int]
    state: tuple[str, ...]
    constants: tuple[Tensor, ...]
    results: tuple[fx.Node, ...]  # those of StepOutputs, in order
    num_given: int  # slots of StepInputs and caches
    outcomes: tuple[RuleOutcome, ...]  # what rules did to the graph
    num_graphs: int  # that Dynamo made

    @cached_property
    def positions(self) -> dict[fx.Node, int]:
        """Where in the graph a node stands."""
        return {node: index for index, node in enumerate(self.graph.graph.nodes)}


@torch.no_grad()
def capture(module: AdaptedModel, cache: KVCache, device: torch.device, rules: Sequence[GraphRule] = ()) -> Capture:
    """Trace `module` once by Dynamo, over `cache`, and let `rules` rewrite the graph.

    Nothing is computed: Dynamo's way into the graph serves to learn which of its arguments is which. Nobody goes that
    way again, so no guard, and no `torch._dynamo.reset()`, can lead to another compilation.
    """
    tracer = _Tracer(rules, device)
    inputs = example_inputs(device)
    for tensor in (*cache.k, *cache.v):
        mark_unbacked(tensor, 0, shape_id="N")
    traced = torch.compile(
        _own_function(module),
        backend=tracer,
        fullgraph=True,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},  # it is called only once
    )
    # Scales and softcaps are the model's own: constants. What this or another process compiled before says nothing
    # about this model: Dynamo would make head counts dynamic that differ from those of an earlier engine.
    settings = torch._dynamo.config.patch(
        specialize_float=True, automatic_dynamic_shapes=False, automatic_dynamic_local_pgo=False
    )
    with settings:
        found = traced(inputs, cache.k, cache.v)
    return tracer.describe([*inputs, *cache.k, *cache.v], dict(named_tensors(module)), found)


class _Tracer:
    """Dynamo's backend: it keeps the graph, and stands in for the compiled function in the one call that follows."""

    def __init__(self, rules: Sequence[GraphRule], device: torch.device) -> None:
        self._rules, self._device = rules, device
        self._graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, example: list[object]) -> Callable[..., list[Tensor]]:
        self._graphs.append(graph)
        self._outcomes = fuse(graph.graph, self._rules, self._device)
        _use_own_grouped_product(graph.graph)
        graph.recompile()

        def stand_in(*arguments: object) -> list[Tensor]:
            self._arguments = arguments
            self._results = [torch.empty(0) for _ in _outputs(graph)]
            return self._results

        return stand_in

    def describe(self, given: list[Tensor], state: dict[str, Tensor], found: StepOutputs) -> Capture:
        """Read off that call which argument is which of the `given` tensors, or of the module's, and which result."""
        (graph,) = self._graphs[:1]
        arguments, results = self._arguments, self._results
        del self._arguments, self._results  # Dynamo keeps its backends for good, and must not keep weights and caches
        number = {id(tensor): index for index, tensor in enumerate(given)}
        names = {id(tensor): name for name, tensor in reversed(state.items())}  # of a tensor with several: the first
        held: dict[fx.Node, str | Tensor] = {}
        slots: dict[fx.Node, int] = {}
        for node, argument in zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True):
            if id(argument) in number:
                slots[node] = number[id(argument)]
            elif isinstance(argument, Tensor):
                held[node] = names.get(id(argument), argument)
        used = tuple(dict.fromkeys(name for name in held.values() if isinstance(name, str)))
        constants = [node for node, what in held.items() if isinstance(what, Tensor)]
        places = {name: len(given) + index for index, name in enumerate(used)}
        slots |= {node: places[what] for node, what in held.items() if isinstance(what, str)}
        slots |= {node: len(given) + len(used) + index for index, node in enumerate(constants)}
        outputs = _outputs(graph)
        order = [next(i for i, result in enumerate(results) if result is output) for output in found]
        return Capture(
            graph=graph,
            slots=slots,
            state=used,
            constants=tuple(held[node] for node in constants),  # type: ignore[misc]
            results=tuple(outputs[index] for index in order),
            num_given=len(given),
            outcomes=tuple(self._outcomes),
            num_graphs=len(self._graphs),
        )


def _use_own_grouped_product(graph: fx.Graph) -> None:
    """Replace an op that transformers registers, so that a process without transformers can run the graph.

    It is the product of rows with their experts' [K, N] weights, where torch's own cannot be compiled: not in bfloat16.
    """
    for node in list(graph.nodes):
        if is_call(node, "grouped_mm_fallback"):
            x, weight = node.args[:2]
            offsets = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
            with graph.inserting_before(node):
                transposed = graph.call_method("transpose", (weight, -2, -1))
                product = graph.call_function(overload("grouped_linear", "reference"), (x, transposed, offsets))
            transposed.meta["example_value"] = weight.meta["example_value"].transpose(-2, -1)
            product.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def _outputs(graph: fx.GraphModule) -> tuple[fx.Node, ...]:
    (output,) = graph.graph.find_nodes(op="output")
    return output.args[0]


def example_inputs(device: torch.device) -> StepInputs:
    """Inputs of EXAMPLE_SIZES, all zero (no sequence has a token of its own), with every dynamic dimension marked.

    Marked unbacked, dimensions of one name as one symbol: the graph is then the same for sizes of 0, 1 and more. (With
    `mark_dynamic`, the compiler's view of a strided tensor guards that T is above 1, and T = 1 gets a second graph.)
    Each has memory of its own: of views of one buffer, as in an arena, the offsets would be sizes too.
    """
    tensors = []
    for name, (dtype, dims) in FIELDS.items():
        shape = (EXAMPLE_PREVIOUS_ROWS,) if name == "prev_tokens" else EXAMPLE_SIZES.shape(dims)
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        for index, dim in enumerate(dims):
            if dim != "G":
                mark_unbacked(tensor, index, shape_id=dim)
        tensors.append(tensor)
    return StepInputs(*tensors)


def _own_function(module: AdaptedModel) -> Callable[..., StepOutputs]:
    """Wrap a module in a function with a code object of its own.

    Dynamo keeps its cache, and the limit on its size, per code object: engines in one process must not share one.
    """

    def run(inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> StepOutputs:
        return module(inputs, k_caches, v_caches)

    return types.FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
