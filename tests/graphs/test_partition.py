"""Cutting graphs: which layers become one unit, and that the pieces together compute what the whole does."""

import copy
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from graphs.capture import Capture, capture
from graphs.compiled_graph import Compiled
from graphs.partition import partition
from graphs.program import Program, ProgramRunner, Unit

WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
Adapt = Callable[[PreTrainedModel], Any]
TinyModel = Callable[..., PreTrainedModel]


def runner_of(adapted: Any, captured: Capture, program: Program, units: list[fx.GraphModule]) -> ProgramRunner:
    """Runs units as they were traced."""

    def as_traced(unit: fx.GraphModule) -> Unit:
        return lambda tensors: unit(*tensors)

    return ProgramRunner(program, [as_traced(unit) for unit in units], captured.constants, adapted.state())


def called(program: Program) -> list[int]:
    return [call.unit for call in program.calls]


def num_attentions(unit: fx.GraphModule) -> int:
    return sum(str(node.target).startswith("pagegraph.paged_attention.") for node in unit.graph.nodes)


def check_dead(program: Program) -> None:
    """What calls return is dropped once, with its last use, unless it is a result."""
    uses = {slot: index for index, call in enumerate(program.calls) for slot in (*call.outputs, *call.inputs)}
    returned = {slot for call in program.calls for slot in call.outputs}
    dropped = {slot: index for index, call in enumerate(program.calls) for slot in call.dead}
    assert sum(len(call.dead) for call in program.calls) == len(dropped)
    assert dropped == {slot: uses[slot] for slot in returned - set(program.results)}


@pytest.fixture(scope="module")
def deep(adapted: Adapt, tiny_model: TinyModel) -> tuple[Any, Capture]:
    """Seven equal layers, captured once."""
    model = adapted(tiny_model("llama", num_hidden_layers=7))
    return model, model.capture()


def test_equal_layers_are_one_unit(deep: tuple[Any, Capture], check_steps: Callable) -> None:
    model, captured = deep
    program, units = partition(captured, share=True)
    assert called(program) == [0, 1, 1, 1, 1, 1, 1, 2]
    assert [num_attentions(unit) for unit in units] == [0, 1, 1]
    check_dead(program)
    compiled = Compiled(runner_of(model, captured, program, units), (), None)
    check_steps(model.executor(compiled), model.eager())


def test_the_pieces_compute_what_the_whole_does(deep: tuple[Any, Capture], steps: list) -> None:
    model, captured = deep
    runners = []
    for share in (True, False):
        program, units = partition(captured, share=share)
        runners.append(model.executor(Compiled(runner_of(model, captured, program, units), (), None)))
    assert called(program) == [0]
    with torch.no_grad():
        for inputs in steps:
            pieces, whole = (runner.run(inputs) for runner in runners)
            assert torch.equal(pieces.logits, whole.logits)
            assert torch.equal(pieces.tokens, whole.tokens)


def test_a_program_comes_back_from_json(deep: tuple[Any, Capture]) -> None:
    program, _ = partition(deep[1], share=True)
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_units_take_tensors_only_and_hold_none(deep: tuple[Any, Capture]) -> None:
    for unit in partition(deep[1], share=True)[1]:
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in unit.graph.find_nodes(op="placeholder"))
        assert not unit.graph.find_nodes(op="get_attr")


def test_alternating_windows_make_few_units(adapted: Adapt, tiny_model: TinyModel, check_steps: Callable) -> None:
    model = adapted(tiny_model("gemma3_text", num_hidden_layers=12, layer_types=WINDOWS * 2))
    captured = model.capture()
    program, units = partition(captured, share=True)
    # The beginning; from attention over a window on; from full attention on; the end. Which of the two ropes the next
    # layer takes is no difference: they are tensors that go in.
    assert called(program) == [0, *[1] * 5, 2, *[1] * 5, 3]
    check_dead(program)
    check_steps(model.executor(Compiled(runner_of(model, captured, program, units), (), None)), model.eager())


@pytest.mark.parametrize(("layers", "num_units"), [(1, 1), (3, 1), (5, 3)])
def test_few_layers_stay_whole(adapted: Adapt, tiny_model: TinyModel, layers: int, num_units: int) -> None:
    program, units = partition(adapted(tiny_model("llama", num_hidden_layers=layers)).capture(), share=True)
    assert len(units) == num_units
    assert len(program.calls) == (1 if num_units == 1 else layers + 1)


def test_layers_that_differ_stay_whole(adapted: Adapt, tiny_model: TinyModel, check_steps: Callable) -> None:
    model = copy.deepcopy(tiny_model("llama", num_hidden_layers=5))
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.variance_epsilon = 1e-5 * (index + 1)
    different = adapted(model)
    captured = different.capture()
    program, units = partition(captured, share=True)
    assert called(program) == [0]
    check_steps(
        different.executor(Compiled(runner_of(different, captured, program, units), (), None)), different.eager()
    )


def test_neither_caches_nor_weights_are_kept_alive(adapted: Adapt) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = adapted(AutoModelForCausalLM.from_config(config))
    cache = model.cache()
    caches = [weakref.ref(tensor) for tensor in cache.tensors]
    weights = [weakref.ref(parameter) for parameter in model.module.parameters()]
    captured = capture(model.module, cache, torch.device("cpu"), model.rules)
    program, units = partition(captured, share=True)
    runner = runner_of(model, captured, program, units)
    del cache
    gc.collect()
    assert all(found() is None for found in caches)
    del model, runner
    gc.collect()
    assert all(found() is None for found in weights)
