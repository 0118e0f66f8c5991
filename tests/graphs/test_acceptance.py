"""The acceptance test itself: it passes what is right and, above all, fails what is subtly wrong."""

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig, PretrainedConfig

import runtime
from graphs import acceptance
from graphs.acceptance import TOLERANCE, acceptance_error, tiny_copy
from models import attention
from models.report import UnsupportedModelError

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 200,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}


def test_tiny_copy_keeps_every_layer_type() -> None:
    types = ["sliding_attention"] * 4 + ["full_attention"] * 2
    tiny = tiny_copy(GptOssConfig(**SIZES, layer_types=types, sliding_window=128))
    assert (tiny.num_hidden_layers, tiny.layer_types) == (5, types[:5])
    assert tiny.sliding_window == acceptance._WINDOW
    assert tiny.hidden_size == 32
    assert tiny.intermediate_size == 64


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=64)])
def test_a_right_architecture_passes(config: PretrainedConfig) -> None:
    state = torch.random.get_rng_state()
    assert acceptance_error(config, CPU) < TOLERANCE / 10
    assert torch.equal(torch.random.get_rng_state(), state), "the user's random state was touched"


def _forget_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_WINDOW", 9)  # known to both sides; the paged side is then made to use 8
    plan = attention.AttentionStep.begin

    def begin(self: attention.AttentionStep, *args: object) -> None:
        object.__setattr__(self.plan, "sites", tuple(_narrower(site) for site in self.plan.sites))
        plan(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.AttentionStep, "begin", begin)


def _narrower(site: object) -> object:
    from dataclasses import replace

    return replace(site, window=8) if site.window == 9 else site  # type: ignore[type-var, attr-defined]


def test_a_window_off_by_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget_the_window(monkeypatch)
    assert acceptance_error(MistralConfig(**SIZES, sliding_window=64), CPU) > 10 * TOLERANCE


def test_verify_refuses_an_architecture_that_differs(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    _forget_the_window(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="acceptance test: a small random copy differs"):
        runtime.compile(tiny_model("mistral"), backend="eager", num_blocks=8, verify=True, progress=False)


def test_verify_passes_silently_and_an_unproven_architecture_warns_without_it() -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    with pytest.warns(UserWarning, match="Qwen2ForCausalLM is not among the tested architectures.*verify=True"):
        runtime.compile(model, backend="eager", num_blocks=8, progress=False).close()
    engine = runtime.compile(model, backend="eager", num_blocks=8, verify=True, progress=False)
    assert engine.report.verdict.value == "unproven"
    engine.close()
