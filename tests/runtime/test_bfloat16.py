"""bfloat16 with all rules: how far the engine's logits are from the exact ones, beside how far Hugging Face's own are.

Exact are Hugging Face's logits in float32, of the same weights, which are rounded to bfloat16 first. The engine may be
off by at most twice what Hugging Face is off in bfloat16: it rounds at other places, not more often.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.step_inputs import StepInputs, StepOutputs
from runtime import SamplingParams
from runtime.engine import Engine

NEW = 6
# Drawn, not greedy, since a greedy run of a random model soon repeats itself.
PARAMS = SamplingParams(max_tokens=NEW, temperature=1.0, seed=3)
LENGTHS = (1, 2, 5, 7, 11, 16, 17, 23, 30, 4, 13, 21)


class Recording:
    """Keeps the logits of every step."""

    num_recompiles = 0

    def __init__(self, engine: Engine) -> None:
        self._executor = engine.runner.executor
        self.logits: list[Tensor] = []

    def run(self, inputs: StepInputs) -> StepOutputs:
        outputs = self._executor.run(inputs)
        self.logits.append(outputs.logits.clone())
        return outputs


@pytest.fixture
def rounded(family: str, tiny_model: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A family's model in bfloat16, and the very same weights in float32. Buffers are float32 in both."""
    exact = copy.deepcopy(tiny_model(family))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    config = copy.deepcopy(exact.config)
    half = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    half.load_state_dict(exact.state_dict())
    return half.eval(), exact


@torch.no_grad()
def last_logits(model: PreTrainedModel, sequence: list[int]) -> Tensor:
    """[NEW, V]: of the positions that the new tokens were drawn from."""
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    return logits[len(sequence) - NEW - 1 : -1].float()


def test_the_error_is_at_most_twice_that_of_hugging_face(
    rounded: tuple[PreTrainedModel, PreTrainedModel],
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole prompts together, then decode; the graph is captured, rewritten, and run as it is."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, example: graph.forward)
    half, exact = rounded
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    engine = make_engine(half, backend="inductor", num_blocks=200, dtype="bfloat16")
    assert all(outcome.applied for outcome in engine.report.outcomes), str(engine.report)
    recording = engine.runner.executor = Recording(engine)  # type: ignore[assignment]
    outputs = engine.generate(prompts, PARAMS, progress=False)
    assert [len(logits) for logits in recording.logits] == [len(prompts)] * NEW
    assert {logits.dtype for logits in recording.logits} == {torch.bfloat16}
    found = torch.stack(recording.logits, 1).float()  # [prompts, NEW, V]
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    expected = torch.stack([last_logits(exact, sequence) for sequence in sequences])
    own = torch.stack([last_logits(half, sequence) for sequence in sequences])
    error, budget = (found - expected).abs().max(), 2 * (own - expected).abs().max()
    assert 0 < error <= budget
