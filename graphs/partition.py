"""Cutting the captured graph into pieces, of which equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from graphs.capture import Capture
from graphs.program import Call, Program
from models.step_inputs import StepInputs
from ops.schema import NAMESPACE

_ASSERTION = torch.ops.aten._assert_scalar.default


def partition(capture: Capture, *, share: bool) -> tuple[Program, list[fx.GraphModule]]:
    """Turn a captured graph into a program and the units that it calls, for the compiler.

    share: cut before every attention op, and make pieces that compute the same of other tensors one unit: a stack of
    equal layers becomes three units, the beginning, a layer (from its attention to the next one's) and the end. An
    attention op is a kernel of its own, which the compiler fuses with nothing, so no fusion is lost at the cuts.
    Otherwise, and where that would save less than half of the units, the whole graph is one unit.

    Sizes are no inputs of a unit: it takes them from its tensors. Dynamo's assertions about sizes are left out.
    """
    graph = capture.graph.graph
    if share:
        program, units = _assemble(capture, _cut(graph))
        if len(program.calls) >= 2 * len(units):
            return program, units
    return _assemble(capture, [_computed(graph)])


def _assemble(capture: Capture, pieces: Sequence[Sequence[fx.Node]]) -> tuple[Program, list[fx.GraphModule]]:
    slots = dict(capture.slots)
    num_slots = capture.num_given + len(capture.state) + len(capture.constants)
    units: dict[object, int] = {}
    modules: list[fx.GraphModule] = []
    calls: list[Call] = []
    for nodes in pieces:
        piece = _Piece(nodes, capture)
        if piece.structure not in units:
            units[piece.structure] = len(modules)
            modules.append(fx.GraphModule(capture.graph, piece.graph))
        for node in piece.outputs:
            slots[node] = num_slots
            num_slots += 1
        inputs, outputs = (tuple(slots[node] for node in group) for group in (piece.inputs, piece.outputs))
        calls.append(Call(units[piece.structure], inputs, outputs, ()))
    results = tuple(slots[node] for node in capture.results)
    return (
        Program(
            num_caches=capture.num_given - len(StepInputs._fields),
            state=capture.state,
            num_constants=len(capture.constants),
            calls=tuple(_with_ends(calls, results)),
            results=results,
        ),
        modules,
    )


def _with_ends(calls: Sequence[Call], results: Sequence[int]) -> Iterator[Call]:
    """The calls, each with those outputs of calls that nobody uses after it."""
    returned = {slot for call in calls for slot in call.outputs}
    last = {
        slot: index for index, call in enumerate(calls) for slot in (*call.outputs, *call.inputs) if slot in returned
    }
    for index, call in enumerate(calls):
        dead = tuple(slot for slot, end in last.items() if end == index and slot not in results)
        yield Call(call.unit, call.inputs, call.outputs, dead)


def _computed(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute tensors or have effects; sizes and constants are made where they are needed."""
    return [node for node in graph.nodes if node.op.startswith("call_") and not _is_free(node)]


def _cut(graph: fx.Graph) -> list[list[fx.Node]]:
    """Those nodes in pieces, each but the first beginning with an attention op."""
    pieces: list[list[fx.Node]] = [[]]
    piece_of: dict[fx.Node, list[fx.Node]] = {}
    for node in _computed(graph):
        if str(node.target).startswith(f"{NAMESPACE}.paged_attention."):
            pieces.append([])
        # What picks a tensor out of several stays with what made them: only tensors go from piece to piece.
        sources = [source for source in node.all_input_nodes if isinstance(_value(source), tuple | list)]
        piece_of[node] = piece_of[sources[0]] if sources and sources[0] in piece_of else pieces[-1]
        piece_of[node].append(node)
    return [piece for piece in pieces if piece]


class _Piece:
    """Some nodes of a graph as a graph of their own, from tensors to tensors.

    `inputs` and `outputs` are nodes of the whole graph. `structure` is equal for pieces that compute the same.
    """

    def __init__(self, nodes: Sequence[fx.Node], capture: Capture) -> None:
        own = set(nodes)
        self.graph = fx.Graph()
        self.outputs = [
            node
            for node in nodes
            if isinstance(_value(node), Tensor)
            and (node in capture.results or any(user not in own and not _is_free(user) for user in node.users))
        ]
        free: list[fx.Node] = []  # sizes, and what is computed of them, in order
        inputs: dict[fx.Node, None] = {}
        for node in nodes:
            self._find_inputs(node, own, free, inputs)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._add_sizes(free, inputs, capture)
        self.inputs = list(inputs)
        for node in inputs:
            copy = self._copies[node] = self.graph.placeholder(f"input_{len(self._copies)}")
            copy.meta["val"] = _value(node)  # what inductor takes as the example
        sizes = {size: (self._copies[node], dim) for node in inputs for dim, size in _dynamic(node)}
        for node in sorted({*free, *nodes}, key=capture.positions.__getitem__):
            if node.op == "placeholder":
                tensor, dim = sizes[str(_value(node))]
                self._copies[node] = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
            else:
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
            self._copies[node].meta = {"example_value": _value(node)}
        self.graph.output(tuple(self._copies[node] for node in self.outputs))
        self.structure = _structure(self.graph)

    def _find_inputs(self, node: fx.Node, own: set[fx.Node], free: list[fx.Node], inputs: dict[fx.Node, None]) -> None:
        for source in node.all_input_nodes:
            if source in own or source in inputs or source in free:
                continue
            if _is_free(source):
                self._find_inputs(source, own, free, inputs)
                free.append(source)
            else:
                inputs[source] = None

    def _add_sizes(self, free: Sequence[fx.Node], inputs: dict[fx.Node, None], capture: Capture) -> None:
        """Add a tensor to the inputs for each size that none of them has."""
        for wanted in (str(_value(node)) for node in free if node.op == "placeholder"):
            if all(wanted != size for node in inputs for _, size in _dynamic(node)):
                has_it = (node for node in capture.slots if any(wanted == size for _, size in _dynamic(node)))
                inputs[next(has_it)] = None


def _structure(graph: fx.Graph) -> object:
    """What a graph computes: operators, constants, and the shapes, strides and dtypes that go in."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    lines: list[object] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append((value.dtype, value.device, str(tuple(value.shape)), str(value.stride())))
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda one: f"#{numbers[one]}")
            lines.append((node.op, str(node.target), repr(arguments)))
    return tuple(lines)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _dynamic(node: fx.Node) -> list[tuple[int, str]]:
    """The dimensions of a tensor that are dynamic, and the names of their sizes."""
    value = _value(node)
    shape: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
    return [(dim, str(size)) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a constant, a size, an assertion, or computed of sizes: no kernel runs for it."""
    if node.op == "get_attr" or node.target is _ASSERTION:
        return True
    leaves = tree_leaves(_value(node))
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return bool(leaves) and all(isinstance(leaf, numbers) for leaf in leaves)
