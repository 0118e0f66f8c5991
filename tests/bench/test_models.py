"""Random models: built once, whole, seeded, and served from token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedModel

import bench.models
import runtime
from bench.models import RANDOM, resolve_model


def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a model named tiny."""
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(bench.models.RANDOM, "tiny", tiny)
    return tmp_path / "cache"


def test_a_random_model_is_built_once_and_leaves_nothing_else(cache: Path) -> None:
    folder = resolve_model("tiny")
    assert folder == cache / "bench-models" / "tiny"
    before = (folder / "model.safetensors").stat()
    assert resolve_model("tiny") == folder
    after = (folder / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_its_weights_are_seeded_and_bfloat16_and_the_callers_generator_is_left_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.random.get_rng_state()
    first = load_file(resolve_model("tiny") / "model.safetensors")
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path / "other"))
    torch.rand(1)
    second = load_file(resolve_model("tiny") / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in first  # tied


def test_it_is_served_without_a_tokenizer(cache: Path) -> None:
    with runtime.compile(
        resolve_model("tiny"), backend="eager", dtype="float32", num_blocks=8, progress=False
    ) as engine:
        params = runtime.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        output = engine.generate([[1, 2, 3], [4]], params)
    assert [len(one.outputs[0].token_ids) for one in output] == [5, 5]


def test_a_folder_stays_as_it_is(cache: Path, tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    assert resolve_model(str(tmp_path / "mine")) == tmp_path / "mine"
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.2-1b", 1_235_814_400), ("qwen3-0.6b", 596_049_920)]
)  # as published
def test_the_random_models_have_as_many_parameters_as_the_public_ones(name: str, parameters: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(RANDOM[name]())
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
