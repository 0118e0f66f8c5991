"""One small forward pass on the meta device that shows what a model does with its attention.

Geometry is observed, never read from the config: configs lie per layer. What the paged cache cannot serve is refused
here, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from models.attention import use_attention
from models.report import CachePlan, CallSite, UnsupportedModelError
from models.skeleton import on_meta

RECORDING = "pagegraph_recording"
_TOKENS, _LOGITS = 37, 3  # 37: a size that nothing else in a model has
# Arguments of the attention interface that carry nothing the paged op would have to honour.
_IGNORED = {"dropout", "position_ids", "output_attentions", "output_router_logits", "use_cache", "output_hidden_states"}
_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "ssm", "delta")


@dataclass(frozen=True)
class ModuleCall:
    """The arguments (meta tensors) of one call of a module in the probe."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Probe:
    """What the probe saw: the cache plan, and per module path the calls of the forward pass, in order."""

    plan: CachePlan
    calls: dict[str, list[ModuleCall]]


@dataclass
class _Recorder:
    """Collects call sites; reached through the attention modules, so probes of two models do not meet."""

    architecture: str
    names: dict[int, str]
    max_positions: int
    sites: list[CallSite] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # K and V of each site
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)

    def refuse(self, where: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(self.architecture, where, reason)

    def record(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kw: dict) -> None:
        name = self.names[id(module)]
        self._check_arguments(name, module, q, k, kw)
        window = kw.get("sliding_window") or 0
        self._check_mask(name, mask, window)
        # Both: differential attention, for one, calls twice with one K and two Vs.
        sharing = [i for i, (key, value) in enumerate(self.written) if key is k and value is v]
        scale = kw.get("scaling")
        self.sites.append(
            CallSite(
                module=name,
                num_q_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                k_dim=k.shape[3],
                v_dim=v.shape[3],
                scale=float(scale) if scale is not None else 1 / math.sqrt(q.shape[3]),
                window=int(window),
                softcap=float(kw.get("softcap") or 0.0),
                has_sinks=kw.get("s_aux") is not None,
                cache=self.sites[sharing[0]].cache if sharing else sum(site.writes for site in self.sites),
                writes=not sharing,
            )
        )
        self.written.append((k, v))

    def _check_arguments(self, name: str, module: nn.Module, q: Tensor, k: Tensor, kw: dict) -> None:
        causal = kw.get("is_causal")
        if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
            raise self.refuse(name, "its attention is not causal")
        if k.shape[2] != q.shape[2]:
            raise self.refuse(name, f"it attends over {k.shape[2]} keys where the step has {q.shape[2]} tokens")
        for key, value in kw.items():
            if key not in _IGNORED | _HONOURED and isinstance(value, Tensor):
                raise self.refuse(name, f"its attention takes an argument {key!r} that paged attention does not have")

    def _check_mask(self, name: str, mask: Tensor | None, window: int) -> None:
        """Refuse a mask that is not exactly causal within `window`: nothing else reaches the paged op."""
        function: Callable[..., Tensor] | None = getattr(mask, "mask_function", None)
        if mask is None:
            raise self.refuse(name, "it passes no mask, so its attention is not causal")
        if function is None:
            raise self.refuse(name, "it changes the mask that transformers made for it")
        for q in _mask_rows(self.max_positions):
            kv = torch.arange(q + 2)
            expected = (kv <= q) & (kv > q - window) if window else kv <= q
            try:
                given = function(torch.tensor(0), torch.tensor(0), torch.tensor(q), kv)
                conveyed = bool((given.expand_as(expected) == expected).all())
            except (RuntimeError, NotImplementedError, IndexError) as error:
                raise self.refuse(
                    name, f"its mask depends on more than positions and a window, as chunked attention does ({error})"
                ) from error
            if not conveyed:
                raise self.refuse(
                    name, f"at position {q} its mask differs from causal with window {window}, which is all it conveys"
                )


def _mask_rows(max_positions: int) -> Iterator[int]:
    """Positions at which a chunk or window of any usual size would show: around every power of two and 3/4 of it."""
    limit = max(16, min(max_positions, 1 << 18))
    for exponent in range(1, limit.bit_length()):
        for row in {3 << exponent >> 2, (1 << exponent) - 1, 1 << exponent, (1 << exponent) + 1}:
            if row < limit:
                yield row


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    recorder: _Recorder = module._pagegraph_recorder  # type: ignore[assignment]
    recorder.record(module, query, key, value, attention_mask, kwargs)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _record_mask(*, q_length: int, kv_length: int, mask_function: Callable, **_: Any) -> Tensor:
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]  # lost if the model computes with the mask
    return mask


AttentionInterface.register(RECORDING, _record_attention)


def _skip_experts(module: nn.Module, hidden_states: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden_states)


AttentionMaskInterface.register(RECORDING, _record_mask)
ExpertsInterface.register(RECORDING, _skip_experts)


def max_positions(config: PretrainedConfig) -> int:
    """Positions that a model was made for: what its config says, else 4096."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 4096


def probe(model: PreTrainedModel) -> Probe:
    """Run `model`'s structure on meta tensors and return its cache plan and module calls.

    `model` is left as it is. Raises UnsupportedModelError with the module and the reason.
    """
    meta = on_meta(model)
    use_attention(meta, RECORDING, experts=RECORDING)
    recorder = _Recorder(
        architecture=type(model).__name__,
        names={id(module): name for name, module in meta.named_modules()},
        max_positions=max_positions(model.config),
    )
    if meta.get_output_embeddings() is None:
        reason = "it has no language-model head (get_output_embeddings() is None): use its ...ForCausalLM class"
        raise recorder.refuse("the whole model", reason)
    _refuse_state(meta, recorder)
    for name, module in meta.named_modules():
        module._pagegraph_recorder = recorder
        module.register_forward_pre_hook(_call_hook(recorder, name), with_kwargs=True)
    logits, uses_positions = _run(meta, recorder)
    if not recorder.sites:
        raise recorder.refuse("the whole model", "no attention dispatches through transformers' attention interface")
    if not uses_positions:
        raise recorder.refuse("forward", "it counts positions by itself, so it would take packed sequences for one")
    if logits.shape[:2] != (1, _LOGITS):
        raise recorder.refuse("forward", f"logits of shape {tuple(logits.shape)} do not follow logits_to_keep")
    _refuse_undispatched(meta, recorder)
    return Probe(CachePlan(tuple(recorder.sites)), recorder.calls)


def _call_hook(recorder: _Recorder, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.calls.setdefault(name, []).append(ModuleCall(args, dict(kwargs)))

    return hook


class _Watch(TorchFunctionMode):
    """Notices whether anything is computed from the positions given, and whether the model counts some by itself."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions, self.used, self.counted = positions, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and any(leaf is self.positions for leaf in tree_leaves((args, kwargs))):
            self.used = True
        if func in (torch.arange, torch.range) and result.shape == (_TOKENS,):
            self.counted = True
        return result


def _run(meta: PreTrainedModel, recorder: _Recorder) -> tuple[Tensor, bool]:
    """Run the forward pass; returns its logits and whether all positions in it are those given."""
    positions = torch.arange(_TOKENS, device="meta")[None]
    try:
        with torch.no_grad(), _Watch(positions) as watch:
            logits = meta(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta"),
                # All ones: given, so that transformers does not look for packed sequences in the position values.
                attention_mask=torch.ones(1, _TOKENS, dtype=torch.int64, device="meta"),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.arange(_LOGITS, device="meta"),
            ).logits
    except UnsupportedModelError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        where = next(reversed(recorder.calls), "forward") or "forward"
        raise recorder.refuse(where, f"its forward pass does not run on packed meta tensors ({error})") from error
    return logits, watch.used and not watch.counted


def _refuse_state(meta: PreTrainedModel, recorder: _Recorder) -> None:
    """Refuse state other than K and V, and rope frequencies that depend on the data."""
    if getattr(meta, "_is_stateful", False):
        raise recorder.refuse("the whole model", "it keeps recurrent state from token to token")
    for layer_type in getattr(meta.config, "layer_types", None) or ():
        if any(word in layer_type for word in _STATEFUL_LAYERS):
            raise recorder.refuse("the whole model", f"layers of type {layer_type!r} keep recurrent state")
    for name, module in meta.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            raise recorder.refuse(name, "its positions do not begin at 0 but after a padding index")
        if isinstance(module, nn.Conv1d):
            raise recorder.refuse(name, "a convolution over the sequence keeps state from token to token")
        rope = getattr(module, "rope_type", None)
        for rope_type in rope.values() if isinstance(rope, dict) else (rope,):
            if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
                raise recorder.refuse(name, f"rope of type {rope_type!r} depends on the length of the other requests")


def _refuse_undispatched(meta: PreTrainedModel, recorder: _Recorder) -> None:
    """Refuse a model of which only some layers dispatch: the others may hold state or see other requests' tokens."""
    for name, layers in meta.named_modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        paths = [f"{name}.{index}" for index in range(len(layers))]
        silent = [path for path in paths if not any(site.module.startswith(path + ".") for site in recorder.sites)]
        if silent and len(silent) < len(paths):
            raise recorder.refuse(silent[0], "it has no attention that dispatches through transformers' interface")
