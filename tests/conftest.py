"""Tiny random models, their Hugging Face oracle, a byte tokenizer, and engines over them. No weights are needed."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, whose own functions look for it then

from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

import runtime
from graphs.compiled_graph import unit_file
from graphs.program import Unit
from runtime import RequestOutput
from runtime.engine import Engine

torch.set_num_threads(1)  # for models this small a second thread costs more than it brings

EOS = 256  # of ByteTokenizer; the models themselves name no EOS, so greedy runs have the length asked for
VOCAB, WINDOW, POSITIONS = 260, 6, 256
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    **NO_SPECIAL,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
PER_LAYER_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}
# One per trait of attention that the engine has to honour; each trait is shown to matter in runtime/test_families.py.
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        tie_word_embeddings=False,
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=8,
        rope_parameters=PER_LAYER_ROPE,
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=POSITIONS, **NO_SPECIAL),
    "mixtral": lambda: MixtralConfig(**SIZES, **EXPERTS),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, **EXPERTS, sliding_window=WINDOW, layer_types=ALTERNATING, rope_parameters=YARN
    ),
}


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Replace all weights by ones large enough that norms, biases, sinks and every position change the argmax."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


class ByteTokenizer:
    """Token i is byte i; EOS is the only special token, and the rest of the vocabulary has no text."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        special = "" if skip_special_tokens else "<eos>"
        return bytes(i for i in token_ids if i < EOS).decode("utf-8", "replace") + special * (EOS in token_ids)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Every tested family in turn."""
    return request.param


@pytest.fixture(scope="session")
def families() -> list[str]:
    """The names of the tested families."""
    return list(FAMILIES)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family)`: its float32 model with eager attention, one for all tests: never change it.

    `tiny_model(family, name=value, ...)` overrides fields of its config; the weights are drawn as for the plain one.
    """
    built: dict[str, PreTrainedModel] = {}

    def make(family: str, **overrides: Any) -> PreTrainedModel:
        key = f"{family} {overrides}"
        if key not in built:
            config = FAMILIES[family]()
            for name, value in overrides.items():
                setattr(config, name, value)
            built[key] = randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()
        return built[key]

    return make


@pytest.fixture(scope="session")
def hf_greedy() -> Callable[[PreTrainedModel, Sequence[int], int], list[int]]:
    """`hf_greedy(model, prompt, n)`: the n tokens that Hugging Face's generate adds. Cached: for models that stay."""

    @cache
    def generate(model: PreTrainedModel, prompt: tuple[int, ...], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
        assert out.shape[1] == len(prompt) + n, "the model has an EOS"
        return out[0, len(prompt) :].tolist()

    return lambda model, prompt, n: list(generate(model, tuple(prompt), n))


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    """A tokenizer whose tokens are bytes."""
    return ByteTokenizer()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """`make_engine(model, **knobs)`: an uncompiled engine with small blocks, checked and closed after the test."""
    engines: list[Engine] = []

    def make(model: Any, **knobs: Any) -> Engine:
        defaults = {"backend": "eager", "progress": False, "block_size": 4, "num_blocks": 80, "num_threads": 1}
        engines.append(runtime.compile(model, **{**defaults, **knobs}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[fx.GraphModule]:
    """Have units run as they were traced, without inductor, and start with no graphs in the cache. The units so far."""
    units: list[fx.GraphModule] = []

    def keep(made: Sequence[fx.GraphModule], calls: Sequence[int], folder: Path, *others: object) -> None:
        for index, unit in enumerate(made):
            unit_file(folder, index).write_text(str(len(units)))
            units.append(unit)

    def load(file: Path, device: torch.device) -> Unit:
        unit = units[int(file.read_text())]
        return lambda tensors: unit(*tensors)

    as_traced = nullcontext(SimpleNamespace(compile=keep))
    monkeypatch.setattr("graphs.compiler.UnitCompiler", lambda *args, **knobs: as_traced)
    monkeypatch.setattr("graphs.compiled_graph.load_unit", load)
    monkeypatch.setattr("graphs.compile_cache.graphs_folder", lambda: tmp_path / "graphs")
    return units


@pytest.fixture(scope="session")
def drain() -> Callable[[Engine], dict[str, RequestOutput]]:
    """`drain(engine)`: step until nothing is left; the last output of each request. Every step is checked."""

    def run(engine: Engine) -> dict[str, RequestOutput]:
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                before = last.get(output.request_id)
                assert before is None or not before.finished, "output after the last one"
                last[output.request_id] = output
            engine.check_integrity()
        assert all(output.finished for output in last.values())
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        return last

    return run
