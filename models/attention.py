"""The one mandatory seam: transformers' attention interface, answered by the paged ops.

T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from models.report import CachePlan
from models.step_inputs import StepInputs
from ops.providers import Choice

PAGED = "pagegraph_paged"


class AttentionStep:
    """What the attention calls of one forward pass share. One per adapted model, so engines do not meet.

    The model's forward fills it and clears it again before it returns, so Dynamo traces it away: its tensors stay
    graph inputs, and no layer in between has to hand them on. It counts the calls: the ordinal is the call site.
    """

    def __init__(self, plan: CachePlan, attention: Choice, write: Choice) -> None:
        self.plan, self.attention, self.write = plan, attention.overload, write.overload
        self.inputs: StepInputs | None = None
        self.k_caches: list[Tensor] = []
        self.v_caches: list[Tensor] = []
        self.ordinal = 0

    def begin(self, inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> None:
        """Hold the tensors of the pass that starts now."""
        self.inputs, self.k_caches, self.v_caches, self.ordinal = inputs, k_caches, v_caches, 0

    def end(self) -> None:
        """Let go of them, and see that every call site of the plan was reached."""
        assert self.ordinal == len(self.plan.sites), (self.ordinal, len(self.plan.sites))
        self.inputs, self.k_caches, self.v_caches, self.ordinal = None, [], [], 0


def bind(module: nn.Module, step: AttentionStep) -> None:
    """Tell an attention module which step it belongs to."""
    module._pagegraph_step = step  # type: ignore[assignment]  # a plain object on the instance, not a submodule


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write K and V into the paged cache and attend over it.

    query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv]; returns [1, T, H, Dv]. Scale, window and softcap come
    from the cache plan, which holds what the probe saw this same call site pass.
    """
    step: AttentionStep = module._pagegraph_step  # type: ignore[assignment]
    inputs, k_caches, v_caches = step.inputs, step.k_caches, step.v_caches
    assert inputs is not None, "called outside of AdaptedModel.forward"
    site = step.plan.sites[step.ordinal]
    step.ordinal += 1
    k_cache, v_cache = k_caches[site.cache], v_caches[site.cache]
    q, k, v = (tensor.transpose(1, 2)[0] for tensor in (query, key, value))
    group = 0  # one cache group for now: every layer keeps its whole past
    if site.writes:
        step.write(k, v, k_cache, v_cache, inputs.slot_mapping[group])
    out = step.attention(
        q,
        k_cache,
        v_cache,
        inputs.block_table[group],
        inputs.seq_lens,
        inputs.query_start_loc,
        site.scale,
        site.window,
        site.softcap,
        s_aux if site.has_sinks else None,
    )
    return out.unsqueeze(0), None


# In the attention registry and not in the mask registry: transformers then builds and passes no mask.
AttentionInterface.register(PAGED, paged_attention_forward)


def use_attention(model: nn.Module, name: str, *, experts: str = "grouped_mm") -> None:
    """Make `model` (its configs are changed, so it must be ours) dispatch attention to `name`, experts to `experts`.

    Experts run as grouped matrix products by default: the per-expert loop branches on data and cannot be traced.
    """
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation = name  # type: ignore[union-attr]
        config._experts_implementation = experts  # type: ignore[union-attr]
