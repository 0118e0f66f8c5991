"""The residual addition before an RMS norm, in one pass with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from graphs.fusion import Fusion, is_call, shape, value
from ops.providers import Choice


class AddRMSNorm:
    """rms_norm(x + residual) and the sum itself as `add_rms_norm`."""

    name = "add_rms_norm"

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._norm, self._fused = choices["rms_norm"], choices["add_rms_norm"]

    def find(self, graph: fx.Graph) -> Iterator[Fusion]:
        """Yield every `rms_norm` of a sum of two tensors of one shape and dtype."""
        if self._fused.provider == "reference":
            return
        for norm in list(graph.nodes):
            if norm.target is not self._norm.overload:
                continue
            added, weight, eps, offset = norm.args
            # Not "iadd": a sum in place is seen by all who hold the tensor.
            if not is_call(added, "add") or len(added.args) != 2 or added.kwargs:
                continue
            x, residual = (value(term) for term in added.args)
            if (
                x is None
                or residual is None
                or x.dtype != residual.dtype
                or shape(added.args[0]) != shape(added.args[1])
            ):
                continue
            yield Fusion(
                inputs=(*added.args, weight),
                outputs=(norm, added),
                replacement=lambda x, y, w, e=eps, o=offset: _two(self._fused.overload(x, y, w, e, o)),
                before=added,
                reason="a norm of a sum",
            )


def _two(pair: Any) -> tuple[Any, Any]:
    return pair[0], pair[1]  # a proxy cannot be unpacked
