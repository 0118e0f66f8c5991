"""Rules on the captured graph: where each applies, that the values stay, what is skipped and why.

Nothing is compiled: the graphs that Dynamo captures run as they are, before and after the rules.
"""

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx
from torch._dynamo.decorators import mark_unbacked
from transformers import PretrainedConfig, PreTrainedModel

from graphs.capture import example_inputs
from graphs.fusion import Fusion, fuse
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from graphs.rules import GRAPH_RULES
from models import skeleton
from models.adapted import adapt
from models.report import RuleOutcome
from models.step_inputs import StepInputs
from ops.providers import Choice, choose
from ops.triton.library import interpreting

CPU = torch.device("cpu")
CHOICES = choose(CPU, {}, torch.float32)
if CHOICES["rms_norm"].provider == "reference":
    pytest.skip("the C++ ops, which the rules are for, cannot be built here", allow_module_level=True)

LAYERS, BLOCK_SIZE, VOCAB = 2, 4, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6),
    "phi3": lambda: transformers.Phi3Config(**SIZES, rope_parameters=PARTIAL),
    "glm": lambda: transformers.GlmConfig(**SIZES, head_dim=8),
    "cohere": lambda: transformers.CohereConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),
}
# A norm of a sum is every norm of a layer but the first of all; the final one is another. Of cohere's, none is an RMS
# norm. glm and cohere rotate pairs of neighbours.
APPLIED = {
    "llama": {"add_rms_norm": 2 * LAYERS, "gated_activation": LAYERS, "rope_write_kv": LAYERS},
    "qwen3": {"add_rms_norm": 2 * LAYERS, "gated_activation": LAYERS, "rope_write_kv": LAYERS},
    "gemma3_text": {"add_rms_norm": 2 * LAYERS, "gated_activation": LAYERS, "rope_write_kv": LAYERS},
    "phi3": {"add_rms_norm": 2 * LAYERS, "gated_activation": LAYERS, "rope_write_kv": LAYERS},
    "glm": {"add_rms_norm": 2 * LAYERS, "gated_activation": LAYERS},
    "cohere": {"gated_activation": LAYERS},
    "mixtral": {
        "add_rms_norm": 2 * LAYERS,
        "gated_activation": LAYERS,
        "grouped_linear": 2 * LAYERS,
        "rope_write_kv": LAYERS,
    },
}
# (tokens in the cache, tokens of this step) of each sequence.
STEPS = {
    "a first token": [(0, 1)],
    "decode of one": [(9, 1)],
    "decode of five": [(0, 1), (3, 1), (9, 1), (30, 1), (1, 1)],
    "prompt": [(0, 5)],
    "mixed": [(7, 1), (5, 3), (30, 1)],
}


def make(config: PretrainedConfig) -> PreTrainedModel:
    """A random model whose norms are not trivial either."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def captured(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, Callable[..., Any]]:
    """The graph of a function, and a function that runs a graph module of that interface with arguments of its own.

    `run(graph, *args)`; the graph given to it is called with whatever Dynamo lifted into its inputs.
    """
    found: list[fx.GraphModule] = []
    current: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        found.append(graph)
        current.append(graph)
        return lambda *inputs: current[-1](*inputs)

    def call(*args: Any) -> Any:
        return function(*args)

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    compiled = torch.compile(
        own, backend=backend, fullgraph=True, options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    )

    @torch.no_grad()
    def run(graph: fx.GraphModule, *args: Any) -> Any:
        current.append(graph)
        return compiled(*args)

    # Not dynamic because another model, traced before, had another size there.
    settings = torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False)
    with torch.no_grad(), settings:
        compiled(*args)
    (graph,) = found
    return graph, run


def rewritten(graph: fx.GraphModule, rules: Iterable[Any]) -> tuple[fx.GraphModule, list[RuleOutcome]]:
    """A copy of a graph after rules, and their outcomes."""
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    outcomes = fuse(copied.graph, rules, CPU)
    copied.graph.lint()
    copied.recompile()
    return copied, outcomes


def rules(choices: Mapping[str, Choice] = CHOICES) -> list[Any]:
    return [make(choices) for make in GRAPH_RULES.values()]


def applied(outcomes: list[RuleOutcome]) -> dict[str, int]:
    done = [outcome.rule for outcome in outcomes if outcome.applied]
    return {rule: done.count(rule) for rule in sorted(set(done))}


def ours(graph: fx.GraphModule) -> list[str]:
    """The ops of ours that a graph calls, in order."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.removeprefix("pagegraph.") for name in names if name.startswith("pagegraph.")]


class Captured:
    """The graph of a tiny adapted model, and caches with old tokens to run it over."""

    def __init__(self, config: PretrainedConfig, providers: Mapping[str, str] | None = None) -> None:
        model = make(config)
        adaptation = adapt(skeleton.share(model), CPU, providers)
        adaptation.materialise(CPU, own=True)
        adaptation.copy_from(model.state_dict())
        self.choices = adaptation.report.providers
        blocks = 1 + max(sum(_blocks(*chunk) for chunk in chunks) for chunks in STEPS.values())
        self.old = KVCache(adaptation.report.plan, blocks, BLOCK_SIZE, torch.float32, CPU, self.choices["copy_blocks"])
        generator = torch.Generator().manual_seed(3)
        for tensor in (*self.old.k, *self.old.v):
            tensor.normal_(generator=generator)
        example = [[tensor.clone() for tensor in tensors] for tensors in (self.old.k, self.old.v)]
        for tensor in (*example[0], *example[1]):
            mark_unbacked(tensor, 0, shape_id="N")
        self.graph, self._run = captured(adaptation.module, example_inputs(CPU), *example)

    def values(self, graph: fx.GraphModule, inputs: StepInputs) -> list[Tensor]:
        """The logits of a step, and the caches after it."""
        k, v = ([tensor.clone() for tensor in tensors] for tensors in (self.old.k, self.old.v))
        return [self._run(graph, inputs, k, v).logits, *k, *v]


@cache
def family(name: str) -> Captured:
    """Captured once for all tests."""
    return Captured(CONFIGS[name]())


def _blocks(before: int, now: int) -> int:
    return -(-(before + now) // BLOCK_SIZE)


def fill(chunks: list[tuple[int, int]]) -> StepInputs:
    """Greedy inputs with logits of every token, over blocks of their own."""
    tokens, width = sum(now for _, now in chunks), max(_blocks(*chunk) for chunk in chunks)
    arena = InputArena(CPU)
    inputs = arena.carve(StepSizes(tokens, len(chunks), width, tokens))
    for tensor in inputs:
        tensor.zero_()
    inputs.input_ids.random_(1, VOCAB, generator=torch.Generator().manual_seed(tokens))
    inputs.prev_row.fill_(-1)
    inputs.masked_ids.fill_(-1)
    inputs.top_p.fill_(1)
    inputs.logits_indices[:] = torch.arange(tokens)
    at, next_block = 0, 1
    for row, (before, now) in enumerate(chunks):
        positions, blocks = torch.arange(before, before + now), _blocks(before, now)
        table = torch.arange(next_block, next_block := next_block + blocks)
        span = slice(at, at := at + now)
        inputs.positions[span] = positions
        inputs.slot_mapping[0, span] = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        inputs.block_table[0, row, :blocks] = table
        inputs.seq_lens[row], inputs.query_start_loc[row + 1] = before + now, at
    return arena.upload()


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rule_applies_wherever_its_pattern_is(name: str) -> None:
    graph, outcomes = rewritten(family(name).graph, rules())
    assert applied(outcomes) == APPLIED[name]
    assert all(outcome.applied for outcome in outcomes)
    found = ours(graph)
    fused = {
        "add_rms_norm": found.count("add_rms_norm.cpu"),
        "gated_activation": found.count("silu_and_mul.cpu") + found.count("gelu_and_mul.cpu"),
        "grouped_linear": found.count("grouped_linear.cpu"),
        "rope_write_kv": found.count("rope_write_kv.cpu"),
    }
    assert {rule: count for rule, count in fused.items() if count} == APPLIED[name]
    assert found.count("write_kv.cpu") + found.count("rope_write_kv.cpu") == LAYERS


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_rewritten_graph_gives_the_same_logits_and_caches(name: str, step: str) -> None:
    model, inputs = family(name), fill(STEPS[step])
    graph, _ = rewritten(model.graph, rules())
    expected, found = model.values(model.graph, inputs), model.values(graph, inputs)
    assert_close(found, expected)
    assert any(
        not torch.equal(one, other) for one, other in zip(expected[1:], [*model.old.k, *model.old.v], strict=True)
    )


def test_each_layer_of_a_llama_is_six_ops_of_ours_beside_the_matrix_products() -> None:
    graph, _ = rewritten(family("llama").graph, rules())
    found = [name.removesuffix(".cpu") for name in ours(graph)]
    layer = ["linear", "rope_write_kv", "paged_attention", "linear", "add_rms_norm", "linear", "silu_and_mul", "linear"]
    assert found == ["rms_norm", *layer, "add_rms_norm", *layer, "add_rms_norm", "linear", "sample.reference"]


def test_conventions_of_gemma_are_kept() -> None:
    graph, _ = rewritten(family("gemma3_text").graph, rules())
    norms = [node for node in graph.graph.nodes if node.target is torch.ops.pagegraph.add_rms_norm.cpu]
    activations = [node for node in graph.graph.nodes if node.target is torch.ops.pagegraph.gelu_and_mul.cpu]
    assert {node.args[3:] for node in norms} == {(1e-6, 1.0)}
    assert {node.args[1:] for node in activations} == {(True,)}


@pytest.mark.parametrize("rule", GRAPH_RULES)
def test_each_rule_works_without_the_others(rule: str) -> None:
    model, inputs = family("mixtral"), fill(STEPS["mixed"])
    graph, outcomes = rewritten(model.graph, [GRAPH_RULES[rule](CHOICES)])
    assert applied(outcomes) == {rule: APPLIED["mixtral"][rule]}
    assert_close(model.values(graph, inputs), model.values(model.graph, inputs))


def test_with_the_reference_nothing_is_applied() -> None:
    reference = dict.fromkeys(CHOICES, "reference")
    model = Captured(CONFIGS["llama"](), reference)
    before = ours(model.graph)
    assert all(name.endswith(".reference") for name in before)
    graph, outcomes = rewritten(model.graph, rules(model.choices))
    assert outcomes == []
    assert ours(graph) == before


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        ("add_rms_norm", "add_rms_norm"),
        ("silu_and_mul", "gated_activation"),
        ("gelu_and_mul", "gated_activation"),
        ("grouped_linear", "grouped_linear"),
        ("rope_write_kv", "rope_write_kv"),
    ],
)
def test_an_op_on_its_reference_is_not_used(op: str, rule: str) -> None:
    name = "gemma3_text" if op == "gelu_and_mul" else "mixtral"
    choices = {**CHOICES, **choose(CPU, {op: "reference"}, torch.float32)}
    graph, outcomes = rewritten(family(name).graph, rules(choices))
    assert applied(outcomes) == {rule_: count for rule_, count in APPLIED[name].items() if rule_ != rule}
    assert not any(found.startswith(op) for found in ours(graph))


# What is skipped, and why.


def with_overload(op: str, function: Any) -> dict[str, Choice]:
    return {**CHOICES, op: replace(CHOICES[op], overload=function)}


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "add_rms_norm": ("add_rms_norm", lambda *args: [1.01 * out for out in CHOICES["add_rms_norm"].overload(*args)]),
    "gated_activation": ("silu_and_mul", lambda x: CHOICES["gelu_and_mul"].overload(x, False)),
    "grouped_linear": (
        "grouped_linear",
        lambda x, weight, ends: CHOICES["grouped_linear"].overload(x, weight, ends - 1),
    ),
    "rope_write_kv": (
        "rope_write_kv",  # the right queries, but keys that are not rotated
        lambda q, k, v, cos, sin, k_cache, v_cache, slots: (
            CHOICES["rope_write_kv"].overload(q, k, v, cos, sin, k_cache, v_cache, slots),
            CHOICES["write_kv"].overload(k, v, k_cache, v_cache, slots),
        )[0],
    ),
}


@pytest.mark.parametrize("rule", GRAPH_RULES)
def test_a_rule_whose_verification_fails_is_skipped_with_the_difference(rule: str) -> None:
    op, wrong = WRONG[rule]
    graph, outcomes = rewritten(family("mixtral").graph, [GRAPH_RULES[rule](with_overload(op, wrong))])
    assert ours(graph) == ours(family("mixtral").graph)
    assert [outcome.applied for outcome in outcomes] == [False] * APPLIED["mixtral"][rule]
    assert {outcome.rule for outcome in outcomes} == {rule}
    for outcome in outcomes:
        assert outcome.reason.startswith("verification failed: relative error ")
        assert 1e-3 < float(outcome.reason.rsplit(" ", 1)[1]) < 10


def test_a_verification_that_cannot_run_skips_the_rule() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    graph, outcomes = rewritten(family("llama").graph, rules(with_overload("silu_and_mul", broken)))
    assert applied(outcomes) == {"add_rms_norm": 2 * LAYERS, "rope_write_kv": LAYERS}
    reasons = {outcome.reason for outcome in outcomes if not outcome.applied}
    assert reasons == {"verification could not run: RuntimeError: no such kernel"}
    assert ours(graph).count("silu_and_mul.cpu") == 0


@pytest.mark.parametrize("rule", GRAPH_RULES)
def test_ops_are_verified_on_the_device_that_the_graph_is_for(rule: str) -> None:
    """Here one that computes nothing, so that there is no result to compare."""
    op, seen = WRONG[rule][0], set()

    def watched(*args: Any) -> Any:
        seen.update(arg.device.type for arg in args if isinstance(arg, Tensor))
        return CHOICES[op].overload(*args)

    graph = copy.deepcopy(family("mixtral").graph.graph)
    outcomes = fuse(graph, [GRAPH_RULES[rule](with_overload(op, watched))], torch.device("meta"))
    assert seen == {"meta"}
    assert outcomes
    assert all(outcome.reason.startswith("verification could not run") for outcome in outcomes)


TRITON = ("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "write_kv", "rope_write_kv")


@pytest.mark.skipif(
    not interpreting(), reason="the Triton kernels take this file's CPU tensors in the interpreter only"
)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "phi3"])
def test_rules_use_the_triton_ops(name: str) -> None:
    model, inputs = Captured(CONFIGS[name](), dict.fromkeys(TRITON, "triton")), fill(STEPS["mixed"])
    graph, outcomes = rewritten(model.graph, rules(model.choices))
    assert applied(outcomes) == APPLIED[name]
    assert all(outcome.applied for outcome in outcomes)
    activation = "gelu_and_mul" if name == "gemma3_text" else "silu_and_mul"
    for op in ("add_rms_norm", activation, "rope_write_kv"):
        assert ours(graph).count(f"{op}.triton") == (2 if op == "add_rms_norm" else 1) * LAYERS
    assert "rms_norm.triton" in ours(graph)
    assert_close(model.values(graph, inputs), model.values(model.graph, inputs))


def test_outcomes_name_the_module_and_the_reason() -> None:
    _, outcomes = rewritten(family("llama").graph, rules())
    by_rule = {outcome.rule: outcome for outcome in outcomes}
    assert {rule: outcome.reason for rule, outcome in by_rule.items()} == {
        "add_rms_norm": "a norm of a sum",
        "gated_activation": "halves of one product",
        "rope_write_kv": "rotate-half rope",
    }
    assert {rule: outcome.module.partition(".layers.")[2] for rule, outcome in by_rule.items()} == {
        "add_rms_norm": "1",
        "gated_activation": "1.mlp",
        "rope_write_kv": "1.self_attn",
    }


def fused(function: Callable[..., Any], *args: Tensor) -> list[RuleOutcome]:
    """Outcomes of all rules on a function, at a dynamic number of tokens; its values must stay."""
    for tensor in args:
        mark_unbacked(tensor, 0, shape_id="T")
    graph, run = captured(function, *args)
    changed, outcomes = rewritten(graph, rules())
    for tokens in (1, 5):
        fresh = [torch.randn(tokens, *tensor.shape[1:], generator=torch.Generator().manual_seed(5)) for tensor in args]
        assert_close(list(run(changed, *(x.clone() for x in fresh))), list(run(graph, *(x.clone() for x in fresh))))
    return outcomes


NORM = torch.ops.pagegraph.rms_norm.cpu
WEIGHT = torch.linspace(0.5, 1.5, 16)


def test_a_sum_that_broadcasts_is_no_residual() -> None:
    assert fused(lambda x: (NORM(x + WEIGHT, WEIGHT, 1e-6, 0.0),), torch.randn(9, 16)) == []
    assert fused(lambda x: (NORM(x + 1.0, WEIGHT, 1e-6, 0.0),), torch.randn(9, 16)) == []


def test_a_scaled_sum_is_no_residual() -> None:
    scaled = lambda x, y: (NORM(torch.add(x, y, alpha=2), WEIGHT, 1e-6, 0.0),)  # noqa: E731
    assert fused(scaled, torch.randn(9, 16), torch.randn(9, 16)) == []


def test_a_sum_in_place_is_never_taken_out_of_place() -> None:
    def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x
        total += y
        return NORM(total, WEIGHT, 1e-6, 0.0), x * 2

    assert fused(in_place, torch.randn(9, 16), torch.randn(9, 16)) == []


def test_what_works_in_place_stays_although_nobody_uses_its_result() -> None:
    def biased(x: Tensor, y: Tensor) -> tuple[Tensor]:
        product = x * y
        product.add_(WEIGHT)
        return (product + NORM(x + y, WEIGHT, 1e-6, 0.0),)

    assert applied(fused(biased, torch.randn(9, 16), torch.randn(9, 16))) == {"add_rms_norm": 1}


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
@pytest.mark.parametrize("halves", [lambda x: x.chunk(2, -1), lambda x: (x.narrow(-1, 0, 8), x.narrow(-1, 8, 8))])
def test_halves_in_any_spelling_and_order_of_the_product(
    halves: Callable[[Tensor], tuple[Tensor, Tensor]], activation: Callable[[Tensor], Tensor], flipped: bool
) -> None:
    def gated(x: Tensor) -> tuple[Tensor]:
        gate, up = halves(x)
        return (up * activation(gate) if flipped else activation(gate) * up,)

    assert applied(fused(gated, torch.randn(9, 16))) == {"gated_activation": 1}


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (F.silu(x.narrow(-1, 8, 8)) * x.narrow(-1, 0, 8),),  # the second half is activated
        lambda x: (F.silu(x.narrow(-1, 0, 8)) * x.narrow(-1, 0, 8),),
        lambda x: (F.silu(x.narrow(-1, 0, 4)) * x.narrow(-1, 4, 4),),  # quarters
        lambda x: (F.silu(x.chunk(4, -1)[0]) * x.chunk(4, -1)[1],),
        lambda x: (F.silu(x.narrow(-1, 0, 8)) * (x + 1).narrow(-1, 8, 8),),
        lambda x: (F.relu(x.narrow(-1, 0, 8)) * x.narrow(-1, 8, 8),),
        lambda x: (F.silu(x.narrow(-1, 0, 8)) * 2.0,),
    ],
)
def test_what_is_not_a_gated_activation_is_left(other: Callable[[Tensor], Any]) -> None:
    assert fused(other, torch.randn(9, 16)) == []


def test_a_rule_that_stumbles_over_a_graph_is_an_outcome() -> None:
    class Stumbling:
        name = "stumbling"

        def find(self, graph: fx.Graph) -> Iterator[Fusion]:
            raise IndexError("no such argument")
            yield

    graph, outcomes = rewritten(family("llama").graph, [Stumbling(), *rules()])
    first = outcomes[0]
    assert (first.rule, first.applied) == ("stumbling", False)
    assert first.reason == "matching could not go on: IndexError: no such argument"
    assert applied(outcomes) == APPLIED["llama"]
    assert ours(graph) == ours(rewritten(family("llama").graph, rules())[0])


def test_another_constant_is_verified_on_its_own() -> None:
    """The op is wrong for one of two epsilons only; shapes are equal."""

    def norms(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        first = CHOICES["rms_norm"].overload(x + y, weight, 1e-6, 0.0)
        return CHOICES["rms_norm"].overload(first + y, weight, 0.5, 0.0)

    def wrong(x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
        return CHOICES["add_rms_norm"].overload(x, y, weight, min(eps, 1e-6), offset)

    graph, _ = captured(norms, torch.randn(3, 8), torch.randn(3, 8), torch.randn(8))
    _, outcomes = rewritten(graph, [GRAPH_RULES["add_rms_norm"](with_overload("add_rms_norm", wrong))])
    assert [outcome.applied for outcome in outcomes] == [True, False]
