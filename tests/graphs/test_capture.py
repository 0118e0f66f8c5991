"""The one graph: captured once, the same for every size and pool, free of cache-sized copies, and right.

Dimensions of the cache are chosen so that nothing else in the graph has them.
"""

import copy
import gc
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PretrainedConfig, PreTrainedModel

import runtime
from graphs import capture
from graphs.executor import CompiledExecutor, EagerExecutor
from graphs.fusion import GraphRule
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from graphs.rules import GRAPH_RULES
from models import skeleton
from models.adapted import AdaptedModel, adapt
from models.step_inputs import StepInputs, StepOutputs
from ops.providers import choose, select

CPU = torch.device("cpu")
BLOCK_SIZE, KV_HEADS, HEAD_DIM = 5, 3, 26
SIZES = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2 * KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Chunk = tuple[list[int], int, list[int]]  # tokens, first position, block ids of the whole sequence


def make(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def adapted(model: PreTrainedModel) -> AdaptedModel:
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=False)
    source = model.state_dict()
    for name, destination in adaptation.destinations().items():
        destination.copy_(source[name])
    return adaptation.module


def graph_rules() -> list[GraphRule]:
    choices = choose(CPU, {}, torch.float32)
    return [make_rule(choices) for make_rule in GRAPH_RULES.values()]


def make_cache(module: AdaptedModel, num_blocks: int) -> KVCache:
    return KVCache(module.plan, num_blocks, BLOCK_SIZE, torch.float32, CPU, select("copy_blocks", CPU))


@dataclass
class Compiled:
    """A module, the graph of it over the first pool, and what the compiler made."""

    model: PreTrainedModel
    module: AdaptedModel
    cache: KVCache
    executor: CompiledExecutor
    code: str
    graph_breaks: dict[str, int]
    unique_graphs: int

    def over(self, cache: KVCache) -> CompiledExecutor:
        """The same graph over another pool."""
        other = copy.copy(self.executor)
        other._cache = cache
        return other


def compile_now(config: PretrainedConfig, num_blocks: int) -> Compiled:
    model = make(config)
    module = adapted(model)
    cache = make_cache(module, num_blocks)
    counters.clear()
    codes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLowering, "save_output_code", codes.append)
        executor = CompiledExecutor(module, cache, CPU, graph_rules(), progress=False)
    assert len(codes) == 1
    breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    return Compiled(model, module, cache, executor, codes[0], breaks, graphs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    with pytest.MonkeyPatch.context() as patch:
        # Empty, so that the code is generated and not found.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield compile_now(transformers.LlamaConfig(**SIZES), num_blocks=23)


@pytest.fixture
def no_recompile() -> Iterator[None]:
    """Make a recompilation an error of the call that caused it."""
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def fill(
    chunks: list[Chunk],
    *,
    rows: list[int] | None = None,
    width: int | None = None,
    masked: int = 1,
    fed_back: dict[int, int] | None = None,
    previous: tuple[int, ...] = (0,),
) -> StepInputs:
    """Greedy inputs in an arena; logits of all tokens unless `rows` of T are named; `fed_back` maps T to R."""
    ids = [token for tokens, _, _ in chunks for token in tokens]
    rows = list(range(len(ids))) if rows is None else rows
    width = width or max(-(-(start + len(tokens)) // BLOCK_SIZE) for tokens, start, _ in chunks)
    sizes = StepSizes(len(ids), len(chunks), width, len(rows), masked=masked)
    arena = InputArena(CPU, torch.tensor(previous))
    inputs = arena.carve(sizes)
    for tensor in inputs[:2] + inputs[3:]:
        tensor.zero_()
    inputs.input_ids[:] = torch.tensor(ids)
    inputs.prev_row.fill_(-1)
    for token, row in (fed_back or {}).items():
        inputs.prev_row[token] = row
    inputs.logits_indices[:] = torch.tensor(rows)
    inputs.top_p.fill_(1)
    inputs.masked_ids.fill_(-1)
    end = 0
    for index, (tokens, start, blocks) in enumerate(chunks):
        positions = torch.arange(start, start + len(tokens))
        table = torch.tensor((blocks + [0] * width)[:width])
        span = slice(end, end := end + len(tokens))
        inputs.positions[span] = positions
        inputs.slot_mapping[0, span] = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        inputs.block_table[0, index] = table
        inputs.seq_lens[index] = start + len(tokens)
        inputs.query_start_loc[index + 1] = end
    return arena.upload()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = prompt(1, 17), prompt(2, 8), prompt(3, 4)
TABLES = {"a": [9, 3, 7, 5], "b": [2, 8], "c": [10]}
# Chunked prefill, mixed with decode, alone and together; ends with decodes of three sequences, of one, and of one row.
STEPS: list[StepInputs] = [
    fill([(A[:1], 0, TABLES["a"])]),
    fill([(A[1:9], 1, TABLES["a"]), (B[:5], 0, TABLES["b"])], rows=[12]),
    fill([(B[5:6], 5, TABLES["b"]), (A[9:14], 9, TABLES["a"]), (C[:2], 0, TABLES["c"])], masked=3),
    fill([(C[2:3], 2, TABLES["c"]), (A[14:15], 14, TABLES["a"]), (B[6:7], 6, TABLES["b"])], rows=[0, 1, 2, 0, 0]),
    fill([(A[15:16], 15, TABLES["a"]), (B[7:8], 7, TABLES["b"])], fed_back={1: 2}, previous=(5, 6, B[7])),
    fill([(A[16:17], 16, TABLES["a"])], previous=(1, 2)),
]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_equal(found: StepOutputs, expected: StepOutputs) -> None:
    assert error(found.logits, expected.logits) < 1e-5
    assert torch.equal(found.tokens, expected.tokens)


@torch.no_grad()
def hugging_face(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.compile
def test_one_graph_without_breaks(llama: Compiled) -> None:
    assert len(llama.executor.graph.graphs) == llama.unique_graphs == 1
    assert llama.executor.num_recompiles == 0
    assert llama.graph_breaks == {}


@pytest.mark.compile
def test_the_golden_list_of_ops(llama: Compiled) -> None:
    nodes = [str(node.target) for node in llama.executor.graph.graphs[0].graph.nodes]
    ours = [name.removeprefix("pagegraph.") for name in nodes if name.startswith("pagegraph.")]
    attention = ["linear.cpu", "rope_write_kv.cpu", "paged_attention.cpu", "linear.cpu", "add_rms_norm.cpu"]
    layer = [*attention, "linear.cpu", "silu_and_mul.cpu", "linear.cpu", "add_rms_norm.cpu"]
    assert ours == ["rms_norm.cpu", *layer, *layer, "linear.cpu", "sample.reference"]


@pytest.mark.compile
def test_caches_and_inputs_are_graph_inputs_of_dynamic_sizes(llama: Compiled) -> None:
    (graph,) = llama.executor.graph.graphs
    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = [[dim if isinstance(dim, int) else str(dim) for dim in e.shape] for e in examples if isinstance(e, Tensor)]
    caches = [shape for shape in shapes if shape[1:] == [BLOCK_SIZE, KV_HEADS, HEAD_DIM]]
    assert len(caches) == 4
    assert all(isinstance(shape[0], str) and shape == caches[0] for shape in caches)
    dynamic = [shape for shape in shapes if any(isinstance(dim, str) for dim in shape)]
    assert len(dynamic) == 4 + len(StepInputs._fields)
    # T, R, B, W, B + 1, L, M and the number of blocks; only the group dimension of slots and table is constant.
    assert len({dim for shape in dynamic for dim in shape if isinstance(dim, str)}) == 8
    assert sorted(len(shape) for shape in dynamic if shape[0] == 1) == [2, 3]


@pytest.mark.compile
def test_generated_code_neither_allocates_nor_copies_anything_of_the_size_of_a_cache(llama: Compiled) -> None:
    strides = f"({BLOCK_SIZE * KV_HEADS * HEAD_DIM}, {KV_HEADS * HEAD_DIM}, {HEAD_DIM}, 1)"
    declared = re.findall(
        rf"assert_size_stride\((\w+), \(([su]\d+), {BLOCK_SIZE}, {KV_HEADS}, {HEAD_DIM}\), {re.escape(strides)}",
        llama.code,
    )
    assert len(declared) == 4
    names = {name for name, _ in declared}
    (symbol,) = {symbol for _, symbol in declared}
    for line in llama.code.splitlines():
        used = re.findall(r"\w+", line)
        if re.search(r"empty|alloc|clone|zeros|new_", line):
            assert symbol not in used, line
            assert str(BLOCK_SIZE * KV_HEADS * HEAD_DIM) not in used, line
        if names & set(used) and "torch.ops." in line:
            assert re.search(r"torch\.ops\.pagegraph\.(rope_write_kv|paged_attention)\.cpu", line), line
        assert not ("copy_" in line and (names & set(used) or symbol in used)), line
    kernels = [line for line in llama.code.splitlines() if re.match(r"\s+cpp_fused", line)]
    assert kernels
    assert not any(names & set(re.findall(r"\w+", line)) for line in kernels)


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_compiled_equals_eager_at_every_step(llama: Compiled) -> None:
    eager = EagerExecutor(llama.module, make_cache(llama.module, 23))
    for inputs in STEPS:
        assert_equal(llama.executor.run(inputs), eager.run(inputs))
    last = llama.executor.run(STEPS[-1])
    assert error(last.logits[0], hugging_face(llama.model, A)[-1]) < 1e-5
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("num_blocks", [11, 24, 200])
def test_a_pool_of_another_size_is_the_same_graph(llama: Compiled, num_blocks: int) -> None:
    compiled = llama.over(make_cache(llama.module, num_blocks))
    eager = EagerExecutor(llama.module, make_cache(llama.module, num_blocks))
    for inputs in STEPS:
        assert_equal(compiled.run(inputs), eager.run(inputs))
    assert compiled.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 8, 16, 17, 64])
def test_any_number_of_tokens(llama: Compiled, length: int) -> None:
    tokens = prompt(length, length)
    outputs = llama.executor.run(fill([(tokens, 0, list(range(3, 20)))]))
    assert error(outputs.logits, hugging_face(llama.model, tokens)) < 1e-5
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 22])
def test_any_number_of_sequences_decoding_and_prefilling(llama: Compiled, rows: int) -> None:
    tokens = [prompt(seed, 3) for seed in range(rows)]
    outputs = llama.executor.run(fill([(ids[:2], 0, [1 + i]) for i, ids in enumerate(tokens)]))
    assert outputs.logits.shape == (2 * rows, 96)
    outputs = llama.executor.run(fill([(ids[2:], 2, [1 + i]) for i, ids in enumerate(tokens)]))
    expected = torch.stack([hugging_face(llama.model, ids)[-1] for ids in tokens])
    assert error(outputs.logits, expected) < 1e-5
    assert torch.equal(outputs.tokens, expected.argmax(-1))


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("max_model_len", [15, 16, 105, 510])
def test_a_table_as_wide_as_any_max_model_len(llama: Compiled, max_model_len: int) -> None:
    width = -(-max_model_len // BLOCK_SIZE)
    compiled = llama.over(make_cache(llama.module, width + 1))
    tokens = prompt(7, max_model_len)
    table = list(range(width, 0, -1))
    compiled.run(fill([(tokens[:-1], 0, table)], rows=[0], width=width))
    found = compiled.run(fill([(tokens[-1:], max_model_len - 1, table)], width=width))
    assert error(found.logits, hugging_face(llama.model, tokens)[-1:]) < 1e-5
    short = compiled.run(fill([(A[:3], 0, [2])], width=width))  # no stale column of the wide table is seen
    assert error(short.logits, hugging_face(llama.model, A[:3])) < 1e-5


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize(("rows", "masked", "previous"), [(1, 1, 1), (5, 1, 2), (2, 7, 4), (12, 3, 1)])
def test_any_number_of_sampled_rows_masked_ids_and_previous_tokens(
    llama: Compiled, rows: int, masked: int, previous: int
) -> None:
    indices = [(3 * i) % 4 for i in range(rows)]
    inputs = fill([(C, 0, [4])], rows=indices, masked=masked, previous=tuple(range(previous)))
    plain = llama.executor.run(inputs)
    expected = hugging_face(llama.model, C)[indices]
    assert error(plain.logits, expected) < 1e-5
    assert torch.equal(plain.tokens, expected.argmax(-1))
    best = expected.topk(masked + 1).indices
    inputs.masked_ids[:] = best[:, :masked]
    assert torch.equal(llama.executor.run(inputs).tokens, best[:, masked])


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_a_step_writes_its_own_slots_only(llama: Compiled) -> None:
    cache = make_cache(llama.module, 12)
    for tensor in (*cache.k, *cache.v):
        tensor[1:] = torch.nan
        tensor[0, 1:] = torch.nan
    outputs = llama.over(cache).run(fill([(A[:7], 0, [6, 4])]))
    assert error(outputs.logits, hugging_face(llama.model, A[:7])) < 1e-5
    slots = {30, 31, 32, 33, 34, 20, 21}
    for tensor in (*cache.k, *cache.v):
        finite = tensor.flatten(0, 1).isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        assert set(finite) == slots | {0}
        assert (tensor[0, 0] == 0).all()


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_models_that_come_and_go_do_not_recompile(llama: Compiled) -> None:
    # transformers keeps a registry of living models, which every forward pass looks into.
    others = []
    for _ in range(3):
        others.append(make(transformers.LlamaConfig(**SIZES)))
        llama.executor.run(STEPS[0])
    llama.model.generate(torch.tensor([A]), max_new_tokens=2, do_sample=False)
    llama.executor.run(STEPS[0])
    others.clear()
    gc.collect()
    assert error(llama.executor.run(STEPS[0]).logits, hugging_face(llama.model, A[:1])) < 1e-5


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_settings_and_threads_of_the_process_do_not_recompile(llama: Compiled, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    with torch.inference_mode():
        llama.executor.run(STEPS[0])
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(llama.executor.run, STEPS[0]).result()
    assert error(outputs.logits, hugging_face(llama.model, A[:1])) < 1e-5


@pytest.mark.compile
def test_a_reset_of_dynamo_does_not_lose_the_graph(llama: Compiled) -> None:
    before = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert error(llama.executor.run(STEPS[0]).logits, hugging_face(llama.model, A[:1])) < 1e-5
    assert counters["stats"]["unique_graphs"] == before
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
def test_another_graph_in_the_process_does_not_recompile_the_first(llama: Compiled) -> None:
    config = transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 1}, sliding_window=4, attn_logit_softcapping=5.0
    )
    other = make(config)
    module = adapted(other)
    cache = make_cache(module, 30)
    executor = CompiledExecutor(module, cache, CPU, graph_rules(), progress=False)
    before = counters["stats"]["unique_graphs"]
    eager = EagerExecutor(module, make_cache(module, 30))
    eager_llama = EagerExecutor(llama.module, make_cache(llama.module, 23))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for inputs in STEPS:
            assert_equal(executor.run(inputs), eager.run(inputs))
        for inputs in STEPS:
            assert_equal(llama.executor.run(inputs), eager_llama.run(inputs))
    assert counters["stats"]["unique_graphs"] == before
    assert (len(executor.graph.graphs), len(llama.executor.graph.graphs)) == (1, 1)
    assert executor.graph.graphs[0] is not llama.executor.graph.graphs[0]


def test_without_a_compiler_there_is_one_warning_and_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(CPU, {}, torch.float32)  # builds the C++ ops, which would warn too, before the compiler is gone
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = make(transformers.LlamaConfig(**SIZES))
    with (
        warnings.catch_warnings(record=True) as warned,
        runtime.compile(model, backend="inductor", block_size=BLOCK_SIZE, num_blocks=23, progress=False) as engine,
    ):
        assert isinstance(engine.runner.executor, EagerExecutor)
        params = runtime.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        outputs = engine.generate([A, C], params, progress=False)
    messages = [str(warning.message) for warning in warned]
    (message,) = [message for message in messages if "no-such-compiler" in message]
    assert "running uncompiled" in message
    for ids, output in zip((A, C), outputs, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, len(ids) :].tolist()


def test_compiled_files_last_unless_the_user_chose_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    for before, after in (
        (default_cache_dir(), str(tmp_path / "inductor")),
        (str(tmp_path / "mine"), str(tmp_path / "mine")),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        capture.use_lasting_compiler_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after
