"""A compiled graph as data: which compiled unit is called on what, and what runs that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor

from models.step_inputs import StepInputs, StepOutputs

Unit = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled piece of the graph."""


@dataclass(frozen=True)
class Call:
    """One call of a unit. Inputs and outputs are slots; what lies in those of `dead` is used by no later call."""

    unit: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The calls that make one step.

    Slots hold tensors: first those of StepInputs, then the K caches, the V caches, the tensors of the model that
    `state` names, `num_constants` others, and then what calls return.
    """

    num_caches: int  # K and V tensors together
    state: tuple[str, ...]
    num_constants: int
    calls: tuple[Call, ...]
    results: tuple[int, ...]  # slots of StepOutputs

    @property
    def num_given(self) -> int:
        """Slots that are filled before the first call."""
        return len(StepInputs._fields) + self.num_caches + len(self.state) + self.num_constants

    @property
    def num_units(self) -> int:
        """Units that are called, each perhaps many times."""
        return 1 + max(call.unit for call in self.calls)

    @property
    def num_calls(self) -> list[int]:
        """How often each unit is called."""
        called = [call.unit for call in self.calls]
        return [called.count(unit) for unit in range(self.num_units)]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """What `to_json` gave, perhaps by way of a file."""
        fields = ("inputs", "outputs", "dead")
        calls = tuple(Call(call["unit"], *(tuple(call[name]) for name in fields)) for call in data["calls"])
        state, results = tuple(data["state"]), tuple(data["results"])
        return cls(data["num_caches"], state, data["num_constants"], calls, results)


class ProgramRunner:
    """Runs a program with its units, over the tensors that the model has now."""

    def __init__(
        self, program: Program, units: Sequence[Unit], constants: Sequence[Tensor], state: Mapping[str, Tensor]
    ) -> None:
        assert len(units) == program.num_units
        assert len(constants) == program.num_constants
        self.program = program
        self._constants = list(constants)
        self._calls = [(units[call.unit], _getter(call.inputs), call.outputs, call.dead) for call in program.calls]
        returned = {slot for call in program.calls for slot in call.outputs}
        self._returned: list[Any] = [None] * len(returned)
        self._results = _getter(program.results)
        self.rebind(state)

    def rebind(self, state: Mapping[str, Tensor]) -> None:
        """Use the model's tensors as they are in `state`, by name."""
        self._held = [*(state[name] for name in self.program.state), *self._constants]

    def __call__(self, inputs: StepInputs, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> StepOutputs:
        """Run one step. Side effect: the caches."""
        values = [*inputs, *k_caches, *v_caches, *self._held, *self._returned]
        for unit, get, outputs, dead in self._calls:
            for slot, value in zip(outputs, unit(get(values)), strict=True):
                values[slot] = value
            for slot in dead:
                values[slot] = None
        return StepOutputs(*self._results(values))


def _getter(slots: tuple[int, ...]) -> Callable[[list[Any]], list[Tensor]]:
    """What picks those slots' values, as a list."""
    if len(slots) < 2:
        return lambda values: [values[slot] for slot in slots]
    pick = itemgetter(*slots)
    return lambda values: list(pick(values))
