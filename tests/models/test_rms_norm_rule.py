"""The rule `rms_norm`: which modules call the op, with which convention, which are left and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models import skeleton
from models.adapted import adapt
from models.attention import use_attention
from models.probe import probe
from models.report import RuleOutcome
from models.rewrite import apply_rules
from models.rules.rms_norm import OpRMSNorm, UseRMSNormOp
from models.rules.verification import VERIFYING
from ops import Choice, reference
from ops.providers import choose

CPU = torch.device("cpu")
LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# Norms in a layer, and what is added to their weights.
FAMILIES: dict[str, tuple[Callable[[], PretrainedConfig], int, float]] = {
    "llama": (lambda: transformers.LlamaConfig(**SIZES), 2, 0.0),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES, head_dim=8), 4, 0.0),
    "gemma2": (lambda: transformers.Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=None), 4, 1.0),
    "gemma3_text": (lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8), 6, 1.0),
    "phi3": (lambda: transformers.Phi3Config(**SIZES), 2, 0.0),
}


def choice(overload: Any = reference.rms_norm, provider: str = "fake") -> Choice:
    return Choice("rms_norm", provider, "for a test", overload)


def make(config: PretrainedConfig | None = None) -> PreTrainedModel:
    """A random model whose norms have weights of their own."""
    torch.manual_seed(0)
    config = config or transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def outcomes_of(model: PreTrainedModel, chosen: Choice | None = None) -> list[RuleOutcome]:
    """Apply the rule to `model` itself."""
    _, outcomes = apply_rules(model, probe(model), [UseRMSNormOp(chosen or choice())], CPU)
    return outcomes


def skipped(outcomes: list[RuleOutcome]) -> dict[str, str]:
    return {outcome.module: outcome.reason for outcome in outcomes if not outcome.applied}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    use_attention(model, VERIFYING)
    ids = torch.randint(3, 96, (1, 4), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_of_a_family_calls_the_op_with_its_convention(family: str) -> None:
    config, per_layer, offset = FAMILIES[family]
    model = skeleton.share(make(config()))
    expected = logits(model)
    outcomes = outcomes_of(model)
    assert skipped(outcomes) == {}
    norms = [module for module in model.modules() if isinstance(module, OpRMSNorm)]
    assert len(norms) == len(outcomes) == per_layer * LAYERS + 1
    assert {norm.offset for norm in norms} == {offset}
    found = logits(model)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_provider_of_this_machine_is_used_by_an_adapted_model() -> None:
    if choose(CPU, {}, torch.float32)["rms_norm"].provider == "reference":
        pytest.skip("the C++ ops cannot be built here")
    model = make()
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=True)
    adaptation.copy_from(model.state_dict())
    assert adaptation.report.applied("rms_norm") == 2 * LAYERS + 1
    expected = logits(skeleton.share(model))
    assert (logits(adaptation.module.model) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_epsilon_of_the_module_is_kept() -> None:
    model = skeleton.share(make(transformers.LlamaConfig(**SIZES, rms_norm_eps=0.25)))
    expected = logits(model)
    outcomes_of(model)
    assert model.model.norm.eps == 0.25
    assert (logits(model) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_with_the_reference_nothing_is_replaced() -> None:
    model = skeleton.share(make())
    assert outcomes_of(model, choice(provider="reference")) == []
    assert not any(isinstance(module, OpRMSNorm) for module in model.modules())


def test_names_and_weights_stay() -> None:
    model = skeleton.share(make(FAMILIES["gemma3_text"][0]()))
    before = dict(model.named_parameters())
    outcomes_of(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


# What is left, and why.


@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.CohereConfig(**SIZES),
        lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1),
    ],
    ids=["cohere", "gpt2"],
)
def test_layer_norms_are_no_candidates(config: Callable[[], PretrainedConfig]) -> None:
    assert outcomes_of(skeleton.share(make(config()))) == []


class CentredRMSNorm(LlamaRMSNorm):
    """Takes the mean off, as a LayerNorm does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class ScaledRMSNorm(LlamaRMSNorm):
    """Not what its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class OutsideRMSNorm(LlamaRMSNorm):
    """Adds epsilon to the root, not under it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class FirstAxisRMSNorm(LlamaRMSNorm):
    """Normalises the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("other", [CentredRMSNorm, ScaledRMSNorm, OutsideRMSNorm, FirstAxisRMSNorm])
def test_a_module_that_computes_something_else_is_left(other: type[nn.Module]) -> None:
    model = make()
    norm = model.model.layers[1].post_attention_layernorm
    norm.__class__ = other
    ours = skeleton.share(model)
    expected = logits(skeleton.share(model))
    assert skipped(outcomes_of(ours)) == {
        "model.layers.1": "post_attention_layernorm: not an RMS norm of its last dimension"
    }
    assert type(ours.model.layers[1].post_attention_layernorm) is other
    assert (logits(ours) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_norms_of_one_class_with_other_settings_are_judged_apart() -> None:
    class TunedRMSNorm(LlamaRMSNorm):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    model = make()
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = TunedRMSNorm
    model.model.layers[1].input_layernorm.scale = 2.0
    ours = skeleton.share(model)
    assert skipped(outcomes_of(ours)) == {"model.layers.1": "input_layernorm: not an RMS norm of its last dimension"}
    assert (logits(ours) - (expected := logits(skeleton.share(model)))).abs().max() < 1e-5 * expected.abs().max()


def test_a_norm_with_a_bias_is_left() -> None:
    model = make()
    model.model.norm.bias = nn.Parameter(torch.ones(32))
    assert skipped(outcomes_of(skeleton.share(model))) == {
        "model": "norm: it has other parameters than one weight vector"
    }


def test_a_norm_with_hooks_is_left() -> None:
    model = make()
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert skipped(outcomes_of(skeleton.share(model))) == {"model": "norm: it has forward hooks"}


def test_a_norm_without_an_epsilon_by_name_is_left() -> None:
    class NamelessRMSNorm(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = make()
    model.model.norm = NamelessRMSNorm(model.model.norm.weight)
    assert skipped(outcomes_of(skeleton.share(model))) == {"model": "norm: it names no epsilon"}


# Verification.


WRONG: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "scaled": lambda x, weight, eps, offset: 1.01 * reference.rms_norm(x, weight, eps, offset),
    "no epsilon": lambda x, weight, eps, offset: reference.rms_norm(x, weight, 0.0, offset),
    "no offset": lambda x, weight, eps, offset: reference.rms_norm(x, weight, eps, 0.0),
    "ignores strides": lambda x, weight, eps, offset: reference.rms_norm(
        x.as_strided(x.shape, torch.empty(x.shape).stride()), weight, eps, offset
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_op_is_found(wrong: str) -> None:
    model = skeleton.share(make(FAMILIES["gemma2"][0]()))
    outcomes = outcomes_of(model, choice(WRONG[wrong]))
    assert len(outcomes) == 4 * LAYERS + 1
    assert not any(outcome.applied for outcome in outcomes)
    assert all(": verification failed: relative error " in outcome.reason for outcome in outcomes)
    assert not any(isinstance(module, OpRMSNorm) for module in model.modules())


def test_an_op_that_raises_is_not_used() -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("no such instruction")

    outcomes = outcomes_of(skeleton.share(make()), choice(broken))
    assert {outcome.reason for outcome in outcomes} == {"verification could not run: RuntimeError: no such instruction"}


def test_the_op_is_verified_on_the_device_that_the_model_is_for() -> None:
    """Here one that computes nothing, so that there is no result to compare."""
    seen: set[str] = set()

    def watched(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        seen.update((x.device.type, weight.device.type))
        return reference.rms_norm(x, weight, eps, offset)

    model = skeleton.share(make())
    _, outcomes = apply_rules(model, probe(model), [UseRMSNormOp(choice(watched))], torch.device("meta"))
    assert seen == {"meta"}
    assert all(outcome.reason.startswith("verification could not run") for outcome in outcomes)
