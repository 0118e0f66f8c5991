"""Where the time of steps went, and the knobs that change what an engine computes with."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
from transformers import PreTrainedModel

from graphs.rules import GRAPH_RULES
from models.rules import RULES
from models.step_inputs import StepInputs, StepOutputs
from runtime import SamplingParams
from runtime.engine import Engine
from runtime.metrics import StepSeconds

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPTS = [[(5 * i + 2) % 250 for i in range(length)] for length in (9, 3, 14)]
PHASES = [field.name for field in fields(StepSeconds)]


class SlowExecutor:
    """Takes `seconds` longer for each step."""

    num_recompiles = 0

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._executor, self._seconds = engine.runner.executor, seconds

    def run(self, inputs: StepInputs) -> StepOutputs:
        time.sleep(self._seconds)
        return self._executor.run(inputs)


def total(seconds: StepSeconds) -> float:
    return sum(getattr(seconds, name) for name in PHASES)


def test_nothing_has_taken_any_time_before_the_first_step(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    seconds = make_engine(tiny_model("llama")).stats().step_seconds
    assert seconds == StepSeconds()
    assert seconds.host == 0


def test_phases_add_up_to_no_more_than_the_time_of_the_steps(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model("llama"))
    start = time.perf_counter()
    engine.generate(PROMPTS, GREEDY, progress=False)
    wall = time.perf_counter() - start
    seconds = engine.stats().step_seconds
    assert all(getattr(seconds, name) > 0 for name in PHASES if name != "transfer")
    assert total(seconds) <= engine.seconds.prefill + engine.seconds.decode <= wall


def test_the_host_is_all_but_the_model_and_the_movement_of_blocks() -> None:
    seconds = StepSeconds(schedule=1, transfer=2, prepare=4, forward=8, update=16, output=32)
    assert seconds.host == 1 + 4 + 16 + 32


def test_a_slow_model_is_not_the_hosts_time(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model("llama"))
    engine.generate(PROMPTS, GREEDY, progress=False)
    before = engine.stats().step_seconds
    engine.runner.executor = SlowExecutor(engine, 0.25)  # type: ignore[assignment]
    engine.generate(PROMPTS, GREEDY, progress=False)
    after = engine.stats().step_seconds
    assert after.forward - before.forward >= 8 * 0.25
    assert after.host - before.host < 0.25


def test_blocks_that_move_are_transfer(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model("llama"), num_blocks=12, preemption="swap")
    engine.generate(PROMPTS, replace(GREEDY, max_tokens=12), progress=False)
    assert engine.stats().num_blocks_swapped_out > 0
    assert engine.stats().step_seconds.transfer > 0


def test_stats_are_a_snapshot(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model("llama"))
    engine.generate(PROMPTS[0], GREEDY, progress=False)
    first = engine.stats()
    kept = replace(first.step_seconds)
    engine.generate(PROMPTS[1], GREEDY, progress=False)
    assert first.step_seconds == kept
    later = engine.stats().step_seconds
    assert all(getattr(later, name) > getattr(kept, name) for name in PHASES if name != "transfer")


# Rules and threads.


@pytest.mark.parametrize("rules", [None, [], ("rms_norm", "add_rms_norm")])
def test_only_the_rules_asked_for_are_applied(
    rules: tuple[str, ...] | None,
    tiny_model: TinyModel,
    make_engine: MakeEngine,
    hf_greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is captured, and run as it is."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, example: graph.forward)
    model = tiny_model("llama")
    engine = make_engine(model, backend="inductor", rules=rules)
    outcomes = engine.report.outcomes
    dense = {*RULES, *GRAPH_RULES} - {"grouped_linear"}  # llama has no experts
    assert {outcome.rule for outcome in outcomes} == (dense if rules is None else set(rules))
    assert all(outcome.applied for outcome in outcomes)
    outputs = engine.generate(PROMPTS, GREEDY, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == [hf_greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("rules", [["merge_qkv"], {"merge_gate_up", "linear"}])
def test_without_a_graph_there_are_the_rules_on_modules(
    rules: list[str], tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    assert {outcome.rule for outcome in make_engine(tiny_model("llama"), rules=rules).report.outcomes} == set(rules)
    everything = make_engine(tiny_model("llama")).report.outcomes
    assert {outcome.rule for outcome in everything} == set(RULES)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_restored")
def test_the_number_of_threads_is_the_one_asked_for(tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    tokens = []
    for number in (1, 2):
        engine = make_engine(tiny_model("llama"), num_threads=number)
        assert torch.get_num_threads() == number
        tokens.append([o.outputs[0].token_ids for o in engine.generate(PROMPTS, GREEDY, progress=False)])
    assert tokens[0] == tokens[1]
