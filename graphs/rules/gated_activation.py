"""The activation of a merged gate and up projection, times the other half, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from graphs.fusion import Fusion, is_call, shape
from ops.providers import Choice


class GatedActivation:
    """silu(x[..., :n]) * x[..., n:], or with gelu, as `silu_and_mul` or `gelu_and_mul`."""

    name = "gated_activation"

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._silu, self._gelu = choices["silu_and_mul"], choices["gelu_and_mul"]

    def find(self, graph: fx.Graph) -> Iterator[Fusion]:
        """Yield every product of an activated first half of a tensor and its second half."""
        for node in list(graph.nodes):
            if not is_call(node, "mul") or len(node.args) != 2:
                continue
            for activated, up in (node.args, node.args[::-1]):
                fused = self._fused(activated)
                source = _halves(activated.args[0], up) if fused is not None else None
                if source is not None:
                    yield Fusion((source,), (node,), lambda x, f=fused: (f(x),), node, "halves of one product")
                    break

    def _fused(self, node: Any) -> Callable[[Any], Any] | None:
        if is_call(node, "silu") and self._silu.provider != "reference":
            return self._silu.overload
        if is_call(node, "gelu") and self._gelu.provider != "reference":
            approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
            return lambda x: self._gelu.overload(x, approximate == "tanh")
        return None


def _halves(first: Any, second: Any) -> fx.Node | None:
    """The tensor of which two nodes are the first and the second half of the last dimension, or None."""
    one, other = _part(first), _part(second)
    if one is None or other is None or one[0] is not other[0]:
        return None
    width = _width(one[0])
    return one[0] if width is not None and one[1:] == (0, width // 2) and other[1:] == (width // 2,) * 2 else None


def _part(node: Any) -> tuple[fx.Node, int, int] | None:
    """(tensor, start, length) of a slice of the last dimension."""
    if is_call(node, "narrow") and node.args[1] == -1:
        return node.args[0], node.args[2], node.args[3]
    if is_call(node, "getitem") and is_call(node.args[0], "chunk"):
        call = node.args[0]
        count = call.kwargs.get("chunks", call.args[1] if len(call.args) > 1 else None)
        dim = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 0)
        width, last = _width(call.args[0]), len(shape(call.args[0]) or ()) - 1
        if count == 2 and width is not None and dim in (-1, last):
            return call.args[0], node.args[1] * (width // 2), width // 2
    return None


def _width(node: Any) -> int | None:
    """The size of the last dimension if it is even, or None."""
    last = (shape(node) or (None,))[-1]
    return last if isinstance(last, int) and last % 2 == 0 else None
