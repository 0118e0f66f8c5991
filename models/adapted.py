"""`AdaptedModel`: a Hugging Face decoder over a paged cache, with sampling, as one traceable module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.attention import PAGED, AttentionStep, bind, use_attention
from models.families import PROVEN
from models.probe import probe
from models.report import CachePlan, RewriteReport, Verdict
from models.rewrite import LoadPlan, apply_rules
from models.rules import RULES
from models.skeleton import on_meta
from models.step_inputs import StepInputs, StepOutputs
from ops.memory import Spec, allocate
from ops.providers import Choice, choose


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a module by its name, and the tensors that its modules keep as plain attributes."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value


class AdaptedModel(nn.Module):
    """Runs the tokens of all sequences of a step, packed, and draws the next token of the rows asked for."""

    def __init__(self, model: PreTrainedModel, plan: CachePlan, step: AttentionStep, sample: Choice) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self._step, self._sample = step, sample.overload

    def forward(self, inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> StepOutputs:
        """Write the step's K and V into the caches (one of each per cache of the plan, [N, block_size, K, D]) and
        return the drawn tokens and their logits. Side effect: the caches."""
        self._step.begin(inputs, k_caches, v_caches)
        fed_back = inputs.prev_tokens[inputs.prev_row.clamp(min=0)]
        input_ids = torch.where(inputs.prev_row < 0, inputs.input_ids, fed_back)
        logits = self.model(
            input_ids=input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.logits_indices,
        ).logits[0]
        self._step.end()
        tokens = self._sample(
            logits,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.noise_key,
            inputs.noise_position,
            inputs.masked_ids,
        )
        return StepOutputs(tokens, logits)


@dataclass
class Adaptation:
    """An adapted model that may still be without weights, how to load them, and what was done to it."""

    module: AdaptedModel
    source: PreTrainedModel  # the unmodified model on the meta device: its names, shapes and conversion rules
    load_plan: LoadPlan
    report: RewriteReport
    device: torch.device

    def materialise(self, device: torch.device, *, own: bool, dtype: torch.dtype | None = None) -> None:
        """Give every meta parameter storage on `device` (uninitialised), ties kept, and move buffers there.

        own: also replace parameters that are shared with a user's module, so that loading cannot change it.
        dtype: of the replaced floating-point parameters; None keeps each one's own.
        """
        replaced = {id(p): p for p in self.module.parameters() if p.is_meta or own}
        casts = [dtype or p.dtype if p.is_floating_point() else p.dtype for p in replaced.values()]
        specs = [Spec(tuple(p.shape), cast) for p, cast in zip(replaced.values(), casts, strict=True)]
        storage = [nn.Parameter(tensor, requires_grad=False) for tensor in allocate(specs, device)]
        fresh = dict(zip(replaced, storage, strict=True))
        for module in self.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) in fresh:
                    setattr(module, name, fresh[id(parameter)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = buffer.clone() if own and buffer.device == device else buffer.to(device)

    def destinations(self) -> dict[str, Tensor]:
        """Map each name of the unmodified model's state to the tensor of the adapted one that it is copied into."""
        return self.load_plan.destinations(self.module.model, self.source.state_dict())

    def copy_from(self, state: Mapping[str, Tensor]) -> None:
        """Copy the unmodified model's state into place, but for what is shared with it already."""
        for name, destination in self.destinations().items():
            if destination.data_ptr() != state[name].data_ptr():
                destination.copy_(state[name])


def adapt(
    model: PreTrainedModel,
    device: torch.device,
    providers: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    rules: Collection[str] | None = None,
) -> Adaptation:
    """Probe and rewrite `model`, a structure of our own (see models/skeleton.py), for execution on `device`.

    providers: op name -> provider, to override the choice by device. dtype: that the weights will have, None for the
    one of `model`. rules: names of those of models/rules to apply, None for all.

    Raises UnsupportedModelError, and ValueError for an unknown op or provider.
    """
    choices = choose(device, providers or {}, dtype or model.dtype)
    seen = probe(model)
    architecture = type(model).__name__
    verdict = Verdict.PROVEN if architecture in PROVEN else Verdict.UNPROVEN
    source = on_meta(model)
    chosen = [make(choices) for name, make in RULES.items() if rules is None or name in rules]
    stacks, outcomes = apply_rules(model, seen, chosen, device)
    step = AttentionStep(seen.plan, choices["paged_attention"], choices["write_kv"])
    for site in seen.plan.sites:
        bind(model.get_submodule(site.module), step)
    # torch's grouped product knows no float64.
    use_attention(model, PAGED, experts="batched_mm" if (dtype or model.dtype) == torch.float64 else "grouped_mm")
    module = AdaptedModel(model, seen.plan, step, choices["sample"]).eval()
    report = RewriteReport(architecture, verdict, seen.plan, outcomes, choices)
    return Adaptation(module, source, LoadPlan(stacks), report, device)
