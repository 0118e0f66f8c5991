"""From a model to its compiled graph: what the cache saves, and what is done where it, or inductor, cannot help."""

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import runtime
from graphs import compile_cache
from graphs.compile import compile_graph, find_compiled
from ops.cache_folder import cache_folder
from ops.cpu.build import find_compiler
from ops.cpu.library import problem
from runtime import SamplingParams

ROOT = Path(__file__).parents[2]
PROMPT, GREEDY = [5, 17, 99, 3, 40, 41, 7], SamplingParams(max_tokens=6, temperature=0)
Adapt = Callable[[PreTrainedModel], Any]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, list[int], int], list[int]]
CheckSteps = Callable[[Any, Any], None]
# Serves a model from a folder; prints tokens, how many graphs the engine and Dynamo made, and if inductor was imported.
SCRIPT = """
import json, sys
import runtime
with runtime.compile(sys.argv[1], block_size=4, num_blocks=40, progress=False) as engine:
    params = runtime.SamplingParams(max_tokens=6, temperature=0)
    (output,) = engine.generate([json.loads(sys.argv[2])], params, progress=False)
    graphs = engine.runner.compiled.num_graphs
inductor = "torch._inductor.compile_fx" in sys.modules
from torch._dynamo.utils import counters
graphs += counters["stats"]["unique_graphs"]
print(json.dumps({"tokens": output.outputs[0].token_ids, "graphs": graphs, "inductor": inductor}))
"""
# It says which version it is, so that the C++ ops are found, notes how it was run, and compiles nothing.
ONLY_A_VERSION = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *--version) exec {compiler} "$@";; esac
exit 1
"""


def with_other_weights(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    return other


@pytest.mark.compile
def test_the_second_process_compiles_nothing(
    tiny_model: TinyModel, hf_greedy: Greedy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with the same structure, from a folder, with other weights and another pool."""
    if (reason := problem()) is not None:
        pytest.skip(reason)
    found = shutil.which(find_compiler().command[0])
    assert found is not None
    cache, inductor, tools, runs = (tmp_path / name for name in ("cache", "inductor", "tools", "runs"))
    for folder in (cache, tools):
        folder.mkdir()
    (cache / "cpu_ops").symlink_to((cache_folder() / "cpu_ops").resolve())
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
    model = tiny_model("llama", num_hidden_layers=1)
    with runtime.compile(model, block_size=4, num_blocks=30, progress=False) as engine:
        assert engine.runner.compiled.num_graphs == 1
        (output,) = engine.generate([PROMPT], GREEDY, progress=False)
    assert output.outputs[0].token_ids == hf_greedy(model, PROMPT, 6)

    other = with_other_weights(model)
    other.save_pretrained(tmp_path / "model")
    fake = tools / Path(found).name
    fake.write_text(ONLY_A_VERSION.format(log=runs, compiler=found))
    fake.chmod(0o755)
    shutil.rmtree(inductor)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"tokens": hf_greedy(other, PROMPT, 6), "graphs": 0, "inductor": False}
    assert {line.split()[-1] for line in runs.read_text().splitlines()} == {"--version"}
    assert list(inductor.glob("*")) == []


def test_a_second_compilation_finds_the_first(
    adapted: Adapt, tiny_model: TinyModel, check_steps: CheckSteps, uncompiled: list[fx.GraphModule]
) -> None:
    first = adapted(tiny_model("llama"))
    assert find_compiled(first.source()) is None
    assert compile_graph(first.source(), progress=False).num_graphs == len(uncompiled) == 1
    (entry,) = compile_cache.entries()
    assert entry.key == first.source().key
    assert entry.description.startswith("LlamaForCausalLM, 3 attention sites, float32, cpu")

    before = counters["stats"]["unique_graphs"]
    second = adapted(with_other_weights(first.model))
    for compiled in (find_compiled(second.source()), compile_graph(second.source(), progress=False)):
        assert compiled is not None
        assert compiled.num_graphs == 0
        assert compiled.outcomes == compile_graph(first.source(), progress=False).outcomes
        check_steps(second.executor(compiled), second.eager())
    assert (counters["stats"]["unique_graphs"], len(uncompiled)) == (before, 1)
    assert find_compiled(second.source("latency")) is None


def test_a_damaged_graph_is_compiled_again(
    adapted: Adapt,
    tiny_model: TinyModel,
    check_steps: CheckSteps,
    uncompiled: list[fx.GraphModule],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = adapted(tiny_model("llama", num_hidden_layers=1))
    compiled = compile_graph(model.source(), progress=False)
    (compiled.graph.files[0]).write_text("no unit")
    assert find_compiled(model.source()) is None
    assert "cannot be used, so the model is compiled anew" in caplog.text
    again = compile_graph(model.source(), progress=False)
    assert (again.num_graphs, len(uncompiled)) == (1, 2)
    check_steps(model.executor(again), model.eager())
    assert find_compiled(model.source()) is not None


def test_a_model_with_hooks_is_compiled_and_not_kept(
    adapted: Adapt, tiny_model: TinyModel, check_steps: CheckSteps, uncompiled: list[fx.GraphModule]
) -> None:
    model = copy.deepcopy(tiny_model("llama", num_hidden_layers=1))
    plain = adapted(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 3)
    hooked = adapted(model)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is not kept for the next start: the model has forward hooks"):
            compiled = compile_graph(hooked.source(), progress=False)
        assert compiled.num_graphs == 1
        check_steps(hooked.executor(compiled), hooked.eager())
    assert (len(uncompiled), compile_cache.entries()) == (2, [])
    with pytest.raises(AssertionError):
        check_steps(hooked.executor(compiled), plain.eager())


@pytest.mark.usefixtures("uncompiled")
def test_without_a_folder_for_graphs_they_are_not_kept(
    adapted: Adapt, tiny_model: TinyModel, check_steps: CheckSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("graphs.compile_cache.graphs_folder", lambda: tmp_path / "file" / "graphs")
    model = adapted(tiny_model("llama", num_hidden_layers=1))
    with pytest.warns(UserWarning, match="is not kept for the next start: .*Not a directory"):
        compiled = compile_graph(model.source(), progress=False)
    assert compiled.graph is not None
    assert compiled.graph.files[0].exists()  # for an export, as long as the graph is in use
    check_steps(model.executor(compiled), model.eager())
    files = compiled.graph.files
    del compiled
    gc.collect()
    assert not files[0].exists()


@pytest.mark.compile
def test_what_cannot_be_compiled_ahead_of_time_is_compiled_for_this_process(
    tiny_model: TinyModel, hf_greedy: Greedy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **knobs: Any) -> None:
        raise NotImplementedError("an op of the future")

    monkeypatch.setattr("graphs.compile_cache.graphs_folder", lambda: tmp_path / "graphs")
    monkeypatch.setattr("torch._inductor.aot_compile", refuse)
    model = tiny_model("llama", num_hidden_layers=1)
    with pytest.warns(
        UserWarning, match="for this process only, and slower to start each time: .* an op of the future"
    ):
        engine = runtime.compile(model, block_size=4, num_blocks=30, progress=False)
    with engine:
        outputs = engine.generate([PROMPT, PROMPT[:1]], GREEDY, progress=False)
        for prompt, output in zip((PROMPT, PROMPT[:1]), outputs, strict=True):
            assert output.outputs[0].token_ids == hf_greedy(model, prompt, 6)
        assert engine.stats().num_recompiles == 0
        with pytest.raises(ValueError, match=r"for this process only: .* an op of the future"):
            engine.export(tmp_path / "artifact", include_weights=True)
    assert not (tmp_path / "artifact").exists()
    assert compile_cache.entries() == []
