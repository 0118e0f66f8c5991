"""The one graph: captured once, the same for every size and pool, free of cache-sized copies, and right.

Dimensions of the cache are chosen so that nothing else in the graph has them.
"""

import gc
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PretrainedConfig, PreTrainedModel

import runtime
from graphs import capture as capture_module
from graphs.capture import Capture
from graphs.compile import compile_graph
from graphs.compiled_graph import Compiled, unit_file
from graphs.executor import CompiledExecutor, EagerExecutor
from models.step_inputs import StepInputs
from ops.providers import choose

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
Fill = Callable[..., StepInputs]
CheckSteps = Callable[[Any, Any], None]


def make(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@dataclass
class Case:
    """An adapted model, the graph of it, and what Dynamo and the compiler made."""

    adapted: Any
    captured: Capture
    compiled: Compiled
    executor: CompiledExecutor  # over a pool of 23 blocks
    code: str  # that calls the kernels of the first unit
    graph_breaks: dict[str, int]
    unique_graphs: int

    @property
    def model(self) -> PreTrainedModel:
        return self.adapted.model

    def over(self, num_blocks: int) -> CompiledExecutor:
        """The same graph over another pool."""
        return self.adapted.executor(self.compiled, num_blocks)


def compile_now(adapted: Any, optimize: str, folder: Path) -> Case:
    """Compile with nothing in the cache of graphs, which lies in `folder`."""
    captures: list[Capture] = []
    real = capture_module.capture

    def keep(*args: Any) -> Capture:
        captures.append(real(*args))
        return captures[-1]

    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module, "capture", keep)
        patch.setattr("graphs.compile_cache.graphs_folder", lambda: folder)
        compiled = compile_graph(adapted.source(optimize), progress=False)
    breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    (captured,) = captures
    assert compiled.graph is not None
    code = wrapper_code(unit_file(compiled.graph.folder, 0))
    return Case(adapted, captured, compiled, adapted.executor(compiled), code, breaks, graphs)


def wrapper_code(package: Path) -> str:
    """The C++ by which a unit calls its kernels."""
    with zipfile.ZipFile(package) as members:
        (name,) = (name for name in members.namelist() if name.endswith(".wrapper.cpp"))
        code = members.read(name).decode()
    return code[code.index("::run_impl(") :]


@pytest.fixture(scope="module")
def llama(adapted: Callable, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two layers, as one unit."""
    return compile_now(adapted(make(transformers.LlamaConfig(**SIZES))), "latency", tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def deep_llama(adapted: Callable, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Six layers, cut into units."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 6})
    return compile_now(adapted(make(config)), "startup", tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def no_recompile() -> Iterator[None]:
    """Make a recompilation an error of the call that caused it."""
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, C = prompt(1, 17), prompt(3, 4)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def hugging_face(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.compile
def test_one_graph_without_breaks(llama: Case) -> None:
    assert llama.compiled.num_graphs == llama.unique_graphs == 1
    assert llama.executor.num_recompiles == 0
    assert llama.graph_breaks == {}


@pytest.mark.compile
def test_the_golden_list_of_ops(llama: Case) -> None:
    nodes = [str(node.target) for node in llama.captured.graph.graph.nodes]
    ours = [name.removeprefix("pagegraph.") for name in nodes if name.startswith("pagegraph.")]
    attention = ["linear.cpu", "rope_write_kv.cpu", "paged_attention.cpu", "linear.cpu", "add_rms_norm.cpu"]
    layer = [*attention, "linear.cpu", "silu_and_mul.cpu", "linear.cpu", "add_rms_norm.cpu"]
    assert ours == ["rms_norm.cpu", *layer, *layer, "linear.cpu", "sample.reference"]


@pytest.mark.compile
def test_caches_and_inputs_are_graph_inputs_of_dynamic_sizes(llama: Case) -> None:
    examples = [node.meta["example_value"] for node in llama.captured.graph.graph.find_nodes(op="placeholder")]
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
def test_generated_code_neither_allocates_nor_copies_anything_of_the_size_of_a_cache(llama: Case) -> None:
    (call,) = llama.compiled.runner.program.calls
    first = len(StepInputs._fields)
    caches = {call.inputs.index(slot) for slot in range(first, first + 4)}
    arguments = re.findall(r"auto (\w+) = std::move\(inputs\[(\d+)\]\)", llama.code)
    names = {name for name, index in arguments if int(index) in caches}
    assert len(names) == 4
    sizes = re.findall(r"int64_t (\w+) = (\w+)_size\[0\]", llama.code)
    (symbol,) = {size for size, name in sizes if name in names}  # the number of blocks

    shapes = dict(re.findall(r"int64_t (\w+)\[\] = \{(.*)\}", llama.code))
    allocated = re.findall(r"aoti_torch_empty_strided\w*\(\w+, (\w+),", llama.code)
    assert allocated
    for shape in allocated:
        assert symbol not in re.findall(r"\w+", shapes[shape])
        assert f"{BLOCK_SIZE}L, {KV_HEADS}L, {HEAD_DIM}L" not in shapes[shape]
    allowed = r"std::move\(inputs|_size = |_size\[0\]|assert_size_stride|\.reset\(\);"
    calls = []
    for line in llama.code.splitlines():
        if comment := re.search(r"Original ATen: \[(.*)\]", line):
            ops = [name for name in comment[1].split(", ") if name.startswith("pagegraph.")]
        if names & set(re.findall(r"\w+", line)) and not re.search(allowed, line):
            assert "call_function(" in line, line
            calls += ops
    assert calls == ["pagegraph.rope_write_kv", "pagegraph.paged_attention"] * 2


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_compiled_equals_eager_at_every_step(llama: Case, check_steps: CheckSteps, steps: list[StepInputs]) -> None:
    check_steps(llama.executor, llama.adapted.eager())
    last = llama.executor.run(steps[-1])
    assert error(last.logits[0], hugging_face(llama.model, A)[-1]) < 1e-5
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("num_blocks", [11, 24, 200])
def test_a_pool_of_another_size_is_the_same_graph(llama: Case, num_blocks: int, check_steps: CheckSteps) -> None:
    compiled = llama.over(num_blocks)
    check_steps(compiled, llama.adapted.eager(num_blocks))
    assert compiled.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 8, 16, 17, 64])
def test_any_number_of_tokens(llama: Case, length: int, fill: Fill) -> None:
    tokens = prompt(length, length)
    outputs = llama.executor.run(fill([(tokens, 0, list(range(3, 20)))]))
    assert error(outputs.logits, hugging_face(llama.model, tokens)) < 1e-5
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 22])
def test_any_number_of_sequences_decoding_and_prefilling(llama: Case, rows: int, fill: Fill) -> None:
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
def test_a_table_as_wide_as_any_max_model_len(llama: Case, max_model_len: int, fill: Fill) -> None:
    width = -(-max_model_len // BLOCK_SIZE)
    compiled = llama.over(width + 1)
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
    llama: Case, rows: int, masked: int, previous: int, fill: Fill
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
def test_a_step_writes_its_own_slots_only(llama: Case, fill: Fill) -> None:
    cache = llama.adapted.cache(12)
    executor = llama.over(12)
    executor.use(cache)
    for tensor in (*cache.k, *cache.v):
        tensor[1:] = torch.nan
        tensor[0, 1:] = torch.nan
    outputs = executor.run(fill([(A[:7], 0, [6, 4])]))
    assert error(outputs.logits, hugging_face(llama.model, A[:7])) < 1e-5
    slots = {30, 31, 32, 33, 34, 20, 21}
    for tensor in (*cache.k, *cache.v):
        finite = tensor.flatten(0, 1).isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        assert set(finite) == slots | {0}
        assert (tensor[0, 0] == 0).all()


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_models_that_come_and_go_do_not_recompile(llama: Case, steps: list[StepInputs]) -> None:
    # transformers keeps a registry of living models, which every forward pass looks into.
    others = []
    for _ in range(3):
        others.append(make(transformers.LlamaConfig(**SIZES)))
        llama.executor.run(steps[0])
    llama.model.generate(torch.tensor([A]), max_new_tokens=2, do_sample=False)
    llama.executor.run(steps[0])
    others.clear()
    gc.collect()
    assert error(llama.executor.run(steps[0]).logits, hugging_face(llama.model, A[:1])) < 1e-5


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_settings_and_threads_of_the_process_do_not_recompile(
    llama: Case, steps: list[StepInputs], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    with torch.inference_mode():
        llama.executor.run(steps[0])
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(llama.executor.run, steps[0]).result()
    assert error(outputs.logits, hugging_face(llama.model, A[:1])) < 1e-5


@pytest.mark.compile
def test_a_reset_of_dynamo_does_not_lose_the_graph(llama: Case, steps: list[StepInputs]) -> None:
    before = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert error(llama.executor.run(steps[0]).logits, hugging_face(llama.model, A[:1])) < 1e-5
    assert counters["stats"]["unique_graphs"] == before
    assert llama.executor.num_recompiles == 0


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_two_graphs_in_the_process(llama: Case, deep_llama: Case, check_steps: CheckSteps) -> None:
    for case in (deep_llama, llama, deep_llama):
        check_steps(case.executor, case.adapted.eager())
    assert (llama.compiled.num_graphs, deep_llama.compiled.num_graphs) == (1, 1)
    assert llama.captured.graph is not deep_llama.captured.graph


@pytest.mark.compile
@pytest.mark.usefixtures("no_recompile")
def test_equal_layers_are_compiled_once(deep_llama: Case, steps: list[StepInputs], check_steps: CheckSteps) -> None:
    program = deep_llama.compiled.runner.program
    assert [call.unit for call in program.calls] == [0, 1, 1, 1, 1, 1, 2]  # the beginning, five layers, the end
    check_steps(deep_llama.executor, deep_llama.adapted.eager())
    last = deep_llama.executor.run(steps[-1])
    assert error(last.logits[0], hugging_face(deep_llama.model, A)[-1]) < 1e-5


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
