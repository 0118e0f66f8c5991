"""The experts' matrix products, sorted by expert, through the op `grouped_linear`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from graphs.fusion import Fusion, is_call, value
from ops.providers import Choice


class GroupedLinear:
    """transformers' grouped product of rows with the transposed [E, N, K] weights of their experts."""

    name = "grouped_linear"

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choice = choices["grouped_linear"]

    def find(self, graph: fx.Graph) -> Iterator[Fusion]:
        """Yield every grouped product whose weight is stored as [E, N, K]; others would have to be copied."""
        if self._choice.provider == "reference":
            return
        for node in list(graph.nodes):
            if not is_call(node, "grouped_mm", "_grouped_mm", "grouped_mm_fallback") or len(node.args) < 2:
                continue
            x, transposed = node.args[:2]
            offsets = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
            if not is_call(transposed, "transpose") or transposed.args[1:] not in ((-2, -1), (1, 2)):
                continue
            weight = transposed.args[0]
            stored = value(weight)
            if stored is None or value(offsets) is None:
                continue
            others = [given for name, given in node.kwargs.items() if name != "offs" and given is not None]
            if not others and stored.is_contiguous():
                yield Fusion(
                    inputs=(x, weight, offsets),
                    outputs=(node,),
                    replacement=self._replacement,
                    before=node,
                    reason="weights as [E, N, K]",
                    example=partial(_example, stored.shape[2]),
                )

    def _replacement(self, x: Any, weight: Any, offsets: Any) -> tuple[Any]:
        return (self._choice.overload(x, weight, offsets),)


def _example(columns: int) -> list[Tensor]:
    """Seven rows for five experts, of which one has none, and few rows of each weight.

    Neither experts nor rows depend on each other, so the whole weights, which may take gigabytes, need not be made up.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, columns, generator=generator) for shape in ((7,), (5, 24)))
    return [x, weight / columns**0.5, torch.tensor([2, 2, 3, 6, 7], dtype=torch.int32)]
