"""The inputs of steps: what the filler continues equals what it would have written anew."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from graphs.inputs import InputArena
from models.step_inputs import StepInputs
from runtime import BeamSearchParams, SamplingParams
from runtime.batch import InputFiller
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compares every step's inputs with those of a filler without a past, and counts the steps of each kind."""
    counts = {"continued": 0, "written": 0}
    fill, write = InputFiller.fill, InputFiller._write

    def counted(self: InputFiller, schedule: object) -> object:
        counts["written"] += 1
        return write(self, schedule)

    def compared(self: InputFiller, schedule: object) -> StepInputs:
        before = counts["written"]
        found = fill(self, schedule)
        counts["continued"] += counts["written"] == before
        written = counts["written"]
        expected = fill(InputFiller(InputArena(torch.device("cpu")), self._manager), schedule)
        counts["written"] = written
        for name, one, other in zip(StepInputs._fields, found, expected, strict=True):
            assert name == "prev_tokens" or torch.equal(one, other), name
        return found

    monkeypatch.setattr(InputFiller, "_write", counted)
    monkeypatch.setattr(InputFiller, "fill", compared)
    return counts


def run(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
    engine.check_integrity()


def test_decode_steps_of_the_same_requests_are_continued(
    tiny_model: Callable[..., PreTrainedModel], make_engine: MakeEngine, checked: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("llama"), block_size=4)
    for length in (3, 9, 14):
        engine.add_request(list(range(length)), SamplingParams(max_tokens=17, ignore_eos=True, seed=length))
    run(engine)
    # One step for the prompts, one that decodes first; of the 15 others, those in which the widest table grows.
    assert checked == {"continued": 11, "written": 6}


def test_masks_forks_arrivals_and_beams_are_written_anew(
    tiny_model: Callable[..., PreTrainedModel], make_engine: MakeEngine, checked: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("llama"), block_size=4)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=20, min_tokens=4, stop_token_ids=[5]), request_id="masked")
    for _ in range(7):
        engine.step()
    engine.fork("masked", SamplingParams(max_tokens=20, temperature=1.0, seed=1))  # copies the last block on write
    for _ in range(3):
        engine.step()
    engine.add_request([4] * 6, SamplingParams(n=2, max_tokens=9, seed=3))
    engine.add_request([7] * 5, BeamSearchParams(beam_width=2, max_tokens=5))
    run(engine)
    assert checked["continued"] == 5
    assert checked["written"] > 5


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_requests_that_come_back_are_written_anew(
    preemption: str, tiny_model: Callable[..., PreTrainedModel], make_engine: MakeEngine, checked: dict[str, int]
) -> None:
    engine = make_engine(tiny_model("llama"), block_size=2, num_blocks=14, preemption=preemption)
    for start in (0, 50):
        engine.add_request(list(range(start, start + 6)), SamplingParams(max_tokens=12, ignore_eos=True, temperature=0))
    run(engine)
    assert engine.stats().num_preemptions > 0
    assert checked["continued"] > 0
