"""Programs: as JSON, and run with units that only do arithmetic."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from graphs.program import Call, Program, ProgramRunner
from models.step_inputs import StepInputs

FIELDS = len(StepInputs._fields)
K, V, WEIGHT, CONSTANT, FIRST, SECOND = range(FIELDS, FIELDS + 6)
PROGRAM = Program(
    num_caches=2,
    state=("weight",),
    num_constants=1,
    calls=(
        Call(0, (0, WEIGHT), (FIRST,), ()),
        Call(1, (FIRST, K, CONSTANT), (SECOND, SECOND + 1), (FIRST,)),
        Call(0, (SECOND, V), (SECOND + 2,), (SECOND,)),
    ),
    results=(SECOND + 2, SECOND + 1),
)
STEP = StepInputs(*(torch.tensor(float(index + 1)) for index in range(FIELDS)))


def add(tensors: Sequence[Tensor]) -> list[Tensor]:
    first, second = tensors
    return [first + second]


def scale(tensors: Sequence[Tensor]) -> list[Tensor]:
    value, cache, factor = tensors
    cache += value
    return [value * factor, value - factor]


def make_runner(weight: float) -> ProgramRunner:
    return ProgramRunner(PROGRAM, [add, scale], [torch.tensor(3.0)], {"weight": torch.tensor(weight)})


def test_a_program_comes_back_from_json() -> None:
    assert Program.from_json(json.loads(json.dumps(PROGRAM.to_json()))) == PROGRAM
    assert PROGRAM.num_given == FIELDS + 4
    assert PROGRAM.num_units == 2


def test_calls_get_what_their_slots_hold() -> None:
    k, v = torch.tensor(100.0), torch.tensor(7.0)
    out = make_runner(10.0)(STEP, [k], [v])
    assert (out.tokens.item(), out.logits.item()) == (11 * 3 + 7, 11 - 3)
    assert k.item() == 111


def test_rebound_state_is_used_from_then_on() -> None:
    runner = make_runner(10.0)
    runner.rebind({"weight": torch.tensor(20.0), "another": torch.tensor(0.0)})
    assert runner(STEP, [torch.tensor(0.0)], [torch.tensor(7.0)]).tokens.item() == 21 * 3 + 7


def test_nothing_of_a_step_stays_alive_longer_than_needed() -> None:
    alive: list[int] = []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            alive.remove(id(self))

    def watched(value: float) -> Tensor:
        tensor = torch.tensor(value).as_subclass(Watched)
        alive.append(id(tensor))
        return tensor

    seen = []

    def unit(tensors: Sequence[Tensor]) -> list[Tensor]:
        seen.append(len(alive))
        return [watched(0.0) for _ in range(1 + (len(tensors) == 3))]

    runner = ProgramRunner(PROGRAM, [unit, unit], [torch.tensor(3.0)], {"weight": torch.tensor(1.0)})
    out = runner(STEP, [torch.tensor(0.0)], [torch.tensor(0.0)])
    assert seen == [0, 1, 2]  # before the last call the first one's output is gone
    assert len(alive) == len(out)
    del out
    assert alive == []


def test_calls_are_counted_by_unit() -> None:
    calls = tuple(Call(unit, (), (), ()) for unit in (0, 1, 1, 2, 1))
    assert Program(2, (), 0, calls, ()).num_calls == [1, 3, 1]
