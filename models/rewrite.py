"""Rules that rewrite an adapted model, and the plan by which its weights are loaded afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.probe import Probe
from models.report import RuleOutcome
from models.weight_plan import Destination


@dataclass(frozen=True)
class Stack:
    """Where the parameters of the unmodified model live after a rule: concatenated along `dim` of `destination`."""

    destination: str
    dim: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Rewrite:
    """One place where a rule can be applied: the module, the members concerned, and why or why not."""

    module: str
    members: tuple[str, ...]
    reason: str
    applies: bool = True


class Rule(Protocol):
    """An optional rewrite. Never needed for correctness; skipped when unsure."""

    name: str

    def find(self, model: PreTrainedModel, probe: Probe) -> list[Rewrite]:
        """List the places where the rule applies, or would but for the reason given. Changes nothing."""

    def apply(self, module: nn.Module, members: tuple[str, ...]) -> list[Stack]:
        """Rewrite one module in place; new parameters are on the meta device. Returns stacks relative to it."""

    def verify(self, model: PreTrainedModel, probe: Probe, rewrite: Rewrite, device: torch.device) -> str | None:
        """Compare rewritten and original on random weights, on the device that the model is for; return what differs,
        or None if nothing does."""


@dataclass(frozen=True)
class LoadPlan:
    """Where each parameter and persistent buffer of the unmodified model goes: into a stack, or where it always was."""

    stacks: list[Stack]

    def destinations(self, model: nn.Module, unmodified: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map every name of the unmodified model's state to its tensor in `model`, or to its slice of a merged one.

        The tensors alias the parameters of `model`: copying into them loads it.
        """
        state = model.state_dict()
        return {name: place.within(state) for name, place in self.places(unmodified).items()}

    def places(self, unmodified: Mapping[str, Tensor]) -> dict[str, Destination]:
        """The same as names: that of a tensor of the rewritten model, and which slice of it."""
        found = {name: Destination(name) for name in unmodified}
        for stack in self.stacks:
            sizes = [unmodified[source].shape[stack.dim] for source in stack.sources]
            for source, start, size in zip(stack.sources, accumulate(sizes, initial=0), sizes, strict=False):
                found[source] = Destination(stack.destination, stack.dim, start, size)
        return found


def apply_rules(
    model: PreTrainedModel, probe: Probe, rules: Sequence[Rule], device: torch.device
) -> tuple[list[Stack], list[RuleOutcome]]:
    """Apply every rule wherever it matches and verifies, on `device`. Changes `model`, which must be ours.

    A rule is verified once per shape of its module, since layers repeat. Returns what to load where, and the outcomes.
    """
    stacks: list[Stack] = []
    outcomes: list[RuleOutcome] = []
    for rule in rules:
        verdicts: dict[object, str | None] = {}
        for rewrite in rule.find(model, probe):
            module = model.get_submodule(rewrite.module)
            failure: str | None = None if rewrite.applies else rewrite.reason
            if rewrite.applies:
                key = _shape_key(module, rewrite.members)
                if key not in verdicts:
                    verdicts[key] = _verify(rule, model, probe, rewrite, device)
                failure = verdicts[key]
            if failure is None:
                stacks += [_under(rewrite.module, stack) for stack in rule.apply(module, rewrite.members)]
            outcomes.append(RuleOutcome(rule.name, rewrite.module, failure is None, failure or rewrite.reason))
    return stacks, outcomes


def _verify(rule: Rule, model: PreTrainedModel, probe: Probe, rewrite: Rewrite, device: torch.device) -> str | None:
    """What speaks against a rule, a verification that cannot run included: a rule is never worth a model."""
    try:
        return rule.verify(model, probe, rewrite, device)
    except Exception as error:
        return f"verification could not run: {type(error).__name__}: {error}"


def _shape_key(module: nn.Module, members: tuple[str, ...]) -> object:
    """What verification depends on: shapes and dtypes, and the members' classes and settings (epsilons, flags)."""
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    children = [module.get_submodule(name) for name in members]
    settings = [[(k, v) for k, v in vars(child).items() if isinstance(v, int | float | str)] for child in children]
    return type(module), members, shapes, tuple(map(type, children)), repr(settings)


def _under(prefix: str, stack: Stack) -> Stack:
    names = tuple(f"{prefix}.{source}" for source in stack.sources)
    return Stack(f"{prefix}.{stack.destination}", stack.dim, names)
