"""The rule `linear`: which layers call the op, which are left and why, and that a wrong op is found out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from models import skeleton
from models.adapted import adapt
from models.attention import use_attention
from models.probe import probe
from models.report import RuleOutcome
from models.rewrite import apply_rules
from models.rules.linear import OpLinear, UseLinearOp
from models.rules.merged_linear import MergedLinear
from models.rules.verification import VERIFYING
from ops import Choice
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
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PROJECTIONS = "q_proj, k_proj, v_proj, o_proj: computed by the op"
EXPERTS = "gate_proj, up_proj, down_proj: computed by the op"
HEAD = "lm_head: computed by the op"


class Counting:
    """An op of the formula that remembers the weights it was called with."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor] = lambda x, out: out) -> None:
        self.weights: list[Tensor] = []
        self._change = change

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.weights.append(weight)
        return self._change(x, F.linear(x, weight, bias))


def choice(overload: Any, provider: str = "fake") -> Choice:
    return Choice("linear", provider, "for a test", overload)


def make(config: PretrainedConfig | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config or transformers.LlamaConfig(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def outcomes_of(model: PreTrainedModel, overload: Any, provider: str = "fake") -> list[RuleOutcome]:
    """Apply the rule to `model` itself."""
    _, outcomes = apply_rules(model, probe(model), [UseLinearOp(choice(overload, provider))], CPU)
    return outcomes


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    use_attention(model, VERIFYING)
    ids = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, position_ids=torch.arange(6)[None], use_cache=False).logits


def test_every_linear_layer_calls_the_op() -> None:
    model, op = skeleton.share(make()), Counting()
    expected = logits(model)
    outcomes = outcomes_of(model, op)
    assert {(o.module, o.reason) for o in outcomes} == {
        ("", HEAD),
        *((f"model.layers.{i}.self_attn", PROJECTIONS) for i in range(LAYERS)),
        *((f"model.layers.{i}.mlp", EXPERTS) for i in range(LAYERS)),
    }
    assert all(o.applied for o in outcomes)
    assert sum(isinstance(module, OpLinear) for module in model.modules()) == 7 * LAYERS + 1
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    op.weights.clear()
    assert torch.equal(logits(model), expected)
    assert len(op.weights) == 7 * LAYERS + 1
    assert op.weights[-1] is model.lm_head.weight


def test_merged_products_call_the_op_once_for_all_their_slices() -> None:
    adaptation = adapt(skeleton.share(make()), CPU, rules=("merge_qkv", "merge_gate_up"))
    model, op = adaptation.module.model, Counting()
    adaptation.materialise(CPU, own=True)
    adaptation.copy_from(make().state_dict())
    UseLinearOp(choice(op)).apply(model.model.layers[0].self_attn, ("merged_q_proj_k_proj_v_proj",))
    found = logits(model)
    (weight,) = op.weights
    assert weight is model.model.layers[0].self_attn.merged_q_proj_k_proj_v_proj.weight
    assert weight.shape == (64, 32)
    assert (found - logits(skeleton.share(make()))).abs().max() < 1e-5 * found.abs().max()


def test_the_provider_of_this_machine_is_used_by_all_layers_of_an_adapted_model() -> None:
    chosen = choose(CPU, {}, torch.float32)["linear"]
    if chosen.provider == "reference":
        pytest.skip("the C++ ops cannot be built here")
    model = make()
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=True)
    adaptation.copy_from(model.state_dict())
    assert adaptation.report.applied("linear") == 2 * LAYERS + 1
    ours = adaptation.module.model
    assert not any(type(module) is nn.Linear for module in ours.modules())
    merged = [module for module in ours.modules() if isinstance(module, MergedLinear)]
    assert {module.product for module in merged} == {chosen.overload}
    assert len(merged) == 2 * LAYERS
    expected = logits(skeleton.share(model))
    assert (logits(ours) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_with_the_reference_nothing_is_replaced() -> None:
    model = skeleton.share(make())
    assert outcomes_of(model, torch.ops.pagegraph.linear.reference, "reference") == []
    assert not any(isinstance(module, OpLinear) for module in model.modules())


# What is left, and why.


def test_a_layer_with_hooks_is_left_and_its_neighbours_are_not() -> None:
    model = make()
    down = model.model.layers[1].mlp.down_proj
    down.register_forward_hook(lambda module, args, output: output + 1)
    ours = skeleton.share(model)
    outcomes = [o for o in outcomes_of(ours, Counting()) if o.module == "model.layers.1.mlp"]
    assert [(o.applied, o.reason) for o in outcomes] == [
        (True, "gate_proj, up_proj: computed by the op"),
        (False, "down_proj: it has forward hooks"),
    ]
    assert type(ours.model.layers[1].mlp.down_proj) is nn.Linear
    assert (logits(ours) - logits(skeleton.share(model))).abs().max() == 0


def test_a_subclass_of_linear_is_left() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = make()
    model.model.layers[0].self_attn.o_proj.__class__ = Scaled
    ours = skeleton.share(model)
    outcomes = outcomes_of(ours, Counting())
    assert "q_proj, k_proj, v_proj: computed by the op" in {o.reason for o in outcomes}
    assert type(ours.model.layers[0].self_attn.o_proj) is Scaled
    assert torch.equal(logits(ours), logits(skeleton.share(model)))


def test_convolutions_of_gpt2_and_embeddings_are_left() -> None:
    model = make(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1))
    outcomes = outcomes_of(skeleton.share(model), Counting())
    assert [(o.module, o.reason) for o in outcomes] == [("", HEAD)]


# Weights.


def test_a_tied_head_stays_tied() -> None:
    model = make(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=True)
    ours = adaptation.module.model
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.lm_head.weight is not model.lm_head.weight
    adaptation.copy_from(model.state_dict())
    assert torch.equal(ours.lm_head.weight, model.model.embed_tokens.weight)


def test_names_and_parameters_stay() -> None:
    model = skeleton.share(make(transformers.LlamaConfig(**SIZES, attention_bias=True)))
    before = dict(model.named_parameters())
    outcomes_of(model, Counting())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_weights_that_are_replaced_later_are_the_ones_used() -> None:
    model, op = skeleton.share(make()), Counting()
    outcomes_of(model, op)
    head = model.lm_head
    head.weight = nn.Parameter(torch.zeros(96, 32), False)
    assert logits(model).eq(0).all()


# Verification.


def failures(outcomes: list[RuleOutcome]) -> set[str]:
    assert not any(o.applied for o in outcomes)
    return {o.reason for o in outcomes}


def test_a_wrong_op_is_found() -> None:
    model = skeleton.share(make())
    reasons = failures(outcomes_of(model, Counting(lambda x, out: out * 1.01)))
    assert "lm_head, 1 tokens in torch.float32: verification failed: relative error 1.0e-02" in reasons
    assert len(reasons) == 3
    assert not any(isinstance(module, OpLinear) for module in model.modules())


def test_an_op_that_is_wrong_for_many_tokens_only_is_found() -> None:
    reasons = failures(outcomes_of(skeleton.share(make()), Counting(lambda x, out: out * (1 + (x.shape[0] > 60)))))
    assert all(
        "65 tokens in torch.float32: verification failed: relative error 1.0e+00" in reason for reason in reasons
    )


def test_an_op_that_is_wrong_in_the_dtype_of_the_model_only_is_found() -> None:
    def change(x: Tensor, out: Tensor) -> Tensor:
        return out * 1.1 if x.dtype == torch.bfloat16 else out

    assert all(o.applied for o in outcomes_of(skeleton.share(make()), Counting(change)))
    reasons = failures(outcomes_of(skeleton.share(make(dtype=torch.bfloat16)), Counting(change)))
    assert all("in torch.bfloat16: verification failed" in reason for reason in reasons)


def test_an_op_without_its_bias_is_found_even_for_layers_that_have_none() -> None:
    op = choice(lambda x, weight, bias: F.linear(x, weight))
    model = skeleton.share(make())
    _, outcomes = apply_rules(model, probe(model), [UseLinearOp(op)], CPU)
    assert all("verification failed" in reason for reason in failures(outcomes))


def test_an_op_that_raises_is_not_used() -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("no such instruction")

    reasons = failures(outcomes_of(skeleton.share(make()), broken))
    assert reasons == {"verification could not run: RuntimeError: no such instruction"}


def test_layers_of_one_shape_are_verified_once() -> None:
    op = Counting()
    outcomes_of(skeleton.share(make(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 5}))), op)
    assert len(op.weights) == 3 * (4 + 3 + 1)  # three numbers of tokens; attention, feed-forward, head


def test_the_op_is_verified_on_the_device_that_the_model_is_for() -> None:
    """Here one that computes nothing, so that there is no result to compare."""
    model, op = skeleton.share(make()), Counting()
    _, outcomes = apply_rules(model, probe(model), [UseLinearOp(choice(op))], torch.device("meta"))
    assert {weight.device.type for weight in op.weights} == {"meta"}
    assert all(reason.startswith("verification could not run") for reason in failures(outcomes))
