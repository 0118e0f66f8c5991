"""Rules on the captured graph: nodes that one op can replace, verified numerically before they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from models.report import RuleOutcome
from models.rules.verification import difference


@dataclass(frozen=True)
class Fusion:
    """A place in a graph where one op can do the work of several nodes.

    `replacement` computes the outputs from the inputs, as tensors or as proxies; it may write to some inputs. It is
    inserted before the node `before`; the `erased` nodes, which have side effects, would otherwise stay.
    `example` makes inputs to verify with; None: random ones of the inputs' sizes, integers 0, 1, ...
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    replacement: Callable[..., tuple[Any, ...]]
    before: fx.Node
    reason: str
    erased: tuple[fx.Node, ...] = ()
    example: Callable[[], list[Tensor]] | None = None


class GraphRule(Protocol):
    """An optional rewrite of the captured graph. Never needed for correctness; skipped when unsure."""

    name: str

    def find(self, graph: fx.Graph) -> Iterator[Fusion]:
        """Yield the places, each after the one before it was applied or skipped."""


def fuse(graph: fx.Graph, rules: Iterable[GraphRule], device: torch.device) -> list[RuleOutcome]:
    """Apply every rule wherever it matches and verifies. Changes `graph`; returns what was done.

    A rule is verified once for what is the same but for its place, since layers repeat, and on the device that the
    graph is for: its ops may run nowhere else.
    """
    outcomes: list[RuleOutcome] = []
    for rule in rules:
        verdicts: dict[object, str | None] = {}
        for fusion in _found(rule, graph, outcomes):
            key = _structure(fusion)
            if key not in verdicts:
                verdicts[key] = _verify(fusion, device)
            failure = verdicts[key]
            if failure is None:
                _apply(graph, fusion)
            outcomes.append(RuleOutcome(rule.name, _module(fusion.before), failure is None, failure or fusion.reason))
    return outcomes


def _found(rule: GraphRule, graph: fx.Graph, outcomes: list[RuleOutcome]) -> Iterator[Fusion]:
    """What a rule finds; should it stumble over a model's code, that is an outcome, and the rule ends there."""
    places = rule.find(graph)
    while True:
        try:
            fusion = next(places)
        except StopIteration:
            return
        except Exception as error:
            reason = f"matching could not go on: {type(error).__name__}: {error}"
            outcomes.append(RuleOutcome(rule.name, "", False, reason))
            return
        yield fusion


def _structure(fusion: Fusion) -> object:
    """The inputs' sizes, and what is computed from them, constants included, but not where in the graph."""
    numbers = {node: index for index, node in enumerate(fusion.inputs)}
    between = _between(fusion)
    lines = []
    for node in fusion.before.graph.nodes:
        if node in between:
            numbers[node] = len(numbers)
            lines.append((str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda n: f"#{numbers.get(n)}"))))
    return tuple(shape(node) for node in fusion.inputs), tuple(lines)


def value(node: Any) -> Tensor | None:
    """The fake tensor that Dynamo noted for a node, or None if it is no tensor."""
    noted = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return noted if isinstance(noted, Tensor) else None


def shape(node: Any) -> tuple[int | str, ...] | None:
    """A node's sizes, dynamic ones by name, since comparing symbols would guard on them; None if it is no tensor."""
    noted = value(node)
    return None if noted is None else tuple(n if isinstance(n, int) else str(n) for n in noted.shape)


def is_call(node: Any, *names: str) -> bool:
    """Whether a node calls a function or method of one of these names."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in names


def _apply(graph: fx.Graph, fusion: Fusion) -> None:
    replaced = _between(fusion)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    with graph.inserting_before(fusion.before):
        new = fusion.replacement(*(fx.Proxy(node, tracer) for node in fusion.inputs))
    for node, proxy in zip(fusion.outputs, new, strict=True):
        node.replace_all_uses_with(proxy.node)
        proxy.node.meta.setdefault("example_value", node.meta.get("example_value"))
    # Not fx's eliminate_dead_code: it takes x.add_(y) for dead where nobody uses what it returns.
    for node in reversed(graph.nodes):
        if node in replaced and not node.users:
            graph.erase_node(node)


def _between(fusion: Fusion) -> set[fx.Node]:
    """The nodes that compute the outputs, and those with side effects, from the inputs."""
    found: set[fx.Node] = set()
    todo = [*fusion.outputs, *fusion.erased]
    while todo:
        node = todo.pop()
        if node not in found and node not in fusion.inputs:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _verify(fusion: Fusion, device: torch.device) -> str | None:
    """What speaks against a fusion, a verification that cannot run included.

    Both run in float32 on random inputs; what they leave in their inputs is compared too.
    """
    try:
        inputs = _random_inputs(fusion.inputs) if fusion.example is None else fusion.example()
        first, second = ([tensor.to(device, copy=True) for tensor in inputs] for _ in range(2))
        with torch.no_grad():
            expected = _run(dict(zip(fusion.inputs, first, strict=True)), (*fusion.erased, *fusion.outputs))
            found = fusion.replacement(*second)
        pairs = [*zip(expected[len(fusion.erased) :], found, strict=True), *zip(first, second, strict=True)]
        problems = (difference(one.float(), other.float()) for one, other in pairs)
        return next((problem for problem in problems if problem is not None), None)
    except Exception as error:
        return f"verification could not run: {type(error).__name__}: {error}"


def _random_inputs(nodes: Sequence[fx.Node]) -> list[Tensor]:
    """Float32 noise, and for integers (slots) 0, 1, ...; dynamic sizes become small, equal ones equal."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[Any, int] = {}
    found = []
    for node in nodes:
        noted = value(node)
        if noted is None:
            raise ValueError(f"input {node.name} is no tensor")
        dims = [n if isinstance(n, int) else _size(n, sizes) for n in noted.shape]
        if noted.is_floating_point():
            found.append(torch.randn(dims, generator=generator))
        else:
            found.append(torch.arange(torch.Size(dims).numel(), dtype=noted.dtype).view(dims))
    return found


def _size(size: torch.SymInt, sizes: dict[Any, int]) -> int:
    """A small value for a dynamic size, which may be an expression of others: `sizes` holds those of the symbols."""
    expression = size.node.expr
    values = {symbol: sizes.setdefault(symbol, 5 + len(sizes)) for symbol in expression.free_symbols}
    return int(expression.xreplace(values))


def _run(values: dict[fx.Node, Any], wanted: Sequence[fx.Node]) -> list[Any]:
    """Compute nodes from the given values of others."""

    def get(node: fx.Node) -> Any:
        if node not in values:
            args, kwargs = fx.map_arg(node.args, get), fx.map_arg(node.kwargs, get)
            if node.op == "call_function":
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                raise ValueError(f"node {node.name} ({node.op}) is not among the inputs")
        return values[node]

    return [get(node) for node in wanted]


def _module(node: fx.Node) -> str:
    """The path of the module that a node was traced in."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(list(stack.values())[-1][0])
