"""New weights in a live engine: every request goes on under them, and a user's own module never notices."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime import RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

PROMPT, OTHER = list(range(40, 57)), list(range(90, 99))
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module", params=["llama", "mixtral", "gpt2"])
def old(request: pytest.FixtureRequest, tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def new(old: PreTrainedModel) -> PreTrainedModel:
    """The same architecture with every weight another one (ties kept: they are one parameter)."""
    model = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0) if parameter.ndim > 1 else parameter.flip(0) + 0.1)
    return model


@pytest.mark.parametrize("form", ["state dict", "folder"])
@pytest.mark.parametrize("origin", ["module", "folder"])
def test_running_and_new_requests_go_on_under_new_weights(
    form: str,
    origin: str,
    old: PreTrainedModel,
    new: PreTrainedModel,
    make_engine: MakeEngine,
    hf_greedy: Greedy,
    drain: Drain,
    tmp_path: Path,
) -> None:
    for name, model in (("old", old), ("new", new)):
        model.save_pretrained(tmp_path / name)
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    engine = make_engine(old if origin == "module" else tmp_path / "old")
    assert tokens(engine.generate(PROMPT, GREEDY, progress=False)[0]) == hf_greedy(old, PROMPT, 12)
    engine.add_request(PROMPT, GREEDY, request_id="running")
    for _ in range(5):
        engine.step()
    engine.load_weights(new.state_dict() if form == "state dict" else tmp_path / "new")
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 1)
    engine.add_request(PROMPT, GREEDY, request_id="new")
    outputs = drain(engine)
    kept = hf_greedy(old, PROMPT, 5)
    assert tokens(outputs["running"]) == kept + hf_greedy(new, PROMPT + kept, 7)
    assert tokens(outputs["new"]) == hf_greedy(new, PROMPT, 12) != hf_greedy(old, PROMPT, 12)
    assert outputs["new"].num_cached_tokens == 0, "no prefix of the old weights is left"
    for name, tensor in old.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_another_engine_over_the_module_keeps_the_old_weights(
    old: PreTrainedModel, new: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    changed, unchanged = make_engine(old), make_engine(old)
    changed.load_weights(new.state_dict())
    changed.load_weights(new.state_dict())
    assert tokens(changed.generate(OTHER, GREEDY, progress=False)[0]) == hf_greedy(new, OTHER, 12)
    assert tokens(unchanged.generate(OTHER, GREEDY, progress=False)[0]) == hf_greedy(old, OTHER, 12)
    assert tokens(make_engine(old).generate(OTHER, GREEDY, progress=False)[0]) == hf_greedy(old, OTHER, 12)


def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    lacking = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    misshapen = {**state, "model.layers.2.self_attn.k_proj.weight": torch.zeros(16, 31)}
    engine = make_engine(model)
    engine.add_request(PROMPT, GREEDY, request_id="running")
    for _ in range(4):
        engine.step()
    for source, message in (
        (lacking, r"lack 1 of the 30 tensors of LlamaForCausalLM: model\.layers\.1\.mlp\.up_proj\.weight"),
        (misshapen, r"'model\.layers\.2\.self_attn\.k_proj\.weight' in shape \(16, 31\).* \(16, 32\)"),
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, r"holds no config\.json"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(source)
    assert engine.stats().num_running == 1, "it was not even preempted"
    assert tokens(drain(engine)["running"]) == hf_greedy(model, PROMPT, 12)
