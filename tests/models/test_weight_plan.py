import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, Transpose, WeightConverter

from models import skeleton
from models.adapted import Adaptation, adapt, named_tensors
from models.checkpoint import Checkpoint
from models.safetensors_files import Safetensors
from models.weight_plan import WeightPlan, fingerprint, record, replay
from models.weights import load_weights

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

TinyModel = Callable[..., PreTrainedModel]


@pytest.fixture
def llama(tiny_model: TinyModel, tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def adapted(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Adaptation:
    """Adapted and loaded as the engine does it."""
    adaptation = adapt(skeleton.build(checkpoint.config, dtype), CPU)
    adaptation.materialise(CPU, own=False)
    load_weights(checkpoint, adaptation.source, adaptation.destinations(), progress=False)
    return adaptation


def loaded(adaptation: Adaptation) -> dict[str, Tensor]:
    return dict(named_tensors(adaptation.module))


def blank(plan: WeightPlan) -> dict[str, Tensor]:
    return {name: torch.full(spec.shape, torch.nan, dtype=spec.dtype) for name, spec in plan.targets.items()}


def through_json(plan: WeightPlan) -> WeightPlan:
    return WeightPlan.from_json(json.loads(json.dumps(plan.to_json())))


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def ops(plan: WeightPlan) -> set[str]:
    return {str(call.op) for recipe in plan.recipes for call in recipe.calls}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "overrides", "called"),
    [
        ("llama", {}, set()),
        ("mixtral", {}, {"aten.stack.default", "aten.cat.default"}),
        ("gpt_oss", {}, set()),
        ("gemma3_text", {"tie_word_embeddings": True}, set()),
        ("gpt2", {}, set()),
    ],
)
def test_replay_equals_load_weights(
    family: str,
    overrides: dict[str, Any],
    called: set[str],
    dtype: torch.dtype,
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    tiny_model(family, **overrides).save_pretrained(tmp_path, max_shard_size="40KB")
    checkpoint = Checkpoint(tmp_path)
    adaptation = adapted(checkpoint, dtype)
    plan = record(checkpoint, adaptation)
    assert ops(plan) == called
    assert plan.targets.keys() == dict(adaptation.module.named_parameters()).keys(), "of tied names the first"
    again = through_json(plan)
    assert again == plan
    state = blank(again)
    replay(again, Safetensors(tmp_path), state, progress=False)
    assert_equal(state, loaded(adaptation))


def test_merged_parameters_are_written_in_slices(llama: Path) -> None:
    checkpoint = Checkpoint(llama)
    plan = record(checkpoint, adapted(checkpoint))
    parts = [plan.destinations[f"model.layers.1.self_attn.{kind}_proj.weight"] for kind in "qkv"]
    assert len({part.name for part in parts}) == 1
    assert [(part.dim, part.start, part.length) for part in parts] == [(0, 0, 32), (0, 32, 16), (0, 48, 16)]
    whole = plan.targets[parts[0].name]
    assert whole.shape == (64, 32)


def test_a_plan_serves_new_weights_in_a_state_dict(llama: Path) -> None:
    checkpoint = Checkpoint(llama)
    adaptation = adapted(checkpoint)
    plan = record(checkpoint, adaptation)
    other = {name: tensor.flip(0) for name, tensor in load_file(llama / "model.safetensors").items()}
    state = blank(plan)
    replay(plan, other, state, progress=False)
    load_weights(other, adaptation.source, adaptation.destinations(), progress=False)
    assert_equal(state, loaded(adaptation))


def tied_twice(tiny_model: TinyModel, folder: Path, head: Callable[[Tensor], Tensor]) -> Checkpoint:
    """A model with tied embeddings whose file gives both of them."""
    tiny_model("gemma3_text", tie_word_embeddings=True).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = head(state["model.embed_tokens.weight"])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder)


def test_of_tied_names_in_a_file_one_is_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoint = tied_twice(tiny_model, tmp_path, torch.clone)
    adaptation = adapted(checkpoint)
    plan = record(checkpoint, adaptation)
    assert checkpoint.names().keys() - plan.sources.keys() == {"model.embed_tokens.weight"}
    state = blank(plan)
    replay(plan, checkpoint, state, progress=False)
    assert_equal(state, loaded(adaptation))


def test_tied_names_that_differ(tiny_model: TinyModel, tmp_path: Path) -> None:
    adaptation = adapted(tied_twice(tiny_model, tmp_path, torch.clone))
    with pytest.raises(ValueError, match="are tied by the model's config but differ"):
        record(tied_twice(tiny_model, tmp_path, torch.neg), adaptation)


def test_weights_that_do_not_fit_cannot_be_recorded(llama: Path, tmp_path: Path) -> None:
    adaptation = adapted(Checkpoint(llama))
    state = load_file(llama / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights lack 1 of the 30 tensors.*model\.norm\.weight"):
        record(Safetensors(tmp_path), adaptation)


NORM, DOWN = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"
Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(NORM), rf"the weights lack 1 of 30 recorded tensors: {NORM}"),
        (
            lambda state: state.update({DOWN: torch.zeros(32, 47)}),
            rf"the weights hold '{DOWN}' as float32 \(32, 47\); expected, as recorded: float32 \(32, 48\)",
        ),
        (
            lambda state: state.update({NORM: torch.zeros(32, dtype=torch.float16)}),
            rf"the weights hold '{NORM}' as float16 \(32,\); expected, as recorded: float32 \(32,\)",
        ),
    ],
)
def test_other_weights_are_refused_before_any_copy(change: Change, message: str, llama: Path) -> None:
    checkpoint = Checkpoint(llama)
    plan = record(checkpoint, adapted(checkpoint))
    weights = load_file(llama / "model.safetensors")
    change(weights)
    save_file(weights, llama / "model.safetensors")
    state = blank(plan)
    with pytest.raises(ValueError, match=message):
        replay(plan, Safetensors(llama), state, progress=False)
    assert all(tensor.isnan().all() for tensor in state.values())


HEAD = "model.lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(HEAD), rf"the adapted model's tensors lack 1 of \d+ recorded tensors: {HEAD}"),
        (lambda state: state.update({HEAD: torch.full((1, 32), torch.nan)}), rf"'{HEAD}' as float32 \(1, 32\)"),
        (
            lambda state: state.update({HEAD: torch.full((260, 32), torch.nan, dtype=torch.float16)}),
            rf"the adapted model's tensors hold '{HEAD}' as float16 \(260, 32\); expected, as recorded: float32",
        ),
    ],
)
def test_another_model_is_refused_before_any_copy(change: Change, message: str, llama: Path) -> None:
    checkpoint = Checkpoint(llama)
    plan = record(checkpoint, adapted(checkpoint))
    state = blank(plan)
    change(state)
    with pytest.raises(ValueError, match=message):
        replay(plan, checkpoint, state, progress=False)
    assert all(tensor.isnan().all() for tensor in state.values())


class Own(ConversionOps):
    """A conversion by any function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], target_patterns: list[str], **_: object
    ) -> dict[str, Tensor]:
        ((value,),) = input_dict.values()
        return {target_patterns[0]: self.function(value)}


def convert_down(monkeypatch: pytest.MonkeyPatch, operation: ConversionOps) -> None:
    """Let `stored_down` in a checkpoint be what `operation` makes the model's down_proj of."""
    mapping = [WeightConverter("stored_down.weight", "down_proj.weight", [operation])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: mapping)


def stored_as(folder: Path, make: Callable[[Tensor], Tensor]) -> Checkpoint:
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "down_proj" in name]:
        state[name.replace("down_proj", "stored_down")] = make(state.pop(name)).contiguous()
    save_file(state, folder / "model.safetensors")
    return Checkpoint(folder)


@pytest.mark.parametrize(
    ("operation", "store", "called"),
    [
        (Transpose(), torch.t, {"aten.transpose.int", "aten.clone.default"}),
        (
            Own(lambda t: torch.cat([half.double().float() for half in reversed(t.unbind(0))], -1)),
            lambda t: torch.stack([t[:, 24:], t[:, :24]]),
            {"aten.unbind.int", "aten._to_copy.default", "aten.cat.default"},
        ),
        (
            Own(lambda t: (t.view(3, -1, 48).transpose(1, 2) * 2.0).mT.reshape(-1, 48)[:32]),
            lambda t: torch.cat([t, t[:1]]) / 2,
            {"aten.mul.Tensor", "aten.slice.Tensor"},
        ),
    ],
)
def test_any_conversion_by_aten_ops_is_replayed(
    operation: ConversionOps,
    store: Callable[[Tensor], Tensor],
    called: set[str],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert_down(monkeypatch, operation)
    before = load_file(llama / "model.safetensors")[DOWN]
    checkpoint = stored_as(llama, store)
    adaptation = adapted(checkpoint)
    plan = record(checkpoint, adaptation)
    assert called <= ops(plan)
    state = blank(plan)
    replay(through_json(plan), checkpoint, state, progress=False)
    assert_equal(state, loaded(adaptation))
    assert torch.equal(plan.destinations[DOWN].within(state), before)


def test_one_source_of_several_targets(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets are two slices of one merged parameter: gate and up in the order of the file's."""
    targets = ["gate_proj.weight", "up_proj.weight"]
    mapping = [WeightConverter("gate_up.weight", targets, [Chunk(0)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: mapping)
    weights = load_file(llama / "model.safetensors")
    for layer in range(3):
        parts = [weights.pop(f"model.layers.{layer}.mlp.{target}") for target in targets]
        weights[f"model.layers.{layer}.mlp.gate_up.weight"] = torch.cat(parts)
    save_file(weights, llama / "model.safetensors")
    checkpoint = Checkpoint(llama)
    adaptation = adapted(checkpoint)
    plan = record(checkpoint, adaptation)
    state = blank(plan)
    replay(through_json(plan), checkpoint, state, progress=False)
    assert_equal(state, loaded(adaptation))
    name = plan.destinations["model.layers.0.mlp.up_proj.weight"].name
    assert torch.equal(state[name], weights["model.layers.0.mlp.gate_up.weight"])


CONSTANT = torch.zeros(32, 48)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda t: t.clone().mul_(2), "aten.mul_.Tensor is called; only ATen ops that change none of their arguments"),
        (lambda t: t + torch.ones(48, device=t.device), r"an op is given device\(type='meta'\), of type device"),
        (lambda t: CONSTANT.to(t.device), "it needs a tensor that does not come from the weights"),
        (lambda t: t if t.is_meta else t.neg(), "it depends on the weights' values"),
    ],
)
def test_what_cannot_be_recorded_is_named_and_still_loads(
    function: Callable[[Tensor], Tensor], reason: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_down(monkeypatch, Own(function))
    checkpoint = stored_as(llama, torch.clone)
    adaptation = adapted(checkpoint)
    stored = checkpoint.get("model.layers.0.mlp.stored_down.weight")
    assert torch.equal(adaptation.destinations()["model.layers.0.mlp.down_proj.weight"], function(stored))
    with pytest.raises(
        ValueError, match=rf"how model\.layers\.\d\.mlp\.down_proj\.weight .* cannot be recorded.*{reason}"
    ):
        record(checkpoint, adaptation)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("os.system.default", "os.system.default is called; only ATen ops"),
        ("aten.add_.Tensor", "aten.add_.Tensor is called; only ATen ops"),
        ("aten.__class__.mro", "only ATen ops"),
        ("aten.stack", "only ATen ops"),
        ("aten.no_such_op.default", "only ATen ops"),
    ],
)
def test_other_calls_in_a_file_are_refused(op: str, reason: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    data = record(checkpoint, adapted(checkpoint)).to_json()
    recipe = next(recipe for recipe in data["recipes"] if recipe["calls"])
    recipe["calls"][0][0] = op
    with pytest.raises(ValueError, match=reason):
        WeightPlan.from_json(data)


def test_dtypes_in_a_file_are_dtypes(llama: Path) -> None:
    checkpoint = Checkpoint(llama)
    data = record(checkpoint, adapted(checkpoint)).to_json()
    data["sources"][NORM][0] = "load"
    with pytest.raises(ValueError, match="'load' is no dtype of torch"):
        WeightPlan.from_json(data)


REPLAY = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from models.safetensors_files import Safetensors
from models.weight_plan import WeightPlan, fingerprint, replay
folder = Path(sys.argv[1])
plan = WeightPlan.from_json(json.loads((folder / "plan.json").read_text()))
state = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in plan.targets.items()}
replay(plan, Safetensors(folder), state)
(folder / "state").mkdir()
save_file(state, folder / "state" / "state.safetensors")
print(fingerprint(Safetensors(folder)))
print([name for name in sys.modules if name.startswith(("transformers", "torch._dynamo", "torch._inductor"))])
"""


def test_another_process_replays_without_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    adaptation = adapted(checkpoint)
    (tmp_path / "plan.json").write_text(json.dumps(record(checkpoint, adaptation).to_json()))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}){REPLAY}"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "load weights: 100%" in result.stderr
    assert result.stdout.splitlines() == [fingerprint(checkpoint), "[]"]
    assert_equal(load_file(tmp_path / "state" / "state.safetensors"), loaded(adaptation))


def test_a_fingerprint_does_not_depend_on_the_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    for folder, size in ("whole", "1GB"), ("sharded", "8KB"):
        tiny_model("llama").save_pretrained(tmp_path / folder, max_shard_size=size)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert fingerprint(Safetensors(tmp_path / "sharded")) == fingerprint(Safetensors(tmp_path / "whole"))


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0 + 2**-21]])},
        {"a": torch.tensor([[1.0, 2.0, 3.0, 4.0]])},
        {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(torch.int32)},
        {"a": torch.zeros(2), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])},
        {"scalar": torch.tensor(2.0, dtype=torch.bfloat16)},
        {"empty": torch.zeros(0, 2)},
    ],
)
def test_a_fingerprint_is_of_names_dtypes_shapes_and_values(change: dict[str, Tensor], tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "b": torch.zeros(2),
        "scalar": torch.tensor(1.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }
    found = []
    for name, state in ("one", tensors), ("same", copy.copy(tensors)), ("other", {**tensors, **change}):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        found.append(fingerprint(Safetensors(tmp_path / name)))
    assert found[0] == found[1] != found[2]
