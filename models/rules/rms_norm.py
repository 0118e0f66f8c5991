"""RMS norms through the op `rms_norm`, whatever the model's own code for them looks like."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.probe import Probe
from models.rewrite import Rewrite, Stack
from models.rules.verification import difference, random_copy
from ops.providers import Choice

_EPSILONS = ("variance_epsilon", "eps")  # the attribute's names
_OFFSETS = (0.0, 1.0)  # weight, or the Gemma convention 1 + weight


class OpRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed by an op."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, choice: Choice) -> None:
        super().__init__()
        self.weight = weight
        self.eps, self.offset, self._norm = eps, offset, choice.overload

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], contiguous."""
        return self._norm(x, self.weight, self.eps, self.offset)


class UseRMSNormOp:
    """Replace modules that compute an RMS norm of their last dimension.

    A candidate is a module whose class is called an RMS norm, with one weight vector and an epsilon; what it computes
    is then found out by running it.
    """

    name = "rms_norm"

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def find(self, model: PreTrainedModel, probe: Probe) -> list[Rewrite]:
        """List parents of candidates; none with the reference, whose formula the compiler fuses better unnamed."""
        if self._choice.provider == "reference":
            return []
        found = []
        for path, module in model.named_modules():
            for name, child in module.named_children():
                if "rmsnorm" in type(child).__name__.lower():
                    problem = _problem(child)
                    reason = f"{name}: {problem or 'computed by the op'}"
                    found.append(Rewrite(path, (name,), reason, applies=problem is None))
        return found

    def apply(self, module: nn.Module, members: tuple[str, ...]) -> list[Stack]:
        """Replace the members; their weights keep names and identity."""
        for name in members:
            norm = getattr(module, name)
            offset = _offset(norm)
            assert offset is not None, "verify comes before apply"
            setattr(module, name, OpRMSNorm(norm.weight, _eps(norm), offset, self._choice))
        return []

    def verify(self, model: PreTrainedModel, probe: Probe, rewrite: Rewrite, device: torch.device) -> str | None:
        """Compare each member with the op on random weights, for several rows and for a strided view of them."""
        for name in rewrite.members:
            norm = random_copy(model.get_submodule(rewrite.module).get_submodule(name), device)
            offset = _offset(norm)
            if offset is None:
                return f"{name}: not an RMS norm of its last dimension"
            weight = norm.get_parameter("weight")
            for x in _samples(weight.shape[0], device):
                with torch.no_grad():
                    expected, found = norm(x), self._choice.overload(x, weight, _eps(norm), offset)
                if problem := difference(expected, found):
                    return f"{name}: {problem}"
        return None


def _problem(norm: nn.Module) -> str | None:
    parameters = dict(norm.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return "it has other parameters than one weight vector"
    if norm._forward_hooks or norm._forward_pre_hooks:
        return "it has forward hooks"
    return None if any(hasattr(norm, name) for name in _EPSILONS) else "it names no epsilon"


def _eps(norm: nn.Module) -> float:
    return next(float(getattr(norm, name)) for name in _EPSILONS if hasattr(norm, name))


def _samples(size: int, device: torch.device) -> list[Tensor]:
    x = torch.randn(3, 5, 2 * size, generator=torch.Generator().manual_seed(0)).to(device)
    return [x[..., :size].contiguous(), x[..., size:], x[..., :size] * 1e-3]  # the last one shows where eps is added


def _offset(norm: nn.Module) -> float | None:
    """Which convention a norm follows, by what it computes on the CPU for a random weight; None if neither."""
    cpu = torch.device("cpu")
    copied = random_copy(norm, cpu)
    weight, eps = copied.get_parameter("weight"), _eps(copied)

    def agrees(x: Tensor, offset: float) -> bool:
        expected = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)
        return difference(expected, copied(x)) is None

    with torch.no_grad():
        samples = _samples(weight.shape[0], cpu)
        return next((offset for offset in _OFFSETS if all(agrees(x, offset) for x in samples)), None)
