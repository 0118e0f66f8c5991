"""Artifacts: without compiler and model code they serve what was exported; what does not fit is refused."""

import copy
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import runtime
from graphs.compiled_graph import CompiledGraph
from graphs.sealed_folder import MANIFEST, DamagedFolderError, seal, unseal
from models.checkpoint import Checkpoint
from runtime import SamplingParams
from runtime.artifact import ArtifactError
from runtime.artifact import inspect as summary
from runtime.engine import Engine

TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, list[int], int], list[int]]
Tokens = dict[str, list[list[int]]]

ROOT = Path(__file__).parents[2]
KNOBS = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 9, "num_threads": 1, "progress": False}
GREEDY = SamplingParams(max_tokens=10, temperature=0)
PROMPT = [(7 * i + 3) % 250 for i in range(21)]
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},  # enough for equal layers to be one unit
    "qwen3": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "gemma3_text": {**TWO_LAYERS, "tie_word_embeddings": True},
    "mixtral": {"num_hidden_layers": 2},
    "gpt_oss": TWO_LAYERS,
}
FROM_MEMORY = ("gemma3_text", "mixtral")


def serve(engine):
    """Tokens of prompts in pieces among running requests, with shared prefixes, greedy and drawn, forked and searched.

    Runs in other processes too, so it takes nothing from this module.
    """
    from runtime import BeamSearchParams, SamplingParams

    prompts = [[(7 * i + 3) % 250 for i in range(length)] for length in (13, 1, 21)]
    prompts.append([*prompts[2][:17], 5, 6, 7])
    outputs = {}

    def step():
        outputs.update({output.request_id: output for output in engine.step()})

    for index, prompt in enumerate(prompts):
        greedy, drawn = (SamplingParams(max_tokens=10, temperature=t, top_p=0.9, seed=index) for t in (0, 0.8))
        engine.add_request(prompt, drawn if index % 2 else greedy, request_id=str(index))
        step()
    engine.add_request(prompts[0], SamplingParams(n=2, max_tokens=8, seed=9), request_id="two")
    engine.add_request(prompts[1], BeamSearchParams(beam_width=2, max_tokens=6), request_id="beams")
    while not outputs.get("2"):
        step()
    engine.fork("2", SamplingParams(max_tokens=12, seed=3), new_id="fork")
    while engine.has_unfinished_requests():
        step()
    engine.check_integrity()
    return {name: [one.token_ids for one in output.outputs] for name, output in outputs.items()}


BARE = """
import json, sys
import runtime

{serve}

found = {{}}
for name, path in json.loads(sys.argv[1]).items():
    with runtime.load(path, progress=False) as engine:
        text = None
        if engine.tokenizer is not None:
            text = engine.generate("ab", runtime.SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].text
        found[name] = [serve(engine), text]
print(json.dumps({{"found": found, "modules": sorted(sys.modules)}}))
"""


def stub_graph(folder):
    """A graph of one unit that is no code, for an artifact that nobody gets to run."""
    from graphs.program import Call, Program

    folder.mkdir()
    (folder / "unit-0.pt2").write_bytes(b"no code")
    return CompiledGraph(folder, Program(4, (), 0, (Call(0, (), (), ()),), ()), ())


KILLED = """
import os, signal, sys
from pathlib import Path
import runtime
import runtime.artifact_writer as writer
from graphs.compiled_graph import Compiled, CompiledGraph

{stub_graph}

def kill(folder, content):
    assert len(list(folder.iterdir())) > 1
    os.kill(os.getpid(), signal.SIGKILL)

writer.seal = kill
model, target, scratch = map(Path, sys.argv[1:])
engine = runtime.compile(model, backend="eager", device="cpu", progress=False)
engine.runner.compiled = Compiled(None, (), stub_graph(scratch / "stub"))
engine.export(target)
"""


def run(code: str, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def load(path: Path, **knobs: Any) -> Engine:
    return runtime.load(path, progress=False, **knobs)


def tokens(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return engine.generate(prompt, params, progress=False)[0].outputs[0].token_ids


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 258 tokens, the second of which ends a text."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials = ["<s>", "</s>"]
    trainer = BpeTrainer(
        vocab_size=258, special_tokens=specials, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@dataclass(frozen=True)
class Made:
    """A checkpoint, artifacts of it without and with the weights, and what the exporting engine served."""

    folder: Path
    plain: Path
    included: Path
    tokens: Tokens
    text: str | None
    units: int
    cached: Path


@pytest.fixture(scope="module")
def made(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """`made(family)`: artifacts of a small model of the family, compiled once."""

    @cache
    def make(family: str) -> Made:
        parent = tmp_path_factory.mktemp(family)
        folder, plain, included = parent / "weights", parent / "plain", parent / "included"
        tiny_model(family, **SIZES[family]).save_pretrained(folder)
        if family == "qwen3":
            save_tokenizer(folder)
        with runtime.compile(folder, device="cpu", **KNOBS) as engine:
            engine.export(plain)
            engine.export(included, include_weights=True)
            text = None
            if engine.tokenizer is not None:
                params = SamplingParams(max_tokens=5, temperature=0)
                text = engine.generate("ab", params, progress=False)[0].outputs[0].text
            graph = engine.runner.compiled.graph
            return Made(folder, plain, included, serve(engine), text, graph.program.num_units, graph.folder)

    return make


@pytest.fixture(scope="module")
def from_memory(
    made: Callable[[str], Made], tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`from_memory(family)`: an artifact of the same model, which was given as a module."""

    @cache
    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp(family) / "from memory"
        assert made(family).cached.exists()
        with runtime.compile(tiny_model(family, **SIZES[family]), **KNOBS) as engine:
            assert engine.runner.compiled.num_graphs == 0, "the folder's graph is in the compile cache"
            with pytest.raises(ValueError, match=r"came from memory.*include_weights=True"):
                engine.export(path)
            engine.export(path, include_weights=True)
        return path

    return make


@pytest.fixture(scope="module")
def bare(
    made: Callable[[str], Made], from_memory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one process without compiler and caches finds, serving every artifact."""
    folder = tmp_path_factory.mktemp("bare")
    caches = [folder / name for name in ("PAGEGRAPH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    for place in (*caches, folder / "bin"):
        place.mkdir()
    paths = {family: made(family).plain for family in SIZES}
    paths |= {f"{family}, weights included": made(family).included for family in SIZES}
    paths |= {f"{family}, from memory": from_memory(family) for family in FROM_MEMORY}
    paths["llama, some rules"] = folder / "rules"
    resealed(made("llama").plain, folder / "rules", lambda content: content["graph_knobs"].update(rules=["merge_qkv"]))
    variables = {place.name: str(place) for place in caches}
    code = BARE.format(serve=inspect.getsource(serve))
    given = json.dumps({name: str(path) for name, path in paths.items()})
    done = run(code, given, PATH=str(folder / "bin"), CXX="", **variables)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "written": [str(path) for place in caches for path in place.rglob("*")]}


def resealed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of an artifact with another content of its manifest, by hashes in order."""
    shutil.copytree(source, target)
    content = unseal(target)
    change(content)
    seal(target, content)
    return target


@pytest.mark.compile
@pytest.mark.parametrize("family", SIZES)
def test_another_process_serves_the_same_tokens(
    family: str, made: Callable[[str], Made], bare: dict[str, Any], tiny_model: TinyModel, hf_greedy: Greedy
) -> None:
    expected = made(family)
    assert expected.tokens["2"] == [hf_greedy(tiny_model(family, **SIZES[family]), PROMPT, 10)]
    assert expected.tokens.keys() == {"0", "1", "2", "3", "two", "beams", "fork"}
    assert expected.units == (3 if family == "llama" else 1)
    found = {name: tokens for name, tokens in bare["found"].items() if name.startswith(family)}
    assert len(found) == 2 + (family in FROM_MEMORY) + (family == "llama")
    for name, (tokens, text) in found.items():
        assert tokens == expected.tokens, name
        assert text == (None if name == "qwen3, from memory" else expected.text), name
    assert (expected.text is None) is (family != "qwen3")


@pytest.mark.compile
def test_no_compiler_and_no_model_code_is_needed(bare: dict[str, Any]) -> None:
    assert len(bare["found"]) == 2 * len(SIZES) + len(FROM_MEMORY) + 1
    heavy = re.compile(r"torch\._(dynamo|inductor)\b|transformers\.models\..*\.modeling_")
    assert [name for name in bare["modules"] if heavy.match(name)] == []
    assert "transformers.tokenization_utils_base" in bare["modules"], "of the one with a tokenizer"
    assert bare["written"] == []


@pytest.mark.compile
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(26, 64), (150, 250)])
def test_pool_and_lengths_may_change(num_blocks: int, max_model_len: int, made: Callable[[str], Made]) -> None:
    knobs = {"num_blocks": num_blocks, "max_model_len": max_model_len, "max_num_batched_tokens": 40, "max_num_seqs": 9}
    with load(made("gemma3_text").plain, **knobs) as engine:
        assert serve(engine) == made("gemma3_text").tokens
        assert engine.max_model_len == max_model_len
        assert engine.memory_report().pool.num_blocks == num_blocks
        assert (engine.config.block_size, engine.config.max_num_seqs, engine.max_num_batched_tokens) == (4, 9, 40)
        with pytest.raises(ValueError, match="max_model_len"):
            engine.add_request([1] * max_model_len)


@pytest.mark.compile
def test_a_pool_in_bytes_takes_the_place_of_one_in_blocks(made: Callable[[str], Made]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load(made("llama").plain, kv_cache_memory_bytes=1 << 20) as engine:
            pool = engine.memory_report().pool
    assert pool.num_blocks == (1 << 20) // pool.bytes_per_block != KNOBS["num_blocks"]


@pytest.mark.compile
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_included_weights_are_mapped_and_not_read(made: Callable[[str], Made]) -> None:
    with load(made("mixtral").included) as engine:
        assert str(made("mixtral").included / "weights.safetensors") in Path("/proc/self/maps").read_text()
        assert tokens(engine) == made("mixtral").tokens["2"][0]


@pytest.mark.compile
def test_a_folder_that_moved_is_named_by_model(
    made: Callable[[str], Made], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """There the same tensors may lie in other files; the artifact itself may move too."""
    artifact, sharded = tmp_path / "artifact", tmp_path / "sharded"
    shutil.copytree(made("llama").plain, artifact)
    tiny_model("llama", **SIZES["llama"]).save_pretrained(sharded, max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    moved = made("llama").folder.rename(tmp_path / "moved")
    try:
        with pytest.raises(ValueError, match=r"weights in .*weights, which is not there: .*model=FOLDER"):
            load(artifact)
        for model in (moved, str(sharded)):
            with load(artifact, model=model) as engine:
                assert serve(engine) == made("llama").tokens
    finally:
        moved.rename(made("llama").folder)


@pytest.mark.compile
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["plain", "included"])
def test_new_weights_in_a_loaded_engine(
    family: str, kind: str, made: Callable[[str], Made], tiny_model: TinyModel, tmp_path: Path
) -> None:
    old, new = tiny_model(family, **SIZES[family]), copy.deepcopy(tiny_model(family, **SIZES[family]))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.flip(0) if parameter.ndim > 1 else parameter.flip(0) + 0.1)
    new.save_pretrained(tmp_path / "new")
    tiny_model("qwen3", **SIZES["qwen3"]).save_pretrained(tmp_path / "another")

    def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()

    artifact = getattr(made(family), kind)
    with load(artifact) as engine:
        engine.add_request(PROMPT, GREEDY, request_id="running")
        while engine.stats().num_output_tokens < 4:
            engine.step()
        with pytest.raises(ValueError, match=r"lack .* recorded tensors"):
            engine.load_weights(tmp_path / "another")
        engine.load_weights(tmp_path / "new")
        outputs = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
        kept = greedy(old, PROMPT, 4)
        assert outputs[0].outputs[0].token_ids == kept + greedy(new, PROMPT + kept, 6)
        assert tokens(engine) == greedy(new, PROMPT, 10) != greedy(old, PROMPT, 10)
        checkpoint = Checkpoint(made(family).folder)
        engine.load_weights({name: checkpoint.get(name) for name in checkpoint.names()})
        assert tokens(engine) == greedy(old, PROMPT, 10)
    unseal(artifact)


@pytest.mark.compile
def test_what_an_artifact_lacks_is_said(
    from_memory: Callable[[str], Path], made: Callable[[str], Made], byte_tokenizer: Any, tmp_path: Path
) -> None:
    path, folder = from_memory("mixtral"), made("mixtral").folder
    with load(path, tokenizer=byte_tokenizer) as engine:
        assert len("".join(engine.stream("text", GREEDY)).encode()) > 0
        for call in (engine.self_check, lambda: engine.model):
            with pytest.raises(ValueError, match=r"holds no model's code: use runtime\.compile"):
                call()
        with pytest.raises(ValueError, match="from a model in memory"):
            engine.load_weights(folder)
        with pytest.raises(ValueError, match="loaded from an artifact: copy that folder"):
            engine.export(tmp_path / "again")
        report = engine.memory_report()
        assert report.activations is None
        assert report.weights == sum(tensor.nbytes for tensor in load_file(path / "weights.safetensors").values())
        assert "unknown" in str(report)
        assert "holds no model to estimate them with" in str(report)
        assert serve(engine) == made("mixtral").tokens, "after all that"
    with pytest.raises(ValueError, match=f"model='{folder}' is of no use: .* includes its weights"):
        load(path, model=folder)


@pytest.mark.compile
def test_a_summary_for_people(made: Callable[[str], Made]) -> None:
    page = summary(made("llama").plain)
    for part in (
        f"artifact {made('llama').plain}, ",
        f"for torch {torch.__version__} on ",
        "graph: 3 units, called 7 times; backend=inductor, block_size=4, dtype=float32, optimize=startup",
        f"weights: those of {made('llama').folder.resolve()}, fingerprint ",
        "other knobs: max_num_batched_tokens=9, num_blocks=60, num_threads=1",
        "LlamaForCausalLM",
    ):
        assert part in page
    assert "weights: included" in summary(made("llama").included)


@pytest.mark.compile
@pytest.mark.usefixtures("no_code")
def test_one_changed_byte_of_any_member_is_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(made("qwen3").included, artifact)
    members = {str(path.relative_to(artifact)) for path in artifact.rglob("*") if path.is_file()}
    assert members >= {MANIFEST, "ops.so", "tensors.safetensors", "unit-0.pt2", "weights.safetensors"}
    assert members >= {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    for name in sorted(members):
        path = artifact / name
        data = path.read_bytes()
        for offset in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[offset] ^= 1 << offset % 8
            path.write_bytes(changed)
            with pytest.raises(DamagedFolderError, match=re.escape(name)) as caught:
                load(artifact)
            assert caught.value.member == name
            with pytest.raises(DamagedFolderError):
                summary(artifact)
        path.write_bytes(data)
    assert unseal(artifact)["included"]


@pytest.mark.compile
def test_an_entry_of_the_compile_cache_is_no_artifact(made: Callable[[str], Made]) -> None:
    with pytest.raises(ValueError, match=f"{made('llama').cached} is no artifact; supported: "):
        load(made("llama").cached)


@pytest.fixture(scope="module")
def checkpoint(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "weights"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stubbed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that takes a stub for its compiled graph, to be exported."""
    from graphs.compiled_graph import Compiled

    with runtime.compile(checkpoint, backend="eager", device="cpu", progress=False) as engine:
        engine.runner.compiled = Compiled(None, (), stub_graph(tmp_path_factory.mktemp("graph") / "stub"))
        yield engine


@pytest.fixture(scope="module")
def stub(stubbed: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without code, to be refused."""
    path = tmp_path_factory.mktemp("stub") / "artifact"
    stubbed.export(path)
    return path


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing load code, not even a library that is loaded already."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"code was loaded: {args}")

    monkeypatch.setattr("ops.cpu.library.load", refuse)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", refuse)
    monkeypatch.setattr(torch.ops, "load_library", refuse)


Change = Callable[[dict[str, Any]], object]
MISMATCHES: dict[str, tuple[Change, str, str, str]] = {  # change of what is required, field, expected, found
    "torch": (lambda r: r.update(torch="2.10.0"), "torch", "2.10.0", re.escape(torch.__version__)),
    "format": (lambda r: r.update(format=99), "format", "99", "1"),
    "abi": (lambda r: r.update(abi="0123456789abcdef"), "abi", "0123456789abcdef", "[0-9a-f]{16}"),
    "machine": (lambda r: r["device"].update(machine="vax"), "device machine", "vax", os.uname().machine),
    "isa": (lambda r: r["device"]["isa"].append("avx9"), "device isa", ".*avx9", "a CPU without avx9"),
    "schema": (lambda r: r["op schemas"].update(linear="77"), "schema of op linear", "77", "[0-9a-f]+"),
    "op": (lambda r: r["op schemas"].update(divine="77"), "schema of op divine", "77", "no such op"),
}


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("what", MISMATCHES)
def test_an_artifact_for_something_else_is_refused(what: str, stub: Path, tmp_path: Path) -> None:
    change, field, expected, found = MISMATCHES[what]
    path = resealed(stub, tmp_path / "other", lambda content: change(content["requires"]))
    message = f"{path} cannot be used here: {field}: it was made for {expected}, here is {found}; export it anew here$"
    with pytest.raises(ArtifactError, match=message) as caught:
        load(path)
    assert caught.value.field == field


@pytest.mark.usefixtures("no_code")
def test_an_artifact_for_another_gpu_is_refused(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"type": "cuda", "capability": "9.0", "cuda": "13.0"}
    path = resealed(stub, tmp_path / "gpu", lambda content: content["requires"].update(device=gpu))
    if not torch.cuda.is_available():
        with pytest.raises(ArtifactError, match="device type: it was made for cuda, here is cpu"):
            load(path)
    for field, other in (("capability", "8.6"), ("cuda", "12.8")):
        monkeypatch.setattr("runtime.artifact.describe", lambda device, changed={field: other}: {**gpu, **changed})
        with pytest.raises(ArtifactError, match=f"device {field}: it was made for {gpu[field]}, here is {other};"):
            load(path)


@pytest.mark.usefixtures("no_code")
def test_other_weights_are_refused(stub: Path, checkpoint: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 2**-10
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    expected = unseal(stub)["weights"]
    message = f"weights' fingerprint: it was made for {expected}, here is (?!{expected})[0-9a-f]{{64}} in {other}"
    with pytest.raises(ArtifactError, match=message):
        load(stub, model=other)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    shapes = r"weights: it was made for .*, here is .*'model.norm.weight' as float32 \(31,\); expected.* \(32,\)"
    with pytest.raises(ArtifactError, match=shapes):
        load(stub, model=other)
    (other / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{other} holds no \\*.safetensors"):
        load(stub, model=other)


@pytest.mark.usefixtures("no_code")
def test_a_member_that_is_missing_or_new_is_refused(stub: Path, tmp_path: Path) -> None:
    for name in ("unit-0.pt2", "tensors.safetensors"):
        path = tmp_path / f"without {name}"
        shutil.copytree(stub, path)
        (path / name).unlink()
        with pytest.raises(DamagedFolderError, match=f"damaged: {name}: expected a file, found nothing"):
            load(path)
    shutil.copytree(stub, tmp_path / "more")
    (tmp_path / "more" / "unit-1.pt2").write_bytes(b"")
    with pytest.raises(DamagedFolderError, match=r"damaged: unit-1\.pt2: expected nothing, found a file"):
        load(tmp_path / "more")


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("block_size", 8),
        ("dtype", "bfloat16"),
        ("backend", "eager"),
        ("providers", {"sample": "reference"}),
        ("rules", []),
        ("optimize", "latency"),
        ("eager_start", True),
    ],
)
def test_a_knob_of_the_graph_is_refused(knob: str, value: Any, stub: Path) -> None:
    with pytest.raises(ValueError, match=f"^{knob} is (part of what was compiled|of no use)"):
        load(stub, **{knob: value})


def test_a_misspelt_knob_is_refused(stub: Path) -> None:
    with pytest.raises(
        ValueError, match=r"runtime\.load got an unknown keyword 'num_block'; did you mean num_blocks\?"
    ):
        load(stub, num_block=9)


def test_a_knob_out_of_range_is_refused(stub: Path) -> None:
    with pytest.raises(ValueError, match="num_blocks must be a whole number of at least 2"):
        load(stub, num_blocks=1)
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or"):
        load(stub, device="tpu")


def test_what_is_no_artifact_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{path} is not a folder; supported: a folder that engine.export"):
            load(path)
    for path in (tmp_path / "empty", checkpoint):
        with pytest.raises(ValueError, match=f"{path} holds no manifest.json: it is no artifact.*; supported: "):
            load(path)
    seal(tmp_path / "empty", {"description": "something else"})
    with pytest.raises(ValueError, match="is no artifact; supported: "):
        load(tmp_path / "empty")


def test_what_cannot_be_exported_is_refused(stubbed: Engine, stub: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in stub.rglob("*")}
    (tmp_path / "file").write_bytes(b"")
    for path in (stub, tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{path} is there already: remove it, or give another folder"):
            stubbed.export(path)
    assert {path: path.stat().st_mtime_ns for path in stub.rglob("*")} == before
    with (
        runtime.compile(tiny_model("llama"), backend="eager", progress=False) as engine,
        pytest.raises(ValueError, match="nothing is compiled"),
    ):
        engine.export(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_becomes_the_artifact(stubbed: Engine, stub: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    stubbed.export(tmp_path / "new")
    assert unseal(tmp_path / "new") == unseal(stub)


def test_a_tokenizer_that_cannot_be_written_is_named(
    stubbed: Engine, checkpoint: Path, byte_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runtime.compile(checkpoint, tokenizer=byte_tokenizer, backend="eager", device="cpu", progress=False) as engine:
        engine.runner.compiled = stubbed.runner.compiled
        engine.export(tmp_path / "artifact")
    assert "the tokenizer, a ByteTokenizer, is not in the artifact: give it to runtime.load" in caplog.text
    assert not (tmp_path / "artifact" / "tokenizer").exists()


def test_a_killed_export_leaves_no_artifact(stubbed: Engine, stub: Path, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    (tmp_path / "scratch").mkdir()
    done = run(KILLED.format(stub_graph=inspect.getsource(stub_graph)), checkpoint, target, tmp_path / "scratch")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 2, "what it had written lies beside"
    stubbed.export(target)
    assert unseal(target) == unseal(stub)
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", "scratch"}, "and is removed by the next"


def test_a_closed_engine_exports_nothing(checkpoint: Path, tmp_path: Path) -> None:
    engine = runtime.compile(checkpoint, backend="eager", device="cpu", progress=False)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.export(tmp_path / "new")
