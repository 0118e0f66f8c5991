"""Rotary position embedding of queries and keys, and the write into the cache, in one pass.

Left to the compiler, every layer evaluates cosines and sines anew, and the rotated keys are written twice. An op takes
them as tensors, so that they are computed once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx

from graphs.fusion import Fusion, is_call, shape
from ops.providers import Choice


class Rotation(NamedTuple):
    """A rotated tensor's source [1, heads, T, D], and cosines and sines [1, T, R]."""

    source: fx.Node
    cos: fx.Node
    sin: fx.Node


class RopeWriteKV:
    """Rotate-half rope of q and k, whole or of the first dimensions, and `write_kv` as `rope_write_kv`."""

    name = "rope_write_kv"

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._write, self._attention = choices["write_kv"], choices["paged_attention"]
        self._fused = choices["rope_write_kv"]

    def find(self, graph: fx.Graph) -> Iterator[Fusion]:
        """Yield every write of rotated keys whose next attention has queries that are rotated alike."""
        if self._fused.provider == "reference":
            return
        nodes = list(graph.nodes)
        for index, write in enumerate(nodes):
            if write.target is not self._write.overload:
                continue
            k, v, k_cache, v_cache, slots = write.args
            attention = next(
                (n for n in nodes[index:] if n.target is self._attention.overload and n.args[1] is k_cache), None
            )
            if attention is None:
                continue
            keys, queries = _rotation(_unpacked(k)), _rotation(_unpacked(attention.args[0]))
            if keys is None or queries is None or keys[1:] != queries[1:]:
                continue
            yield Fusion(
                inputs=(queries.source, keys.source, v, keys.cos, keys.sin, k_cache, v_cache, slots),
                outputs=(attention.args[0],),
                replacement=self._replacement,
                before=write,
                reason="rotate-half rope",
                erased=(write,),
            )

    def _replacement(self, q: Any, k: Any, v: Any, cos: Any, sin: Any, *rest: Any) -> tuple[Any]:
        q, k = q.transpose(1, 2)[0], k.transpose(1, 2)[0]
        return (self._fused.overload(q, k, v, cos[0], sin[0], *rest),)


def _unpacked(node: Any) -> Any:
    """x of x.transpose(1, 2)[0]: what the attention function makes of [1, heads, T, D]."""
    if is_call(node, "getitem") and node.args[1] == 0 and is_call(node.args[0], "transpose"):
        source, *dims = node.args[0].args
        return source if dims == [1, 2] else None
    return None


def _rotation(node: Any) -> Rotation | None:
    """Recognise x * cos + rotate_half(x) * sin, or that of the first dimensions with the others behind it."""
    if is_call(node, "cat") and _dim(node) == -1 and len(node.args[0]) == 2:
        rotated, rest = node.args[0]
        inner = _rotation(rotated)
        if inner is None:
            return None
        first, last = _slice(inner.source), _slice(rest)
        split = None if first is None or last is None else (first[0] is last[0], first[1], first[2] == last[1], last[2])
        return Rotation(first[0], inner.cos, inner.sin) if split == (True, None, True, None) else None  # type: ignore[index]
    if not is_call(node, "add") or len(node.args) != 2 or not all(is_call(term, "mul") for term in node.args):
        return None
    (x, cos), (half, sin) = (term.args for term in node.args)
    if _half_rotated(half) is not x or not all(is_call(n, "unsqueeze") and n.args[1:] == (1,) for n in (cos, sin)):
        return None
    cos, sin = cos.args[0], sin.args[0]
    sizes = shape(cos)
    return Rotation(x, cos, sin) if sizes is not None and len(sizes) == 3 and sizes[0] == 1 else None


def _half_rotated(node: Any) -> Any:
    """x of cat((-x[..., d / 2:], x[..., :d / 2]), -1), or None."""
    if not is_call(node, "cat") or _dim(node) != -1 or len(node.args[0]) != 2 or not is_call(node.args[0][0], "neg"):
        return None
    second, first = _slice(node.args[0][0].args[0]), _slice(node.args[0][1])
    if second is None or first is None or second[0] is not first[0]:
        return None
    width = (shape(first[0]) or (None,))[-1]
    if not isinstance(width, int) or width % 2:
        return None
    return first[0] if (first[1:], second[1:]) == ((None, width // 2), (width // 2, None)) else None


def _slice(node: Any) -> tuple[fx.Node, int | None, int | None] | None:
    """(x, start, stop) of x[..., start:stop], or None."""
    if not is_call(node, "getitem") or not isinstance(node.args[1], tuple) or len(node.args[1]) != 2:
        return None
    rest, part = node.args[1]
    if rest is not Ellipsis or not isinstance(part, slice) or part.step is not None:
        return None
    return node.args[0], part.start or None, part.stop


def _dim(node: fx.Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
