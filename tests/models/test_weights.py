import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from models import weights as weights_module
from models.checkpoint import Checkpoint
from models.weights import load_weights

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "llama_tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=11, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}


def make(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def blank_destinations(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """NaN tensors for every name of `model`, tied names sharing one."""
    made: dict[int, Tensor] = {}
    return {
        name: made.setdefault(tensor.data_ptr(), torch.full_like(tensor, torch.nan, dtype=dtype))
        for name, tensor in model.state_dict().items()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("max_shard_size", ["1GB", "8KB"])
def test_checkpoint_equals_from_pretrained(family: str, max_shard_size: str, tmp_path: Path) -> None:
    make(CONFIGS[family]).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    destinations = blank_destinations(expected)
    load_weights(Checkpoint(tmp_path), meta_model(CONFIGS[family]), destinations, progress=False)
    assert_equal(destinations, expected.state_dict())


def test_mixtral_is_stored_per_expert(tmp_path: Path) -> None:
    """The test above converts only if the stored layout is not the model's."""
    make(CONFIGS["mixtral"]).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.10.w1.weight" in stored
    assert not any("gate_up_proj" in name for name in stored)


@pytest.mark.parametrize("family", CONFIGS)
def test_state_dict_loads(family: str) -> None:
    model = make(CONFIGS[family])
    destinations = blank_destinations(model)
    load_weights(model.state_dict(), model, destinations, progress=False)
    assert_equal(destinations, model.state_dict())


def test_state_dict_in_the_checkpoint_layout_loads(tmp_path: Path) -> None:
    model = make(CONFIGS["mixtral"])
    model.save_pretrained(tmp_path)
    destinations = blank_destinations(model)
    load_weights(load_file(tmp_path / "model.safetensors"), model, destinations, progress=False)
    assert_equal(destinations, model.state_dict())


def test_views_of_merged_storage_and_dtype_conversion(tmp_path: Path) -> None:
    model = make(CONFIGS["llama"])
    model.save_pretrained(tmp_path)
    destinations = blank_destinations(model, torch.bfloat16)
    prefix = "model.layers.1.self_attn."
    merged = torch.full((16 + 8 + 8, 16), torch.nan, dtype=torch.bfloat16)
    parts = zip("qkv", merged.split([16, 8, 8]), strict=True)
    destinations |= {f"{prefix}{kind}_proj.weight": part for kind, part in parts}
    load_weights(Checkpoint(tmp_path), model, destinations, progress=False)
    expected = torch.cat([model.state_dict()[f"{prefix}{kind}_proj.weight"] for kind in "qkv"])
    assert torch.equal(merged, expected.bfloat16())
    assert_equal(destinations, model.state_dict())


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_tied_name_is_enough(stored: str) -> None:
    model = make(CONFIGS["llama_tied"])
    twins = {"lm_head.weight", "model.embed_tokens.weight"}
    state = {name: t for name, t in model.state_dict().items() if name == stored or name not in twins}
    destinations = blank_destinations(model)
    load_weights(state, model, destinations, progress=False)
    assert_equal(destinations, model.state_dict())


@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_tied_names_that_differ_are_found_before_any_copy(family: str) -> None:
    model = make(CONFIGS[family])
    state = {**model.state_dict(), "lm_head.weight": torch.zeros(64, 16)}
    destinations = blank_destinations(model)
    with pytest.raises(ValueError, match=r"'lm_head\.weight'.* are tied by the model's config but differ"):
        load_weights(state, model, destinations, progress=False)
    assert all(tensor.isnan().all() for tensor in destinations.values())


def test_tied_names_that_agree_are_copied_once_in_any_dtype() -> None:
    model = make(CONFIGS["gpt2"])
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.double()}
    destinations = blank_destinations(model, torch.bfloat16)
    version = destinations["lm_head.weight"]._version
    load_weights(state, model, destinations, progress=False)
    assert destinations["lm_head.weight"]._version == version + 1
    assert_equal(destinations, model.state_dict())


@pytest.mark.parametrize(
    ("value", "reason"), [([1.0], "of type list"), (None, "of type NoneType"), (torch.empty(16, device="meta"), "meta")]
)
def test_a_value_that_is_no_tensor(value: Any, reason: str) -> None:
    model = make(CONFIGS["llama"])
    destinations = blank_destinations(model)
    with pytest.raises(ValueError, match=rf"'model\.norm\.weight', which is .*{reason}.*names to tensors"):
        load_weights({**model.state_dict(), "model.norm.weight": value}, model, destinations, progress=False)
    assert all(tensor.isnan().all() for tensor in destinations.values())


def test_base_model_prefix_is_added(tmp_path: Path) -> None:
    """GPT-2's published files are those of the base model, with mask buffers of old."""
    model = make(CONFIGS["gpt2"])
    state = {name.removeprefix("transformer."): t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    destinations = blank_destinations(model)
    load_weights(state, model, destinations, progress=False)
    assert_equal(destinations, model.state_dict())


def test_missing_names_are_listed_before_any_copy() -> None:
    model = make(CONFIGS["llama"])
    state = {name: tensor for name, tensor in model.state_dict().items() if ".1." not in name}
    destinations = blank_destinations(model)
    with pytest.raises(ValueError, match=r"lack 9 of the 21 .* model\.layers\.1\.\S+, .*\(9 in all\)"):
        load_weights(state, model, destinations, progress=False)
    assert all(tensor.isnan().all() for tensor in destinations.values())


def test_shape_mismatch_is_found_before_any_copy() -> None:
    model = make(CONFIGS["llama"])
    state = model.state_dict() | {"lm_head.weight": torch.zeros(65, 16)}
    destinations = blank_destinations(model)
    with pytest.raises(ValueError, match=r"'lm_head.weight' in shape \(65, 16\).* makes it \(64, 16\)"):
        load_weights(state, model, destinations, progress=False)
    assert all(tensor.isnan().all() for tensor in destinations.values())


def test_one_name_given_twice() -> None:
    model = make(CONFIGS["gpt2"])
    state = model.state_dict() | {"wte.weight": torch.zeros(64, 16)}
    with pytest.raises(ValueError, match=r"both 'transformer.wte.weight' and 'wte.weight' are the model's"):
        load_weights(state, model, blank_destinations(model), progress=False)


def expert(index: int, kind: str) -> str:
    return f"model.layers.1.block_sparse_moe.experts.{index}.{kind}.weight"


@pytest.mark.parametrize(
    ("index", "kind", "value", "message"),
    [
        (3, "w2", None, r"down_proj' in shape \(10, 16, 24\), .* \(11, 16, 24\)"),
        (3, "w2", torch.zeros(16, 23), r"cannot make model.layers.1.mlp.experts.down_proj from .*\.w2"),
        (3, "w1", torch.zeros(23, 16), r"cannot make model.layers.1.mlp.experts.gate_up_proj from .*\.w1"),
        (slice(None), "w1", torch.zeros(23, 16), r"gate_up_proj' in shape \(11, 47, 16\), .* \(11, 48, 16\)"),
        (slice(None), "w1", torch.zeros(()), r"cannot make model.layers.1.mlp.experts.gate_up_proj from .*\.w1"),
    ],
)
def test_experts_that_do_not_fit_are_found_before_any_copy(
    index: int | slice, kind: str, value: Tensor | None, message: str, tmp_path: Path
) -> None:
    model = make(CONFIGS["mixtral"])
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for changed in [index] if isinstance(index, int) else range(11)[index]:
        del state[expert(changed, kind)]
        if value is not None:
            state[expert(changed, kind)] = value
    destinations = blank_destinations(model)
    with pytest.raises(ValueError, match=message):
        load_weights(state, model, destinations, progress=False)
    assert all(tensor.isnan().all() for tensor in destinations.values())


def test_experts_given_both_merged_and_apart(tmp_path: Path) -> None:
    model = make(CONFIGS["mixtral"])
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    state = load_file(tmp_path / "model.safetensors") | {name: model.state_dict()[name]}
    with pytest.raises(ValueError, match=rf"both '.*' and '{name}' are the model's '{name}'"):
        load_weights(state, model, blank_destinations(model), progress=False)


def test_unexpected_names_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make(CONFIGS["llama"])
    old_buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    state = model.state_dict() | {"extra.a": torch.zeros(1), "extra.b": torch.zeros(1)} | old_buffer
    destinations = blank_destinations(model)
    with caplog.at_level(logging.WARNING, weights_module.__name__):
        load_weights(state, model, destinations, progress=False)
    assert [record.message for record in caplog.records] == [
        "2 tensors of the weights have no place in LlamaForCausalLM and are ignored: extra.a, extra.b"
    ]
    assert_equal(destinations, model.state_dict())


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(CONFIGS["mixtral"])
    model.save_pretrained(tmp_path)
    capsys.readouterr()
    load_weights(Checkpoint(tmp_path), model, blank_destinations(model))
    output = capsys.readouterr()
    assert output.out == ""
    assert "load weights: 100%" in output.err
    load_weights(Checkpoint(tmp_path), model, blank_destinations(model), progress=False)
    assert capsys.readouterr().err == ""


def test_stored_dtype_may_differ(tmp_path: Path) -> None:
    model = make(CONFIGS["llama"])
    model.save_pretrained(tmp_path)
    half = {name: t.half() for name, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(half, tmp_path / "model.safetensors")
    destinations = blank_destinations(model)
    load_weights(Checkpoint(tmp_path), model, destinations, progress=False)
    assert torch.equal(destinations["lm_head.weight"], model.lm_head.weight.half().float())
