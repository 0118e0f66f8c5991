"""What the probe observes, what it refuses, and that it leaves the model alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from models import skeleton
from models.probe import probe
from models.report import CachePlan, CallSite, UnsupportedModelError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]


def plan(config: PretrainedConfig) -> CachePlan:
    return probe(skeleton.build(config, torch.bfloat16)).plan


def column(found: CachePlan, name: str) -> list[Any]:
    return [getattr(site, name) for site in found.sites]


def test_llama_has_one_site_a_layer_in_call_order() -> None:
    found = plan(transformers.LlamaConfig(**SIZES))
    assert found.sites == tuple(
        CallSite(
            module=f"model.layers.{layer}.self_attn",
            num_q_heads=4,
            num_kv_heads=2,
            k_dim=8,
            v_dim=8,
            scale=8**-0.5,
            cache=layer,
        )
        for layer in range(3)
    )
    assert found.caches == found.sites
    assert found.bytes_per_token(2) == 3 * 2 * (8 + 8) * 2


def test_every_token_of_the_window_counts_itself() -> None:
    assert column(plan(transformers.MistralConfig(**SIZES, sliding_window=7)), "window") == [7, 7, 7]
    assert column(plan(transformers.MistralConfig(**SIZES, sliding_window=None)), "window") == [0, 0, 0]


def test_gemma2_alternates_windows_and_caps_logits() -> None:
    config = transformers.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=6, attn_logit_softcapping=20.0, query_pre_attn_scalar=64
    )
    found = plan(config)
    assert column(found, "window") == [6, 0, 6]
    assert column(found, "softcap") == [20.0] * 3
    assert column(found, "scale") == [0.125] * 3
    assert column(found, "k_dim") == [16] * 3  # not hidden_size / num_attention_heads


def test_gemma3_mixes_windows_without_a_softcap() -> None:
    found = plan(transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6, layer_types=WINDOWED))
    assert column(found, "window") == [6, 0, 6]
    assert column(found, "softcap") == [0.0] * 3


def test_gpt_oss_has_sinks() -> None:
    config = transformers.GptOssConfig(**SIZES, head_dim=8, sliding_window=6, num_local_experts=4, layer_types=WINDOWED)
    found = plan(config)
    assert column(found, "has_sinks") == [True] * 3
    assert column(found, "window") == [6, 0, 6]


def test_latent_attention_arrives_expanded_with_two_head_dims() -> None:
    found = plan(transformers.DeepseekV3Config(**{**SIZES, **MLA}))
    assert column(found, "k_dim") == [12] * 3
    assert column(found, "v_dim") == [10] * 3
    assert column(found, "num_kv_heads") == [4] * 3
    assert column(found, "scale") == pytest.approx([12**-0.5] * 3)
    assert found.bytes_per_token(4) == 3 * 4 * (12 + 10) * 4


def test_head_dims_may_differ_from_layer_to_layer_and_sites_may_share_a_cache() -> None:
    config = transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=96,
    )
    found = plan(config)
    assert column(found, "k_dim") == [8, 16, 8, 16]
    assert column(found, "window") == [6, 0, 6, 0]
    assert column(found, "cache") == [0, 1, 0, 1]
    assert column(found, "writes") == [True, True, False, False]
    assert found.caches == found.sites[:2]
    assert found.bytes_per_token(2) == 2 * 2 * (8 + 16) * 2


def test_sites_that_share_only_k_have_caches_of_their_own() -> None:
    found = plan(transformers.DiffLlamaConfig(**SIZES))
    assert [site.module for site in found.sites[:3]] == ["model.layers.0.self_attn"] * 2 + ["model.layers.1.self_attn"]
    assert column(found, "cache") == list(range(6))
    assert all(column(found, "writes"))


def test_calls_are_recorded_by_module_with_the_identity_of_their_arguments() -> None:
    calls = probe(skeleton.build(transformers.LlamaConfig(**SIZES), torch.float32)).calls
    inputs = [calls[f"model.layers.1.self_attn.{name}"][0].args[0] for name in ("q_proj", "k_proj", "v_proj")]
    assert inputs[0] is inputs[1] is inputs[2]
    assert inputs[0].is_meta
    assert inputs[0].shape == (1, 37, 32)
    assert calls["model.layers.1.mlp.gate_proj"][0].args[0] is not inputs[0]
    assert [len(calls[name]) for name in ("", "model.norm", "lm_head")] == [1, 1, 1]


def test_the_probe_leaves_the_model_as_it_is() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma3TextConfig(**SIZES, head_dim=8), attn_implementation="sdpa"
    )
    config = copy.deepcopy(model.config.to_dict())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    ids = torch.arange(5, 12)[None]
    logits = model(ids).logits
    probe(model)
    assert model.training  # as from_config leaves it
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids).logits, logits)


def test_a_model_that_is_refused_is_left_as_it_is_too() -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.BloomConfig(**BLOOM))
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModelError):
        probe(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


BLOOM = {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
# What to build, the module that the refusal names, and a part of its reason.
REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str, str]] = {
    "mamba": (
        lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96),
        "the whole model",
        "recurrent state",
    ),
    "bloom": (lambda: transformers.BloomConfig(**BLOOM), "the whole model", "no attention dispatches"),
    "falcon with alibi": (
        lambda: transformers.FalconConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        "the whole model",
        "no attention dispatches",
    ),
    "llama4, chunked mask": (
        lambda: transformers.Llama4TextConfig(
            **SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=64
        ),
        "model.layers.0.self_attn",
        "its mask",
    ),
    "lfm2, convolutions": (
        lambda: transformers.Lfm2Config(**SIZES, layer_types=["full_attention", "conv", "full_attention"]),
        "the whole model",
        "layers of type 'conv' keep recurrent state",
    ),
    "qwen3_next, linear attention": (
        lambda: transformers.Qwen3NextConfig(**SIZES, head_dim=8),
        "the whole model",
        "recurrent state",
    ),
    "llama, dynamic rope": (
        lambda: transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC),
        "model.rotary_emb",
        "rope of type 'dynamic'",
    ),
    "phi3, longrope": (
        lambda: transformers.Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=LONGROPE),
        "model.rotary_emb",
        "rope of type 'longrope'",
    ),
    "llama that is not causal": (
        lambda: transformers.LlamaConfig(**SIZES, is_causal=False),
        "model.layers.0.self_attn",
        "not causal",
    ),
    "deepseek_v32, indexer": (
        lambda: transformers.DeepseekV32Config(**{**SIZES, **MLA}),
        "model.layers.0.self_attn",
        "an argument 'indices'",
    ),
}


def refuse(model: PreTrainedModel, where: str, reason: str) -> None:
    """Probe a model whose refusal must name itself, the module, the reason, and what would be served."""
    with pytest.raises(UnsupportedModelError) as raised:
        probe(model)
    assert raised.value.where == where
    assert reason in raised.value.reason
    message = str(raised.value)
    for part in (
        type(model).__name__,
        where,
        reason,
        "Supported are decoder-only",
        "sliding window",
        "softcap",
        "sinks",
    ):
        assert part in message


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_there_are_weights(name: str) -> None:
    make, where, reason = REFUSED[name]
    model = skeleton.build(make(), torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    refuse(model, where, reason)


@pytest.mark.parametrize("made", [transformers.LlamaModel, transformers.LlamaForSequenceClassification])
def test_a_model_without_a_language_model_head_is_refused(made: type[PreTrainedModel]) -> None:
    refuse(made(transformers.LlamaConfig(**SIZES)), "the whole model", "no language-model head")


def llama_whose_attention(change: Callable[[dict[str, Any]], Any], *, layer: int = 1) -> PreTrainedModel:
    """A llama of which one layer calls the attention interface with arguments that `change` has altered."""

    class OddAttention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.layer_idx == layer:
                change(kwargs)
            return super().forward(hidden_states, *args, **kwargs)

    model = skeleton.build(transformers.LlamaConfig(**SIZES), torch.float32)
    for module in model.model.layers:
        module.self_attn.__class__ = OddAttention
    return model


def test_a_layer_that_alters_its_mask_is_refused() -> None:
    def shift(kwargs: dict[str, Any]) -> None:
        kwargs["attention_mask"] = kwargs["attention_mask"].roll(1, -1)

    refuse(llama_whose_attention(shift), "model.layers.1.self_attn", "changes the mask")


def test_a_layer_without_a_mask_is_refused() -> None:
    refuse(llama_whose_attention(lambda kw: kw.update(attention_mask=None)), "model.layers.1.self_attn", "no mask")


def test_an_unknown_tensor_argument_is_refused() -> None:
    def add(kwargs: dict[str, Any]) -> None:
        kwargs["position_bias"] = torch.zeros(4, 9, 9, device="meta")

    refuse(llama_whose_attention(add), "model.layers.1.self_attn", "an argument 'position_bias'")


def test_an_argument_without_a_tensor_is_not_refused() -> None:
    found = probe(llama_whose_attention(lambda kwargs: kwargs.update(output_attentions=False, layer_kind="odd"))).plan
    assert len(found.sites) == 3


def test_a_window_in_the_mask_alone_is_refused() -> None:
    model = skeleton.build(transformers.MistralConfig(**SIZES, sliding_window=7), torch.float32)

    attention = model.model.layers[2].self_attn
    attention.config = copy.deepcopy(model.config)
    attention.config.sliding_window = None  # what it tells the attention function; the mask is made outside of it
    refuse(model, "model.layers.2.self_attn", "its mask differs from causal with window 0")


def test_a_window_in_the_arguments_alone_is_refused() -> None:
    odd = llama_whose_attention(lambda kwargs: kwargs.update(sliding_window=7), layer=0)
    refuse(odd, "model.layers.0.self_attn", "its mask differs from causal with window 7")


def test_a_window_that_no_position_reaches_is_not_told_apart() -> None:
    assert column(plan(transformers.MistralConfig(**SIZES, sliding_window=300)), "window") == [300] * 3


def test_a_layer_that_does_not_dispatch_is_refused() -> None:
    class Silent(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return hidden_states.cumsum(1), None

    model = skeleton.build(transformers.LlamaConfig(**SIZES), torch.float32)
    model.model.layers[1].self_attn = Silent()
    refuse(model, "model.layers.1", "no attention that dispatches")


def test_a_convolution_over_the_sequence_is_refused() -> None:
    model = skeleton.build(transformers.LlamaConfig(**SIZES), torch.float32)
    model.model.layers[2].mlp.conv = nn.Conv1d(4, 4, 3)
    refuse(model, "model.layers.2.mlp.conv", "a convolution over the sequence")


def test_a_model_that_counts_positions_by_itself_is_refused() -> None:
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 96}
    model = transformers.BartForCausalLM(transformers.BartConfig(**sizes, max_position_embeddings=64))
    with pytest.raises(UnsupportedModelError, match="it counts positions by itself"):
        probe(model)


def test_positions_that_begin_after_padding_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.RobertaConfig(**sizes, vocab_size=96, max_position_embeddings=66, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="its positions do not begin at 0"):
        probe(transformers.RobertaForCausalLM(config))


def test_a_layer_that_counts_tokens_is_refused() -> None:
    """Llama4 scales its layers without rope by a position that it counts in the step, whatever the positions are."""
    config = transformers.Llama4TextConfig(
        **SIZES,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        layer_types=["full_attention"] * 3,
        no_rope_layers=[1, 0, 1],
        attn_temperature_tuning=True,
    )
    with pytest.raises(UnsupportedModelError, match="it counts positions by itself"):
        probe(skeleton.build(config, torch.float32))
