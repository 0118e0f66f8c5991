"""Linear layers through the op `linear`, whose provider may be quicker than PyTorch's own product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.probe import Probe
from models.rewrite import Rewrite, Stack
from models.rules.merged_linear import MergedLinear, Product
from models.rules.verification import TOLERANCE, difference
from ops.providers import Choice

_ROWS = 256  # of a weight, to verify with


class OpLinear(nn.Module):
    """A linear layer around another one's parameters, computed by an op."""

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in features] -> [..., out features]."""
        return self._product(x, self.weight, self.bias)


class UseLinearOp:
    """Replace exact `nn.Linear` layers, and tell merged ones, to call the chosen provider of `linear`."""

    name = "linear"

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def find(self, model: PreTrainedModel, probe: Probe) -> list[Rewrite]:
        """List parents of linear layers; not with the reference, which is PyTorch's product with a detour."""
        if self._choice.provider == "reference":
            return []
        found = []
        for path, module in model.named_modules():
            members = {name: child for name, child in module.named_children() if _is_linear(child)}
            for hooked, reason in ((False, "computed by the op"), (True, "it has forward hooks")):
                names = tuple(name for name, child in members.items() if _has_hooks(child) is hooked)
                if names:
                    found.append(Rewrite(path, names, f"{', '.join(names)}: {reason}", applies=not hooked))
        return found

    def apply(self, module: nn.Module, members: tuple[str, ...]) -> list[Stack]:
        """Replace the members; their parameters keep names and identity."""
        for name in members:
            child = getattr(module, name)
            if isinstance(child, MergedLinear):
                child.product = self._choice.overload
            else:
                setattr(module, name, OpLinear(child, self._choice.overload))
        return []

    def verify(self, model: PreTrainedModel, probe: Probe, rewrite: Rewrite, device: torch.device) -> str | None:
        """Compare the op with the formula at each member's sizes, in float32 and in the member's dtype.

        Rows of a weight are independent, so that the first ones stand for all of them.
        """
        generator = torch.Generator().manual_seed(0)
        for name in rewrite.members:
            weight = model.get_submodule(rewrite.module).get_submodule(name).get_parameter("weight")
            columns, rows = weight.shape[1], min(weight.shape[0], _ROWS)
            for dtype in {torch.float32, weight.dtype}:
                w = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(device, dtype)
                bias = torch.randn(rows, generator=generator).to(device, dtype)
                for tokens in (1, 5, 65):
                    x = torch.randn(tokens, columns, generator=generator).to(device, dtype)
                    expected = nn.functional.linear(x.double(), w.double(), bias.double())
                    found = self._choice.overload(x, w, bias)
                    if problem := difference(expected, found.double(), max(TOLERANCE, torch.finfo(dtype).eps)):
                        return f"{name}, {tokens} tokens in {dtype}: {problem}"
        return None


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, MergedLinear)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
