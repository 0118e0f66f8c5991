"""Adapted tiny models and steps for them, and graphs of the tested families, traced on fake tensors."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphs.capture import Capture, capture
from graphs.compile import Source
from graphs.compiled_graph import Compiled
from graphs.executor import CompiledExecutor, EagerExecutor, Executor
from graphs.fusion import GraphRule
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from graphs.rules import GRAPH_RULES
from models import skeleton
from models.adapted import AdaptedModel, adapt, named_tensors
from models.report import RewriteReport
from models.step_inputs import StepInputs
from ops.cpu.build import BuildError, find_compiler

CPU = torch.device("cpu")
BLOCK_SIZE = 5
Chunk = tuple[list[int], int, list[int]]  # tokens, first position, block ids of the whole sequence
SCRIPT = Path(__file__).with_name("fake_cuda.py")
ROOT = SCRIPT.parents[2]


@dataclass
class Adapted:
    """A model, the adapted copy of it that shares its weights, and what runs that over pools of its own."""

    model: PreTrainedModel
    module: AdaptedModel
    report: RewriteReport

    @property
    def rules(self) -> list[GraphRule]:
        return [make(self.report.providers) for make in GRAPH_RULES.values()]

    def state(self) -> dict[str, Tensor]:
        return dict(named_tensors(self.module))

    def cache(self, num_blocks: int = 23) -> KVCache:
        copies = self.report.providers["copy_blocks"]
        return KVCache(self.report.plan, num_blocks, BLOCK_SIZE, torch.float32, CPU, copies)

    def source(self, optimize: str = "startup") -> Source:
        return Source(self.module, self.report, self.cache(), CPU, self.rules, optimize)

    def capture(self) -> Capture:
        return capture(self.module, self.cache(), CPU, self.rules)

    def eager(self, num_blocks: int = 23) -> EagerExecutor:
        return EagerExecutor(self.module, self.cache(num_blocks))

    def executor(self, compiled: Compiled, num_blocks: int = 23) -> CompiledExecutor:
        return CompiledExecutor(compiled, self.cache(num_blocks), self.state)


def adapted(model: PreTrainedModel) -> Adapted:
    """See Adapted. The model stays as it is."""
    adaptation = adapt(skeleton.share(model), CPU)
    adaptation.materialise(CPU, own=False)
    adaptation.copy_from(model.state_dict())
    return Adapted(model, adaptation.module, adaptation.report)


@pytest.fixture(scope="session", name="adapted")
def adapted_fixture() -> Callable[[PreTrainedModel], Adapted]:
    """`adapted(model)`: see Adapted."""
    return adapted


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


@pytest.fixture(scope="session", name="fill")
def fill_fixture() -> Callable[..., StepInputs]:
    """`fill(chunks, ...)`: the inputs of a step; see there."""
    return fill


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = prompt(1, 17), prompt(2, 8), prompt(3, 4)
TABLES = {"a": [9, 3, 7, 5], "b": [2, 8], "c": [10]}


@pytest.fixture(scope="session")
def steps() -> list[StepInputs]:
    """Chunked prefill, mixed with decode, alone and together; ends with decodes of three sequences, of one, of one row.

    The last step computes the last of A's 17 tokens.
    """
    return [
        fill([(A[:1], 0, TABLES["a"])]),
        fill([(A[1:9], 1, TABLES["a"]), (B[:5], 0, TABLES["b"])], rows=[12]),
        fill([(B[5:6], 5, TABLES["b"]), (A[9:14], 9, TABLES["a"]), (C[:2], 0, TABLES["c"])], masked=3),
        fill([(C[2:3], 2, TABLES["c"]), (A[14:15], 14, TABLES["a"]), (B[6:7], 6, TABLES["b"])], rows=[0, 1, 2, 0, 0]),
        fill([(A[15:16], 15, TABLES["a"]), (B[7:8], 7, TABLES["b"])], fed_back={1: 2}, previous=(5, 6, B[7])),
        fill([(A[16:17], 16, TABLES["a"])], previous=(1, 2)),
    ]


@pytest.fixture(scope="session")
def check_steps(steps: list[StepInputs]) -> Callable[[Executor, Executor], None]:
    """`check_steps(found, expected)`: run all steps by both; each must give the same tokens, and logits to 1e-5."""

    def check(found: Executor, expected: Executor) -> None:
        for inputs in steps:
            one, other = found.run(inputs), expected.run(inputs)
            assert ((one.logits - other.logits).abs().max() / other.logits.abs().max()).item() < 1e-5
            assert torch.equal(one.tokens, other.tokens)

    return check


@pytest.fixture(scope="session")
def traced(
    families: list[str], tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """`traced(device, family)`: its `Trace` (see fake_cuda.py) on "cpu" or "cuda", one process for all."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("configs")
    for family in families:
        config = copy.deepcopy(tiny_model(family).config)
        config.num_hidden_layers = 2  # one of each kind, where there are two
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        config.save_pretrained(folder / family)
    # Not interpreted: a Triton kernel then has the provider's place in CUDA graphs, and none on a CPU.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    @cache
    def run(device: str) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), device, *(str(folder / family) for family in families)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(device: str, family: str) -> dict[str, Any]:
        trace = run(device)[family]
        assert "error" not in trace, trace["error"]
        return trace

    return get
