"""AdaptedModel, driven by hand-made steps over caches full of NaN, against Hugging Face eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from models import skeleton
from models.adapted import Adaptation, adapt
from models.rules.merged_linear import MergedLinear
from models.step_inputs import StepInputs, StepOutputs

BLOCK_SIZE = 4
NUM_BLOCKS = 16
CPU = torch.device("cpu")
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
    "first_k_dense_replace": 1,
}
SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 96,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **MLA}),
    # Two calls a layer that share K but not V.
    "diffllama": lambda: transformers.DiffLlamaConfig(**SIZES),
    # Layers of two head dims, and layers that attend over the K and V of an earlier one.
    "gemma4": lambda: transformers.Gemma4TextConfig(**{**SIZES, **SHARED_KV}, global_head_dim=16),
}


def make(config: PretrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of which no parameter is trivial: sinks and biases start as zeros, norms as ones."""
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.15)
    return model


class Exact(TorchFunctionMode):
    """float64 where transformers' norms, softmaxes and routers insist on float32, so that errors are not rounding.

    The grouped matrix product of the experts, which has no float64 kernel, becomes a loop over the groups.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        exact: dict[str, Any] = {
            name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
        }
        if func is torch._grouped_mm:
            ends = exact["offs"].tolist()
            pieces = zip([0, *ends], ends, args[1], strict=False)
            return torch.cat([args[0][start:end] @ weight for start, end, weight in pieces])
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **exact)


class Served:
    """A model beside its adapted copy and caches that are NaN but for the first slot of the null block."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype = torch.float64) -> None:
        self.model = make(config, dtype)
        self.adaptation: Adaptation = adapt(skeleton.share(self.model), CPU)
        self.adaptation.materialise(CPU, own=False)
        source = self.model.state_dict()
        for name, destination in self.adaptation.destinations().items():
            destination.copy_(source[name])
        caches = self.adaptation.report.plan.caches
        self.k = [self._poisoned(site.num_kv_heads, site.k_dim, dtype) for site in caches]
        self.v = [self._poisoned(site.num_kv_heads, site.v_dim, dtype) for site in caches]

    @staticmethod
    def _poisoned(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, heads, dim), torch.nan, dtype=dtype)
        cache[0, 0] = 0
        return cache

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        with Exact():
            return self.adaptation.module(inputs, self.k, self.v)

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> Tensor:
        with Exact():
            return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def step(
    chunks: list[tuple[list[int], int, list[int]]],
    *,
    logits: list[int] | None = None,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    prev_row: dict[int, int] | None = None,
    prev_tokens: tuple[int, ...] = (0,),
) -> StepInputs:
    """Greedy inputs for chunks of (tokens of the chunk, its first position, block ids of the sequence).

    logits: rows of T, all of them by default. Padding comes after the real rows and tokens.
    """
    lengths = [len(tokens) for tokens, _, _ in chunks]
    ids = [token for tokens, _, _ in chunks for token in tokens]
    positions = [start + i for tokens, start, _ in chunks for i in range(len(tokens))]
    slots = [
        blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for tokens, start, blocks in chunks
        for p in range(start, start + len(tokens))
    ]
    width = max(-(-(start + len(tokens)) // BLOCK_SIZE) for tokens, start, _ in chunks)
    table = [(blocks + [0] * width)[:width] for _, _, blocks in chunks] + [[0] * width] * padding_rows
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = list(range(len(ids))) if logits is None else logits
    feedback = [(prev_row or {}).get(i, -1) for i in range(len(ids))] + [-1] * padding_tokens
    pad = [0] * padding_tokens
    return StepInputs(
        input_ids=torch.tensor(ids + pad),
        prev_row=torch.tensor(feedback),
        prev_tokens=torch.tensor(prev_tokens),
        positions=torch.tensor(positions + pad),
        slot_mapping=torch.tensor([slots + pad]),
        block_table=torch.tensor([table], dtype=torch.int32),
        seq_lens=torch.tensor([s + n for (_, s, _), n in zip(chunks, lengths, strict=True)] + [1] * padding_rows).int(),
        # A padding sequence owns one padding token, as far as there are any.
        query_start_loc=torch.tensor(ends + [ends[-1] + min(i + 1, padding_tokens) for i in range(padding_rows)]).int(),
        logits_indices=torch.tensor(rows),
        temperature=torch.zeros(len(rows)),
        top_k=torch.zeros(len(rows), dtype=torch.int32),
        top_p=torch.ones(len(rows)),
        min_p=torch.zeros(len(rows)),
        noise_key=torch.zeros(len(rows), dtype=torch.int64),
        noise_position=torch.zeros(len(rows), dtype=torch.int64),
        masked_ids=torch.full((len(rows), 1), -1, dtype=torch.int32),
    )


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Of three sequences: blocks neither in order nor adjacent, and steps that mix prefill chunks with decode; the last is
# a decode of all. A window of 5 ends inside a chunk, between chunks and in decode.
SEQUENCES = {"a": (prompt(1, 13), [9, 3, 12, 5]), "b": (prompt(2, 10), [2, 14, 7]), "c": (prompt(3, 6), [11, 4])}
STEPS = [
    {"a": (0, 5), "b": (0, 7)},
    {"b": (7, 8), "a": (5, 11), "c": (0, 3)},
    {"c": (3, 5), "b": (8, 9), "a": (11, 12)},
    {"a": (12, 13), "b": (9, 10), "c": (5, 6)},
]


def chunk(name: str, start: int, stop: int) -> tuple[list[int], int, list[int]]:
    tokens, blocks = SEQUENCES[name]
    return tokens[start:stop], start, blocks


def serve_chunked(served: Served) -> dict[str, Tensor]:
    """Run STEPS and collect the logits of every token of every sequence."""
    found: dict[str, list[Tensor]] = {name: [] for name in SEQUENCES}
    for ranges in STEPS:
        outputs = served.run(step([chunk(name, *span) for name, span in ranges.items()]))
        pieces = outputs.logits.split([stop - start for start, stop in ranges.values()])
        for name, piece in zip(ranges, pieces, strict=True):
            found[name].append(piece)
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def total(*tensors: Tensor) -> list[Tensor]:
    """Copies, for comparison to the bit later, NaN included."""
    return [tensor.clone().view(torch.int64) for tensor in tensors]


@pytest.fixture(scope="module")
def llama() -> Served:
    return Served(CONFIGS["llama"]())


@pytest.mark.parametrize("family", CONFIGS)
def test_chunked_prefill_mixed_with_decode_equals_hugging_face(family: str) -> None:
    served = Served(CONFIGS[family]())
    for name, logits in serve_chunked(served).items():
        assert relative_error(logits, served.expected(SEQUENCES[name][0])) < 1e-12, name


def test_the_layout_of_a_step_does_not_matter(llama: Served) -> None:
    tokens, blocks = SEQUENCES["a"]
    whole = llama.run(step([(tokens, 0, blocks)])).logits
    one_by_one = [llama.run(step([([token], i, [1, 6, 8, 10])])).logits for i, token in enumerate(tokens)]
    assert relative_error(torch.cat(one_by_one), whole) < 1e-12


def test_tokens_are_the_argmax_of_the_rows_asked_for_and_rows_may_repeat(llama: Served) -> None:
    chunks = [chunk("a", 0, 5), chunk("b", 0, 7)]
    every = llama.run(step(chunks)).logits
    rows = [4, 11, 4, 0]
    outputs = llama.run(step(chunks, logits=rows))
    assert torch.equal(outputs.tokens, every[rows].argmax(-1))
    assert relative_error(outputs.logits, every[rows]) < 1e-12
    assert torch.equal(outputs.logits[0], outputs.logits[2])


def test_sampling_parameters_reach_the_op_in_their_places(llama: Served) -> None:
    chunks = [chunk("a", 0, 5)]
    plain = step(chunks, logits=[4, 4, 4, 4, 4])
    best, second = llama.run(plain).logits[0].topk(2).indices.tolist()
    masked = plain.masked_ids.clone()
    masked[1, 0] = best
    hot = torch.tensor([0.0, 0.0, 50.0, 50.0, 50.0])
    inputs = plain._replace(
        masked_ids=masked,
        temperature=hot,
        top_k=torch.tensor([0, 0, 1, 0, 0]).int(),
        min_p=torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]),
        noise_key=torch.full((5,), 7),
        noise_position=torch.full((5,), 5),
    )
    tokens = llama.run(inputs).tokens.tolist()
    assert tokens[:4] == [best, second, best, best]
    assert tokens[4] == llama.run(inputs).tokens[4]
    others = {llama.run(inputs._replace(noise_key=torch.full((5,), key))).tokens[4].item() for key in range(8)}
    assert len(others) > 2


def test_prev_row_feeds_back_the_tokens_of_the_previous_step(llama: Served) -> None:
    (a, blocks_a), (b, blocks_b) = SEQUENCES["a"], SEQUENCES["b"]
    first = llama.run(step([(a[:5], 0, blocks_a), (b[:7], 0, blocks_b)], logits=[4, 11]))
    next_a, next_b = first.tokens.tolist()
    # In the next step b comes first, a third sequence has a chunk, and its ids hold garbage where tokens are fed back.
    third = chunk("c", 0, 2)
    fed = step(
        [([0], 7, blocks_b), third, ([0], 5, blocks_a)],
        prev_row={0: 1, 3: 0},
        prev_tokens=(next_a, next_b),
    )
    given = step([([next_b], 7, blocks_b), third, ([next_a], 5, blocks_a)])
    assert torch.equal(llama.run(fed).logits, llama.run(given).logits)
    expected = torch.stack([llama.expected([*b[:7], next_b])[-1], llama.expected([*a[:5], next_a])[-1]])
    assert relative_error(llama.run(fed).logits[[0, 3]], expected) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_padding_changes_nothing_but_the_null_slot(family: str) -> None:
    served = Served(CONFIGS[family]())
    for ranges in STEPS[:-1]:
        served.run(step([chunk(name, *span) for name, span in ranges.items()]))
    decode = [chunk(name, *span) for name, span in STEPS[-1].items()]
    before = total(*served.k, *served.v)
    clean = served.run(step(decode))
    written = total(*served.k, *served.v)
    for cache, old in zip((*served.k, *served.v), before, strict=True):
        cache.copy_(old.view(torch.float64))
    padded = served.run(step(decode, padding_rows=1, padding_tokens=1, logits=[0, 1, 2, 3]))
    assert padded.logits.isfinite().all()
    assert relative_error(padded.logits[:3], clean.logits) < 1e-12
    assert torch.equal(padded.tokens[:3], clean.tokens)
    own = {blocks[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE for _, start, blocks in decode}
    for cache, old, new in zip((*served.k, *served.v), before, written, strict=True):
        bits = cache.view(torch.int64).flatten(0, 1)
        changed = (bits != old.flatten(0, 1)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == own | {0}
        assert torch.allclose(cache.flatten(0, 1)[sorted(own)], new.view(torch.float64).flatten(0, 1)[sorted(own)])
        assert cache[0, 0].isfinite().all()
        assert cache[0, 1:].isnan().all()


def test_padding_tokens_without_a_padding_row(llama: Served) -> None:
    chunks = [chunk("a", 0, 5), chunk("b", 0, 7)]
    clean = llama.run(step(chunks)).logits
    padded = llama.run(step(chunks, padding_tokens=4))
    assert relative_error(padded.logits, clean) < 1e-12


def test_the_step_is_let_go_after_a_forward(llama: Served) -> None:
    shared = llama.adaptation.module._step
    llama.run(step([chunk("a", 0, 5)]))
    assert shared.inputs is None
    assert not shared.k_caches
    assert not shared.v_caches
    assert shared.ordinal == 0
    merged = [module for module in llama.adaptation.module.modules() if isinstance(module, MergedLinear)]
    assert len(merged) == 4
    assert all(module._input is None and module._output is None for module in merged)


@pytest.mark.parametrize("failing", ["v_proj", "o_proj", "up_proj"])
def test_a_forward_that_raised_does_not_spoil_the_next(failing: str) -> None:
    served = Served(CONFIGS["llama"]())
    inputs = step([chunk("a", 0, 5)])
    expected = served.run(inputs)

    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    first = next(module for name, module in served.adaptation.module.named_modules() if name.endswith(failing))
    hook = first.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        served.run(inputs)
    hook.remove()
    assert torch.equal(served.run(inputs).logits, expected.logits)
    assert served.adaptation.module._step.inputs is None


def test_two_adapted_copies_of_one_model_do_not_meet() -> None:
    one, other = Served(CONFIGS["qwen3"]()), Served(CONFIGS["qwen3"]())
    assert one.adaptation.module._step is not other.adaptation.module._step
    one.run(step([chunk("a", 0, 5)]))
    assert all(cache[1:].isnan().all() for cache in (*other.k, *other.v))


def test_materialise_for_our_own_leaves_the_shared_model_alone() -> None:
    model = make(CONFIGS["llama"](), torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=True, dtype=torch.bfloat16)
    for destination in adaptation.destinations().values():
        assert destination.dtype == torch.bfloat16
        destination.fill_(torch.nan)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == "eager"
