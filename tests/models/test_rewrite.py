"""Merged linear layers: where the rules apply, what they skip and why, the load plan they leave; and the report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from models import skeleton
from models.adapted import Adaptation, adapt
from models.attention import use_attention
from models.report import CachePlan, CallSite, RewriteReport, RuleOutcome, Verdict
from models.rules import merged_linear
from models.rules.merged_linear import LinearSlice, MergedLinear
from models.rules.verification import VERIFYING
from ops import SCHEMAS

CPU = torch.device("cpu")
MERGES = ("merge_qkv", "merge_gate_up")
LAYERS = 3
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3 with biases": lambda: transformers.Qwen3Config(**SIZES, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=4),
    "gemma2 with biases": lambda: transformers.Gemma2Config(**SIZES, sliding_window=4, attention_bias=True),
}


def make(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model with biases and norms that are not trivial either."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def adapted(model: PreTrainedModel) -> Adaptation:
    """Adapt a copy of `model` and load the model's weights through the load plan."""
    adaptation = adapt(skeleton.share(model), CPU, rules=MERGES)
    adaptation.materialise(CPU, own=True)
    source = model.state_dict()
    for name, destination in adaptation.destinations().items():
        destination.copy_(source[name])
    return adaptation


@torch.no_grad()
def logits(model: PreTrainedModel, length: int = 4) -> Tensor:
    """Logits of a short sequence (no longer than any window) with plain causal attention, on a model of ours."""
    use_attention(model, VERIFYING)
    ids = torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False).logits[0]


@torch.no_grad()
def reference_logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(3, 96, (1, 4), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits[0]


def reasons(adaptation: Adaptation, rule: str) -> set[str]:
    return {o.reason for o in adaptation.report.outcomes if o.rule == rule and not o.applied}


def skipped_at(adaptation: Adaptation, rule: str) -> list[str]:
    return [o.module for o in adaptation.report.outcomes if o.rule == rule and not o.applied]


@pytest.mark.parametrize("name", CONFIGS)
def test_both_rules_apply_at_every_layer_and_logits_stay(name: str) -> None:
    model = make(CONFIGS[name]())
    if name.startswith("gemma2"):
        model.config.attn_logit_softcapping = None  # the plain attention that is compared with has none
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    adaptation = adapted(model)
    assert adaptation.report.applied("merge_qkv") == LAYERS
    assert adaptation.report.applied("merge_gate_up") == LAYERS
    assert len(adaptation.report.outcomes) == 2 * LAYERS
    merged = [module for module in adaptation.module.model.modules() if isinstance(module, MergedLinear)]
    assert [tuple(module.weight.shape) for module in merged] == [(64, 32), (96, 32)] * LAYERS
    found, expected = logits(adaptation.module.model), reference_logits(model)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama with biases", "gemma2", "llama, tied"])
def test_the_load_plan_covers_the_state_dict_with_slices_of_the_merged_storage(name: str) -> None:
    model = make(CONFIGS[name]())
    adaptation = adapt(skeleton.share(model), CPU, rules=MERGES)
    adaptation.materialise(CPU, own=True)
    destinations, source = adaptation.destinations(), model.state_dict()
    assert destinations.keys() == source.keys()
    assert {n: t.shape for n, t in destinations.items()} == {n: t.shape for n, t in source.items()}
    attention = adaptation.module.model.model.layers[1].self_attn
    merged = attention.merged_q_proj_k_proj_v_proj
    start = 0
    for member in ("q_proj", "k_proj", "v_proj"):
        for kind in ("weight", "bias") if merged.bias is not None else ("weight",):
            whole, part = getattr(merged, kind), destinations[f"model.layers.1.self_attn.{member}.{kind}"]
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert part.data_ptr() == whole[start:].data_ptr()
            assert part.is_contiguous()
        start += part.shape[0]
    assert start == merged.weight.shape[0] == 64
    for tensor in adaptation.module.model.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    for path, destination in destinations.items():
        destination.copy_(source[path])
    assert not any(tensor.isnan().any() for tensor in adaptation.module.model.state_dict().values())


# Merged for good: matrix products in the graph that Dynamo traces.


def count_products(model: PreTrainedModel) -> int:
    """Trace one forward pass and count the linear layers in its graph, the head excepted."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    use_attention(model, VERIFYING)
    with torch.no_grad():
        compiled = torch.compile(model.get_submodule("model"), backend=backend, fullgraph=True)
        compiled(
            input_ids=torch.arange(5)[None],
            position_ids=torch.arange(5)[None],
            use_cache=False,
        )
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op in ("call_function", "call_method")]
    return sum("linear" in name for name in names)


def test_a_traced_layer_has_4_matrix_products_instead_of_7(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}))
    assert count_products(skeleton.share(model)) == 2 * 7
    adaptation = adapted(model)
    assert count_products(adaptation.module.model) == 2 * 4

    def forgetful(self: MergedLinear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    monkeypatch.setattr(MergedLinear, "forward", forgetful)
    assert count_products(adaptation.module.model) == 2 * 7


def test_merged_linear_computes_once_for_all_its_users_and_keeps_nothing() -> None:
    merged = MergedLinear(6, 4, bias=True, dtype=torch.float32, users=2)
    merged.weight = nn.Parameter(torch.arange(24.0).view(6, 4), False)
    merged.bias = nn.Parameter(torch.arange(6.0), False)
    first, second = LinearSlice(merged, 0, 2), LinearSlice(merged, 2, 4)
    calls: list[Tensor] = []
    product = nn.functional.linear

    def counting(x: Tensor, *rest: Any) -> Tensor:
        calls.append(x)
        return product(x, *rest)

    merged.product = counting
    x, y = torch.ones(3, 4), torch.full((3, 4), 2.0)
    whole = product(x, merged.weight, merged.bias)
    assert torch.equal(first(x), whole[:, :2])
    assert torch.equal(second(x), whole[:, 2:])
    assert len(calls) == 1
    assert merged._input is None
    assert merged._output is None
    first(x)  # and nobody asks for the second slice: the next input starts anew
    assert torch.equal(first(y), product(y, merged.weight, merged.bias)[:, :2])
    assert torch.equal(second(y), product(y, merged.weight, merged.bias)[:, 2:])
    assert len(calls) == 3
    x.zero_()
    assert torch.equal(second(x), merged.bias.expand(3, 6)[:, 2:])  # the same object with other content, much later


def test_the_memory_does_not_reach_from_one_pass_to_the_next() -> None:
    model = make(CONFIGS["llama"]())
    source = adapted(model).module.model
    before = logits(source)
    with torch.no_grad():
        for module in source.modules():
            if isinstance(module, MergedLinear):
                module.weight.mul_(1.5)
    assert not torch.allclose(logits(source), before)


# What is skipped, and why.


class ScaledLinear(nn.Linear):
    """A linear layer that does more than a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def assert_right(model: PreTrainedModel, adaptation: Adaptation) -> None:
    found, expected = logits(adaptation.module.model), reference_logits(model)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_subclass_of_linear_is_skipped_at_its_layer_alone() -> None:
    model = make(CONFIGS["llama"]())
    model.model.layers[1].self_attn.k_proj.__class__ = ScaledLinear
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_qkv") == ["model.layers.1.self_attn"]
    assert reasons(adaptation, "merge_qkv") == {"q_proj, k_proj, v_proj: a subclass of nn.Linear"}
    assert adaptation.report.applied("merge_qkv") == LAYERS - 1
    assert adaptation.report.applied("merge_gate_up") == LAYERS
    assert_right(model, adaptation)


def test_mixed_biases_are_skipped() -> None:
    model = make(CONFIGS["llama"]())
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.randn(32))
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_qkv") == ["model.layers.0.self_attn"]
    assert "some have a bias and some do not" in reasons(adaptation, "merge_qkv").pop()
    assert_right(model, adaptation)


def test_mixed_dtypes_are_skipped() -> None:
    model = skeleton.build(CONFIGS["llama"](), torch.float32)
    model.model.layers[2].mlp.up_proj.to(torch.float64)
    outcomes = adapt(model, CPU, rules=MERGES).report.outcomes
    assert [o.reason for o in outcomes if not o.applied] == ["gate_proj, up_proj: dtypes or input sizes differ"]


def test_tied_weights_are_skipped_and_stay_tied() -> None:
    model = make(CONFIGS["llama"]())
    layers = model.model.layers
    layers[2].mlp.gate_proj.weight = layers[0].mlp.gate_proj.weight
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_gate_up") == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert reasons(adaptation, "merge_gate_up") == {"gate_proj, up_proj: a weight is tied to another"}
    ours = adaptation.module.model.model.layers
    assert ours[2].mlp.gate_proj.weight is ours[0].mlp.gate_proj.weight
    assert_right(model, adaptation)


def test_a_linear_that_is_called_twice_is_skipped() -> None:
    class TwiceMLP(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up_proj(x)[..., :32]

    model = make(CONFIGS["llama"]())
    model.model.layers[1].mlp.__class__ = TwiceMLP
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_gate_up") == ["model.layers.1.mlp"]
    assert "called more than once in a forward pass" in reasons(adaptation, "merge_gate_up").pop()
    assert_right(model, adaptation)


def test_a_linear_that_does_not_share_its_input_is_no_match() -> None:
    class TwoInputs(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))

    model = make(CONFIGS["llama"]())
    for layer in model.model.layers:
        layer.mlp.__class__ = TwoInputs
    adaptation = adapted(model)
    assert not [o for o in adaptation.report.outcomes if o.rule == "merge_gate_up"]
    assert_right(model, adaptation)


def test_linears_with_hooks_are_skipped() -> None:
    model = make(CONFIGS["llama"]())
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: output + 1)
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_gate_up") == ["model.layers.1.mlp"]
    assert reasons(adaptation, "merge_gate_up") == {"gate_proj, up_proj: it has forward hooks"}
    assert_right(model, adaptation)


def test_layers_whose_module_is_never_called_are_skipped() -> None:
    class Fork(modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.pair[0](x)) * self.pair[1](x))

    model = make(CONFIGS["llama"]())
    mlp = model.model.layers[0].mlp
    mlp.__class__ = Fork
    mlp.pair = nn.ModuleList([mlp.gate_proj, mlp.up_proj])
    del mlp.gate_proj, mlp.up_proj
    adaptation = adapted(model)
    assert skipped_at(adaptation, "merge_gate_up") == ["model.layers.0.mlp.pair"]
    assert "not called itself" in reasons(adaptation, "merge_gate_up").pop()
    assert_right(model, adaptation)


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        right = MergedLinear.forward
        patch.setattr(MergedLinear, "forward", lambda self, x: right(self, x) * 1.001)
        yield


def test_a_rule_that_fails_its_verification_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(CONFIGS["llama"]())
    with broken(monkeypatch):
        adaptation = adapted(model)
        assert adaptation.report.applied("merge_qkv") == adaptation.report.applied("merge_gate_up") == 0
        assert not any(isinstance(module, MergedLinear | LinearSlice) for module in adaptation.module.model.modules())
        assert_right(model, adaptation)
    for rule in ("merge_qkv", "merge_gate_up"):
        assert len(skipped_at(adaptation, rule)) == LAYERS
        (reason,) = reasons(adaptation, rule)
        assert reason.startswith("verification failed: relative error ")
        assert 1e-4 < float(reason.rsplit(" ", 1)[1]) < 1e-2


def test_verification_is_done_once_for_equal_layers_and_leaves_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from models.rules.merged_linear import MergeLinears

    model = skeleton.build(CONFIGS["qwen3"](), torch.bfloat16)
    verified: list[str] = []
    verify = MergeLinears.verify

    def watched(self: Any, model: Any, probe: Any, rewrite: Any, device: Any) -> str | None:
        attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        config = model.config.to_dict()
        result = verify(self, model, probe, rewrite, device)
        verified.append(rewrite.module)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
        assert model.config.to_dict() == config
        assert all(parameter.is_meta for parameter in model.parameters())
        return result

    monkeypatch.setattr(MergeLinears, "verify", watched)
    adapt(model, CPU, rules=MERGES)
    assert verified == ["model.layers.0.self_attn", "model.layers.0.mlp"]


def test_the_users_model_is_never_changed() -> None:
    model = make(CONFIGS["llama"]())
    modules = dict(model.named_modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = reference_logits(model)
    adapted(model)
    assert dict(model.named_modules()) == modules
    assert {type(module) for module in model.modules()}.isdisjoint({MergedLinear, LinearSlice})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("_pagegraph_step" in vars(module) for module in model.modules())
    assert torch.equal(reference_logits(model), expected)


# The report.


def test_the_report_of_a_model() -> None:
    model = skeleton.build(CONFIGS["llama"](), torch.bfloat16)
    text = str(adapt(model, CPU, dict.fromkeys(SCHEMAS, "reference")).report)
    assert text == (
        "LlamaForCausalLM: proven, 3 attention sites, 3 caches\n"
        "  merge_qkv: applied at 3 modules (q_proj, k_proj, v_proj: share their input)\n"
        "  merge_gate_up: applied at 3 modules (gate_proj, up_proj: share their input)\n"
        "  paged_attention: provider reference (asked for)\n"
        "  write_kv: provider reference (asked for)\n"
        "  copy_blocks: provider reference (asked for)\n"
        "  swap_blocks: provider reference (asked for)\n"
        "  sample: provider reference (asked for)\n"
        "  linear: provider reference (asked for)\n"
        "  grouped_linear: provider reference (asked for)\n"
        "  rms_norm: provider reference (asked for)\n"
        "  add_rms_norm: provider reference (asked for)\n"
        "  silu_and_mul: provider reference (asked for)\n"
        "  gelu_and_mul: provider reference (asked for)\n"
        "  rope_write_kv: provider reference (asked for)"
    )


def test_the_report_groups_outcomes_and_counts_sites_and_caches_apart() -> None:
    own = CallSite("a", num_q_heads=4, num_kv_heads=2, k_dim=8, v_dim=6, scale=1.0)
    guest = CallSite("b", num_q_heads=4, num_kv_heads=2, k_dim=8, v_dim=6, scale=1.0, writes=False)
    outcomes = [
        RuleOutcome("merge", "a", True, "fits"),
        RuleOutcome("merge", "b", False, "does not"),
        RuleOutcome("merge", "c", True, "fits"),
        RuleOutcome("other", "a", True, "fits"),
    ]
    report = RewriteReport("OddForCausalLM", Verdict.UNPROVEN, CachePlan((own, guest)), outcomes)
    assert str(report) == (
        "OddForCausalLM: unproven, 2 attention sites, 1 caches\n"
        "  merge: applied at 2 modules (fits)\n"
        "  merge: skipped at 1 modules (does not)\n"
        "  other: applied at 1 modules (fits)"
    )
    assert (report.applied("merge"), report.applied("other"), report.applied("absent")) == (2, 1, 0)
    assert report.plan.bytes_per_token(2) == 2 * 2 * (8 + 6)


def test_an_architecture_outside_of_the_table_is_unproven() -> None:
    config = transformers.GraniteConfig(**{name: value for name, value in SIZES.items() if name != "head_dim"})
    assert adapt(skeleton.build(config, torch.float32), CPU).report.verdict is Verdict.UNPROVEN


def test_a_verification_that_cannot_run_skips_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(merged_linear.MergeLinears, "verify", broken)
    outcomes = adapt(make(CONFIGS["llama"]()), CPU, rules=MERGES).report.outcomes
    assert len(outcomes) == 2 * LAYERS
    assert {(outcome.applied, outcome.reason) for outcome in outcomes} == {
        (False, "verification could not run: RuntimeError: no such device")
    }
