"""Bad input is refused with a ValueError that says what was given, what is supported and which knob to turn.

Every case happens in the middle of other requests, which must end just as if it had not.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel, ViTConfig

import runtime
from runtime import SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Case = Callable[[Engine, PreTrainedModel, Path], object]

RUNNING: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (list(range(30, 43)), SamplingParams(max_tokens=10, temperature=0)),
    "random": (list(range(60, 69)), SamplingParams(max_tokens=10)),
    "waiting": (list(range(30, 40)), SamplingParams(max_tokens=10, seed=2)),
}
# 19 usable blocks of 4 hold 76 tokens, fewer than max_model_len, and a prompt has to fit into one step of 30.
KNOBS: dict[str, Any] = {
    "num_blocks": 20,
    "max_model_len": 100,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 30,
    "enable_chunked_prefill": False,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def busy(tiny_model: TinyModel, make_engine: MakeEngine) -> Engine:
    """An engine with two running requests and a waiting one, four steps in."""
    with pytest.warns(UserWarning, match="larger than the KV cache"):
        engine = make_engine(tiny_model("llama"), **KNOBS)
    start(engine)
    return engine


def start(engine: Engine) -> None:
    for request_id, (prompt, params) in RUNNING.items():
        engine.add_request(prompt, params, request_id=request_id)
    for _ in range(4):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)


def finish(engine: Engine) -> dict[str, list[int]]:
    done = {}
    while engine.has_unfinished_requests():
        done.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
        engine.check_integrity()
    return done


@pytest.fixture(scope="module")
def undisturbed(tiny_model: TinyModel) -> dict[str, list[int]]:
    """What the running requests end with when nothing happens."""
    with pytest.warns(UserWarning, match="larger than the KV cache"):
        engine = runtime.compile(tiny_model("llama"), backend="eager", progress=False, block_size=4, **KNOBS)
    with engine:
        start(engine)
        return finish(engine)


def check(engine: Engine, bad: Callable[[], object], said: tuple[str, ...], undisturbed: dict[str, list[int]]) -> None:
    """`bad` raises a ValueError that says all of `said`, and leaves the running requests to end as they would."""
    before = engine.stats()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked next)
        bad()
    for words in said:
        assert words in str(caught.value)
    assert engine.stats() == before
    assert finish(engine) == undisturbed


def add(prompt: Any, **kwargs: Any) -> Case:
    return lambda engine, model, path: engine.add_request(prompt, **kwargs)


def generate(prompts: Any) -> Case:
    """Bad prompts of a batch are found after good ones were queued: those must be gone again."""
    return lambda engine, model, path: engine.generate(prompts, progress=False)


NOT_IDS = "must be text or a list of token ids"
REQUESTS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "empty prompt": (add([]), ("empty prompt", "at least one token")),
    "empty prompt in a batch": (generate([[1], []]), ("empty prompt",)),
    "text without tokenizer": (add("Hello"), ("needs a tokenizer", "token ids", "tokenizer=")),
    "text in a batch": (generate([[1], "Hello"]), ("needs a tokenizer",)),
    "stop string without tokenizer": (
        add([1], params=SamplingParams(stop="x")),
        ("stop strings need a tokenizer", "tokenizer="),
    ),
    "prompt of max_model_len": (add([1] * 100), ("100 tokens", "at most 99", "raise max_model_len")),
    "prompt over max_model_len": (add([1] * 150), ("150 tokens", "max_model_len=100", "at most 99")),
    "can never fit": (add([1] * 76), ("never fit", "76 tokens", "20 blocks", "19", "raise num_blocks to at least 21")),
    "over the budget": (
        add([1] * 31),
        ("31 tokens", "max_num_batched_tokens=30", "raise max_num_batched_tokens", "enable_chunked_prefill=True"),
    ),
    "token out of vocabulary": (add([1, 260]), ("token id 260", "out of the vocabulary", "0 to 259")),
    "negative token": (add([-1]), ("token id -1", "0 to 259")),
    "stop id out of vocabulary": (
        add([1], params=SamplingParams(stop_token_ids=[5, 300])),
        ("stop token id 300", "0 to 259"),
    ),
    "duplicate id": (add([1], request_id="greedy"), ("'greedy'", "still alive", "new id", "abort")),
    "duplicate id of a waiting request": (add([1], request_id="waiting"), ("'waiting'", "still alive")),
    "None": (add(None), (NOT_IDS, "NoneType")),
    "int": (add(5), (NOT_IDS, "int")),
    "bytes": (add(b"abc"), (NOT_IDS, "bytes")),
    "bytes to generate": (generate(b"abc"), (NOT_IDS, "bytes")),
    "array": (add(np.array([1, 2])), (NOT_IDS, "ndarray")),
    "array to generate": (generate(np.array([1, 2])), (NOT_IDS, "ndarray")),
    "tensor": (add(torch.tensor([1, 2])), (NOT_IDS, "Tensor")),
    "bool in it": (add([1, True]), (NOT_IDS, "True")),
    "float in it": (add([1, 2.0]), (NOT_IDS, "2.0")),
    "None in it": (add([None]), (NOT_IDS, "None")),
    "text in it": (add([1, "a"]), (NOT_IDS, "'a'")),
    "nested": (add([[1, 2]]), (NOT_IDS, "[1, 2]")),
    "nested too deep": (generate([[1], [[2]]]), (NOT_IDS, "[2]")),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_bad_request(case: str, busy: Engine, undisturbed: dict[str, list[int]]) -> None:
    bad, said = REQUESTS[case]
    check(busy, lambda: bad(busy, busy.model, Path()), said, undisturbed)


PARAMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": -0.5}, ("temperature=-0.5", "0 (greedy) or above")),
    ({"temperature": float("nan")}, ("temperature=nan", "finite")),
    ({"temperature": "hot"}, ("temperature='hot'", "a number")),
    ({"top_p": 0}, ("top_p=0", "in (0, 1]")),
    ({"top_p": 1.5}, ("top_p=1.5", "in (0, 1]")),
    ({"min_p": -0.1}, ("min_p=-0.1", "in [0, 1]")),
    ({"min_p": 1.1}, ("min_p=1.1", "in [0, 1]")),
    ({"top_k": -2}, ("top_k=-2", "at least -1")),
    ({"top_k": 1.5}, ("top_k=1.5", "an integer")),
    ({"max_tokens": 0}, ("max_tokens=0", "at least 1")),
    ({"min_tokens": 17}, ("min_tokens=17", "max_tokens=16", "raise max_tokens")),
    ({"stop": [""]}, ("stop=", "non-empty")),
    ({"stop_token_ids": [-1]}, ("stop_token_ids", "at least 0")),
    ({"seed": "x"}, ("seed='x'", "an integer")),
    ({"temprature": 1}, ("unknown keyword 'temprature'", "did you mean temperature?")),
    ({"florp": 1}, ("unknown keyword 'florp'", "supported: ", "max_tokens")),
]


@pytest.mark.parametrize(("fields", "said"), PARAMS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_sampling_params(
    fields: dict[str, Any], said: tuple[str, ...], busy: Engine, undisturbed: dict[str, list[int]]
) -> None:
    check(busy, lambda: busy.add_request([1], SamplingParams(**fields)), said, undisturbed)


def knobs(**given: Any) -> Case:
    defaults = {"backend": "eager", "progress": False, "block_size": 4, "num_blocks": 20}
    return lambda engine, model, path: runtime.compile(model, **{**defaults, **given})


def folder(change: Callable[[Path], object]) -> Case:
    """Compile a folder of three shards after `change` did something to it."""

    def case(engine: Engine, model: PreTrainedModel, path: Path) -> object:
        model.save_pretrained(path, max_shard_size="50KB")
        assert len(list(path.glob("*.safetensors"))) > 2
        change(path)
        return runtime.compile(path, backend="eager", progress=False)

    return case


def last_shard(path: Path) -> Path:
    return max(path.glob("*.safetensors"))


def truncate(path: Path) -> None:
    last_shard(path).write_bytes(last_shard(path).read_bytes()[:-8])


def remove_shards(path: Path) -> None:
    for file in path.glob("*safetensors*"):
        file.unlink()


def retype(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "florp"}))


def named(name: str) -> Case:
    return lambda engine, model, path: runtime.compile(name, backend="eager", progress=False)


SUPPORTED = "a folder with config.json and *.safetensors"
MODELS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "unknown keyword": (knobs(blocksize=4), ("unknown keyword 'blocksize'", "did you mean block_size?")),
    "unlike any keyword": (
        knobs(xyzzy=4),
        ("unknown keyword 'xyzzy'", "supported: async_scheduling, backend, block_size"),
    ),
    "block_size 0": (knobs(block_size=0), ("block_size", "at least 1", "0")),
    "block_size 2.0": (knobs(block_size=2.0), ("block_size", "whole number", "2.0")),
    "pool of one block": (knobs(num_blocks=1), ("num_blocks", "at least 2", "null block")),
    "pool of one token": (knobs(num_blocks=2, block_size=1), ("1 tokens", "raise num_blocks")),
    "pool of ten bytes": (
        knobs(num_blocks=None, kv_cache_memory_bytes=10),
        ("kv_cache_memory_bytes=10", "raise it to 3072", "block_size"),
    ),
    "no sequences": (knobs(max_num_seqs=0), ("max_num_seqs", "at least 1")),
    "no tokens": (knobs(max_num_batched_tokens=0), ("max_num_batched_tokens", "at least 1")),
    "max_model_len 1": (knobs(max_model_len=1), ("max_model_len", "at least 2")),
    "utilization": (knobs(gpu_memory_utilization=1.5), ("gpu_memory_utilization", "(0, 1]", "1.5")),
    "unknown dtype": (knobs(dtype="float8"), ("dtype", "'auto'", "bfloat16", "'float8'")),
    "integer dtype": (knobs(dtype=torch.int8), ("dtype", "float32", "torch.int8")),
    "unknown device": (knobs(device="abacus"), ("device", "'cpu'", "'abacus'")),
    "unsupported device": (knobs(device="meta"), ("device", "'cpu'", "'meta'")),
    "unknown backend": (knobs(backend="jax"), ("backend", "inductor, eager", "'jax'")),
    "missing shard": (
        folder(lambda path: last_shard(path).unlink()),
        ("names shards that are missing", "model-0000", ".safetensors", "download them"),
    ),
    "truncated shard": (folder(truncate), ("model-0000", "truncated or damaged", "bytes", "download it again")),
    "no shards": (
        folder(remove_shards),
        ("no *.safetensors", "supported: a folder of *.safetensors, sharded or not"),
    ),
    "no config": (folder(lambda path: (path / "config.json").unlink()), ("no config.json", SUPPORTED)),
    "unknown architecture": (folder(retype), ("config.json", "'florp' is unknown", "transformers")),
    "not a language model": (
        folder(lambda path: ViTConfig().save_pretrained(path)),
        ("ViTConfig", "AutoModelForCausalLM", "LlamaConfig"),
    ),
    "missing folder": (
        lambda engine, model, path: runtime.compile(path / "nowhere", backend="eager"),
        ("nowhere is not a folder", SUPPORTED),
    ),
    "missing folder as text": (
        named("./no/such/folder"),
        ("./no/such/folder", "neither a folder nor a hub id", SUPPORTED),
    ),
    "hub id offline": (named("nobody/nothing"), ("'nobody/nothing'", "neither a folder nor a hub id", SUPPORTED)),
}


@pytest.mark.parametrize("case", MODELS)
def test_bad_model_or_knob(
    case: str, busy: Engine, tiny_model: TinyModel, undisturbed: dict[str, list[int]], tmp_path: Path
) -> None:
    bad, said = MODELS[case]
    check(busy, lambda: bad(busy, tiny_model("llama"), tmp_path), said, undisturbed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_cuda_without_cuda(
    busy: Engine, tiny_model: TinyModel, undisturbed: dict[str, list[int]], tmp_path: Path
) -> None:
    bad = knobs(device="cuda")
    check(
        busy,
        lambda: bad(busy, tiny_model("llama"), tmp_path),
        ("'cuda'", "no CUDA device", "device='cpu'"),
        undisturbed,
    )


def test_text_that_makes_no_tokens(tiny_model: TinyModel, make_engine: MakeEngine, byte_tokenizer: Any) -> None:
    engine = make_engine(tiny_model("llama"), tokenizer=byte_tokenizer)
    with pytest.raises(ValueError, match=r"an empty prompt: give at least one token"):
        engine.add_request("")
    with pytest.raises(ValueError, match=r"streaming text needs a tokenizer: .*tokenizer="):
        next(make_engine(tiny_model("llama")).stream([1]))


@pytest.mark.parametrize("prompt", [(3, 4), [np.int64(3), np.int32(4)]])
def test_what_is_as_good_as_a_list_of_ids(prompt: Any, tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    engine, greedy = make_engine(tiny_model("llama")), SamplingParams(temperature=0)
    expected, found = (engine.generate(p, greedy, progress=False)[0] for p in ([3, 4], prompt))
    assert found.prompt_token_ids == [3, 4]
    assert all(type(token) is int for token in found.prompt_token_ids)
    assert found.outputs == expected.outputs


def test_learned_positions_are_a_hard_limit(tiny_model, make_engine) -> None:
    with pytest.raises(ValueError, match="max_model_len=300 is beyond the model's table of 256 learned positions"):
        make_engine(tiny_model("gpt2"), max_model_len=300)


def test_beyond_rope_positions_only_warns(tiny_model, make_engine) -> None:
    with pytest.warns(UserWarning, match="beyond the 256 positions"):
        make_engine(tiny_model("llama"), max_model_len=300)


def test_params_must_be_sampling_params(tiny_model, make_engine) -> None:
    engine = make_engine(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"params must be a runtime\.SamplingParams, not dict"):
        engine.add_request([1, 2], {"max_tokens": 3})


@pytest.mark.parametrize(("knob", "value"), [("seed", "x"), ("enable_prefix_caching", "no"), ("seed", True)])
def test_knobs_of_the_wrong_type(tiny_model, make_engine, knob: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{knob} must be"):
        make_engine(tiny_model("llama"), **{knob: value})


def test_an_automatic_id_avoids_the_users(tiny_model, make_engine, drain) -> None:
    engine = make_engine(tiny_model("llama"))
    engine.add_request([1, 2], request_id="request-1")
    assert engine.add_request([3, 4]) == "request-1'"
    assert len(drain(engine)) == 2


def test_a_closed_engine_says_so(tiny_model, make_engine) -> None:
    engine = make_engine(tiny_model("llama"))
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        _ = engine.report


@pytest.mark.parametrize(("name", "value"), [("cache_salt", 5), ("request_id", 5), ("request_id", [1])])
def test_ids_and_salts_are_text(tiny_model, make_engine, drain, name: str, value: object) -> None:
    engine = make_engine(tiny_model("llama"))
    engine.add_request([1, 2])
    with pytest.raises(ValueError, match=f"{name} must be text"):
        engine.add_request([1, 2], **{name: value})
    assert len(drain(engine)) == 1


def test_providers_can_be_named(tiny_model, make_engine) -> None:
    report = make_engine(tiny_model("llama"), providers={"sample": "reference"}).report
    assert report.providers["sample"].reason == "asked for"
    assert "sample: provider reference (asked for)" in str(report)
    assert f"paged_attention: provider {report.providers['paged_attention'].provider} (" in str(report)
    with pytest.raises(ValueError, match="unknown provider 'cuda' of sample; on cpu with float32 there are"):
        make_engine(tiny_model("llama"), providers={"sample": "cuda"})
    with pytest.raises(ValueError, match="unknown op 'smaple'"):
        make_engine(tiny_model("llama"), providers={"smaple": "reference"})


def test_a_tokenizer_that_fails_ends_its_own_request_only(tiny_model, make_engine, byte_tokenizer, drain) -> None:
    model = tiny_model("llama")
    plain = make_engine(model).generate([5, 6], runtime.SamplingParams(temperature=0), progress=False)[0]
    engine = make_engine(model, tokenizer=byte_tokenizer)
    engine.add_request([5, 6], runtime.SamplingParams(temperature=0), request_id="good")
    engine.add_request([5, 6], runtime.SamplingParams(temperature=1, seed=0, max_tokens=200), request_id="bad")
    fail, wait = engine._completions["bad"], 3
    original = fail.take

    def take(request):
        nonlocal wait
        wait -= 1
        if wait == 0:
            raise IndexError("no such token")
        return original(request)

    fail.take = take  # type: ignore[method-assign]
    outputs = drain(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert len(outputs["bad"].outputs[0].token_ids) == 3
    assert outputs["good"].outputs[0].token_ids == plain.outputs[0].token_ids
