"""The key of the compile cache: equal for what gives the same graph, another for everything else."""

import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from graphs import structure_key as module_under_test
from graphs.kv_cache import KVCache
from graphs.rules import GRAPH_RULES
from graphs.structure_key import structure_key
from models import skeleton
from models.adapted import adapt
from models.checkpoint import resolve

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(**changes: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **changes})).eval()


def key(
    model: PreTrainedModel,
    *,
    num_blocks: int = 2,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    rules: list[str] | None = None,
    graph_rules: tuple[str, ...] = tuple(GRAPH_RULES),
    providers: dict[str, str] | None = None,
    optimize: str = "startup",
) -> str | None:
    adaptation = adapt(skeleton.share(model), CPU, providers, dtype, rules)
    adaptation.materialise(CPU, own=dtype != model.dtype, dtype=dtype)
    report = adaptation.report
    cache = KVCache(report.plan, num_blocks, block_size, dtype, CPU, report.providers["copy_blocks"])
    return structure_key(adaptation.module, report, cache, CPU, graph_rules, optimize)


@pytest.fixture(scope="module")
def plain() -> str:
    """The key of the model that all others are compared with."""
    found = key(make())
    assert found is not None
    assert len(found) == 32
    return found


def test_neither_weights_nor_the_pool_matter(plain: str) -> None:
    torch.manual_seed(7)
    assert key(make(), num_blocks=99) == plain


def test_a_used_model_is_the_same(plain: str) -> None:
    model = make()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
    assert key(model) == plain


def test_a_model_from_a_folder_is_the_one_in_memory(plain: str, tmp_path: Path) -> None:
    model = make()
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        checkpoint = resolve(tmp_path / name)
        assert key(skeleton.build(checkpoint.config, torch.float32)) == plain
        assert key(AutoModelForCausalLM.from_pretrained(tmp_path / name)) == plain


def test_another_process_finds_the_same_key(plain: str) -> None:
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("keys", {__file__!r})
keys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keys)
print(keys.key(keys.make()))
"""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"num_hidden_layers": 3},
        {"intermediate_size": 56},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_another_config_is_another_key(plain: str, changes: dict[str, Any]) -> None:
    assert key(make(**changes)) != plain


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8},
        {"dtype": torch.bfloat16},
        {"rules": []},
        {"graph_rules": ()},
        {"providers": {"paged_attention": "reference"}},
        {"optimize": "latency"},
    ],
)
def test_another_setting_is_another_key(plain: str, changes: dict[str, Any]) -> None:
    assert key(make(), **changes) != plain


def test_the_environment_of_the_compiler_counts(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/another/place")
    assert key(make()) == plain
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert key(make()) != plain
    monkeypatch.delenv("TORCHINDUCTOR_MAX_AUTOTUNE")
    monkeypatch.setenv("CXX", "another-compiler")
    assert key(make()) != plain


@pytest.mark.parametrize("name", ["describe", "_our_sources"])
def test_the_device_and_our_sources_count(plain: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, name, lambda *args: {"isa": ["avx"]})
    assert key(make()) != plain


def test_our_sources_are_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module_under_test._our_sources.__wrapped__()
    assert found == module_under_test._our_sources.__wrapped__()
    monkeypatch.setattr(module_under_test, "_OURS", ("ops", "models"))
    assert found != module_under_test._our_sources.__wrapped__()


MLP = """
from torch import nn
class Mlp(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.factor = inner, 1.0
    def forward(self, x):
        return self.inner(x) * SCALE
SCALE = 2.0
"""


def with_class(folder: Path, source: str) -> PreTrainedModel:
    """A model with an MLP of a class that is defined in a file; the class is loaded anew."""
    (folder / "mlp.py").write_text(source)
    spec = importlib.util.spec_from_file_location("mlp_of_a_test", folder / "mlp.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # inspect looks for it there
    exec(compile(source, str(folder / "mlp.py"), "exec"), loaded.__dict__)
    model = make()
    layer = model.model.layers[0]
    layer.mlp = loaded.Mlp(layer.mlp)
    return model


def test_an_edited_class_is_another_key(plain: str, tmp_path: Path) -> None:
    first = key(with_class(tmp_path, MLP))
    assert first != plain
    assert key(with_class(tmp_path, MLP)) == first
    old = with_class(tmp_path, MLP)
    assert key(with_class(tmp_path, MLP.replace("2.0", "3.0"))) not in (first, plain)
    assert key(with_class(tmp_path, MLP.replace("* SCALE", "+ SCALE"))) not in (first, plain)
    assert key(old) != first  # its class was loaded from what the file no longer holds


def test_a_class_without_a_file_has_no_key() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "nn": nn}
    exec(MLP, names)  # as in a notebook, or from standard input
    model = make()
    model.model.layers[1].mlp = names["Mlp"](model.model.layers[1].mlp)
    assert key(model) is None


class Settings:
    """An object that no rule of the key knows."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_what_unknown_objects_hold_counts(plain: str) -> None:
    def holding(**attributes: Any) -> str | None:
        model = make()
        model.model.layers[0].mlp.settings = settings = Settings(**attributes)
        settings.itself = settings
        return key(model)

    given: list[dict[str, Any]] = [
        {"scales": [1, 2]},
        {"scales": [1, 3]},
        {"inner": Settings(scale=1)},
        {"inner": Settings(scale=2)},
        {"table": torch.ones(3)},
        {"table": torch.zeros(3)},
        {"kind": dict},
        {"kind": list},
    ]
    assert len({holding(**attributes) for attributes in given} | {plain}) == len(given) + 1
    assert holding(scales=[1, 2]) == holding(scales=[1, 2])


def test_attributes_of_instances_count(plain: str) -> None:
    model = make()
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    assert key(model) != plain


def scaled(factor: float) -> Callable:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return type(self).forward(self, x) * factor

    return forward


def plus(places: tuple[int, ...]) -> Callable:
    def forward(self: nn.Module, x: Tensor, places: tuple[int, ...] = places) -> Tensor:
        return type(self).forward(self, x) + sum(places)

    return forward


def test_patched_forwards_count(plain: str) -> None:
    def patched(bind: Callable, function: Callable) -> str | None:
        model = make()
        mlp = model.model.layers[0].mlp
        mlp.forward = bind(function, mlp)
        return key(model)

    patches = [
        (types.MethodType, scaled(1.0)),
        (types.MethodType, scaled(2.0)),  # the same code, that holds another number
        (functools.partial, scaled(2.0)),
        (types.MethodType, plus((0, 1))),
        (types.MethodType, plus((1, 1))),
    ]
    keys = [patched(*patch) for patch in patches]
    assert len({plain, *keys}) == len(keys) + 1
    assert [patched(*patch) for patch in patches] == keys


def test_constants_of_functions_count() -> None:
    def code(text: str) -> str:
        return module_under_test._code(compile(text, "<text>", "exec"))

    texts = [
        "x in (1, 2)",
        "x in (1, 3)",
        "x in {'a', 'b'}",
        "x in {'a', 'c'}",
        "def f(): return 1",
        "def f(): return 2",
    ]
    assert len({code(text) for text in texts}) == len(texts)
    assert [code(text) for text in texts] == [code(text) for text in texts]


def test_values_of_tensors_without_a_name_count() -> None:
    def held(tensors: Callable[[PreTrainedModel], list[Tensor]]) -> str | None:
        model = make()
        model.model.layers[0].tables = tensors(model)
        return key(model)

    assert held(lambda model: [torch.ones(2)]) == held(lambda model: [torch.ones(2)])
    assert held(lambda model: [torch.ones(2)]) != held(lambda model: [torch.zeros(2)])
    # One that is a parameter goes in by its name.
    first, second = (held(lambda model: [model.model.norm.weight]) for _ in "ab")
    assert first == second


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_model_with_hooks_has_no_key(register: str) -> None:
    model = copy.deepcopy(make())
    handle = getattr(model.model.layers[1].mlp, register)(lambda *args: None)
    assert key(model) is None
    handle.remove()
    assert key(model) is not None


def test_no_address_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would differ from process to process."""
    seen: list[str] = []

    def dumps(*args: Any, **knobs: Any) -> str:
        seen.append(json.dumps(*args, **knobs))
        return seen[-1]

    monkeypatch.setattr(module_under_test, "json", types.SimpleNamespace(dumps=dumps))
    key(make())
    assert " at 0x" not in seen[0]
