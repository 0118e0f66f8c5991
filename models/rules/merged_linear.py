"""Several linear layers over one input as one matrix product.

The layers to merge are observed, not named: children of one module that the probe saw called with the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.probe import Probe
from models.rewrite import Rewrite, Stack
from models.rules.verification import difference, materialise, random_copy

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class MergedLinear(nn.Module):
    """`users` linear layers with the same input as one. weight [sum of out features, in features], bias the same rows.

    The product is computed for the first of the slices that asks and kept, by input object, until the last one has
    taken its part: nothing outlives the forward pass, so Dynamo traces the memory away. (Slices that each did their
    own product would stay separate products: the compiler does not merge them.)

    product: what multiplies, (x, weight, bias) -> Tensor; another rule may put an op there.
    """

    def __init__(self, out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype, users: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device="meta"), False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), False) if bias else None
        self.users = users
        self.product: Product = nn.functional.linear
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._remaining = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in features] -> [..., sum of out features]."""
        if self._input is not x or self._output is None:
            self._input, self._remaining = x, self.users
            self._output = self.product(x, self.weight, self.bias)
        output = self._output
        self._remaining -= 1
        if self._remaining == 0:
            self._input = self._output = None
        return output


class LinearSlice(nn.Module):
    """One of the merged layers, in its old place: rows `start` to `start + size` of the merged product."""

    def __init__(self, merged: MergedLinear, start: int, size: int) -> None:
        super().__init__()
        self._merged = (merged,)  # in a tuple: the parent owns the module and its parameters
        self.start, self.size = start, size

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in features] -> [..., size]."""
        return self._merged[0](x).narrow(-1, self.start, self.size)


class MergeLinears:
    """The rule. Subclasses say at which modules it looks: `in_attention` or outside of it."""

    name: str
    in_attention: bool

    def find(self, model: PreTrainedModel, probe: Probe) -> list[Rewrite]:
        """List the groups of children that share their input."""
        attention = {site.module for site in probe.plan.sites}
        tied = _tied_parameters(model)
        found = []
        for path, module in model.named_modules():
            if (path in attention) is self.in_attention:
                found += [_judge(path, module, group, probe, tied) for group in _groups(path, module, probe)]
        return found

    def apply(self, module: nn.Module, members: tuple[str, ...]) -> list[Stack]:
        """Put a MergedLinear beside the members and slices of it in their places."""
        linears: list[nn.Linear] = [getattr(module, name) for name in members]
        first, sizes = linears[0], [linear.out_features for linear in linears]
        bias = first.bias is not None
        merged = MergedLinear(sum(sizes), first.in_features, bias=bias, dtype=first.weight.dtype, users=len(members))
        name = "merged_" + "_".join(members)
        module.add_module(name, merged)
        for index, member in enumerate(members):
            setattr(module, member, LinearSlice(merged, sum(sizes[:index]), sizes[index]))
        kinds = ("weight", "bias") if bias else ("weight",)
        return [Stack(f"{name}.{kind}", 0, tuple(f"{member}.{kind}" for member in members)) for kind in kinds]

    def verify(self, model: PreTrainedModel, probe: Probe, rewrite: Rewrite, device: torch.device) -> str | None:
        """Run the module with random weights in float32, merged and not, on the arguments that the probe saw."""
        original = random_copy(model.get_submodule(rewrite.module), device)
        merged = random_copy(original, device)
        for stack in self.apply(merged, rewrite.members):
            rows = torch.cat([original.get_parameter(source) for source in stack.sources], stack.dim)
            owner, _, kind = stack.destination.rpartition(".")
            setattr(merged.get_submodule(owner), kind, nn.Parameter(rows, False))
        call = probe.calls[rewrite.module][0]
        generator = torch.Generator().manual_seed(0)
        args, kwargs = materialise((call.args, call.kwargs), generator, {}, device)
        with torch.no_grad():
            expected, found = _first(original(*args, **kwargs)), _first(merged(*args, **kwargs))
        return difference(expected, found)


def _groups(path: str, module: nn.Module, probe: Probe) -> list[list[str]]:
    """Children of `module` that are linear layers, grouped by the tensor they were called with."""
    groups: dict[int, list[str]] = {}
    for name, child in module.named_children():
        for call in probe.calls.get(_join(path, name), ()):
            if isinstance(child, nn.Linear) and len(call.args) == 1:
                groups.setdefault(id(call.args[0]), []).append(name)
    return [members for members in groups.values() if len(members) > 1]


def _judge(path: str, module: nn.Module, members: list[str], probe: Probe, tied: set[int]) -> Rewrite:
    linears: list[nn.Linear] = [getattr(module, name) for name in members]
    problem = None
    if any(type(linear) is not nn.Linear for linear in linears):
        problem = "a subclass of nn.Linear"
    elif any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears):
        problem = "it has forward hooks"
    elif len({linear.bias is None for linear in linears}) > 1:
        problem = "some have a bias and some do not"
    elif len({(linear.weight.dtype, linear.in_features) for linear in linears}) > 1:
        problem = "dtypes or input sizes differ"
    elif any(len(probe.calls[_join(path, name)]) != 1 for name in members):
        problem = "called more than once in a forward pass"
    elif path not in probe.calls:
        problem = "their module is not called itself, so they cannot be verified"
    elif any(id(p) in tied for linear in linears for p in linear.parameters()):
        problem = "a weight is tied to another"
    reason = f"{', '.join(members)}: {problem or 'share their input'}"
    return Rewrite(path, tuple(members), reason, applies=problem is None)


def _tied_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
