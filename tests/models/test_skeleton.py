"""Structures without weights: their buffers, ties and independence from the model they are made from."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, T5Config

from models import skeleton
from models.adapted import adapt

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = torch.device("cpu")


def llama(*, tied: bool = False) -> PretrainedConfig:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(**SIZES, rope_parameters=scaling, tie_word_embeddings=tied)


def gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(**SIZES, head_dim=8, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize("config", [llama(), gemma3()], ids=["llama3 rope", "two ropes"])
def test_build_has_meta_parameters_and_the_buffers_of_a_really_built_model(config: PretrainedConfig) -> None:
    built = skeleton.build(config, torch.bfloat16)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert [(n, p.shape, p.dtype) for n, p in built.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in real.named_parameters()
    ]
    assert all(parameter.is_meta for parameter in built.parameters())
    expected = dict(real.named_buffers())
    assert any(name.endswith("inv_freq") for name in expected)
    assert dict(built.named_buffers()).keys() == expected.keys()
    for name, buffer in built.named_buffers():
        assert buffer.device == CPU
        assert torch.equal(buffer, expected[name]), name
        assert buffer.dtype == expected[name].dtype


def test_build_is_in_eval_mode_and_keeps_no_config_of_the_caller() -> None:
    config = llama()
    built = skeleton.build(config, torch.float32)
    assert not built.training
    built.config.vocab_size = 5
    assert config.vocab_size == 96


def test_registration_of_parameters_is_restored() -> None:
    original = nn.Module.register_parameter
    with skeleton.parameters_on_meta():
        assert nn.Linear(2, 3).weight.is_meta
    assert nn.Module.register_parameter is original
    with pytest.raises(RuntimeError, match="negative"), skeleton.parameters_on_meta():
        nn.Linear(-2, 3)
    assert nn.Module.register_parameter is original
    assert not nn.Linear(2, 3).weight.is_meta


def test_build_refuses_what_is_no_causal_language_model() -> None:
    with pytest.raises(ValueError, match="T5Config"):
        skeleton.build(T5Config(vocab_size=96), torch.float32)


def test_ties_survive_building_and_materialising() -> None:
    adaptation = adapt(skeleton.build(llama(tied=True), torch.float32), CPU)
    adaptation.materialise(CPU, own=False)
    destinations = adaptation.destinations()
    embedding, head = destinations["model.embed_tokens.weight"], destinations["lm_head.weight"]
    assert not embedding.is_meta
    assert embedding.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
    assert embedding.shape == head.shape
    embedding.fill_(3.0)
    assert (head == 3.0).all()


def test_no_tie_is_invented() -> None:
    adaptation = adapt(skeleton.build(llama(), torch.float32), CPU)
    adaptation.materialise(CPU, own=False)
    destinations = adaptation.destinations()
    storages = {tensor.untyped_storage().data_ptr() for tensor in destinations.values()}
    merged = 2 * (3 - 1) + 2 * (2 - 1)  # of 2 layers: q, k and v lie in one storage, gate and up in another
    assert len(storages) == len(destinations) - merged


@pytest.mark.parametrize("tied", [False, True])
def test_share_copies_the_structure_and_no_tensor(tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(llama(tied=tied)).train()
    modules = dict(model.named_modules())
    copied = skeleton.share(model)
    assert type(copied) is type(model)
    assert not copied.training
    assert model.training
    for (name, one), (other_name, other) in zip(
        model.named_parameters(remove_duplicate=False), copied.named_parameters(remove_duplicate=False), strict=True
    ):
        assert name == other_name
        assert one is other
    for one, other in zip(model.buffers(), copied.buffers(), strict=True):
        assert one is other
    assert not set(map(id, model.modules())) & set(map(id, copied.modules()))
    assert copied.config is not model.config
    copied.model.layers[0].self_attn.q_proj = nn.Identity()
    copied.config._attn_implementation = "sdpa"
    assert dict(model.named_modules()) == modules
    assert model.model.layers[0].self_attn.config is model.config


@pytest.mark.parametrize("tied", [False, True])
def test_on_meta_keeps_shapes_dtypes_and_ties_but_no_data(tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(llama(tied=tied), dtype=torch.float16)
    copied = skeleton.on_meta(model)
    expected = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.state_dict(keep_vars=True).items()]
    found = [(n, p.shape, p.dtype, True) for n, p in copied.state_dict(keep_vars=True).items()]
    assert found == expected
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) is tied
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_on_meta_of_a_skeleton_is_meta_throughout() -> None:
    built = skeleton.build(llama(), torch.float32)
    copied = skeleton.on_meta(built)
    assert all(buffer.is_meta for buffer in copied.buffers())
    assert not any(buffer.is_meta for buffer in built.buffers())
