"""The `pagegraph` command on a tiny model in a folder: what goes to stdout, and what a user's error looks like."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MambaConfig, PreTrainedTokenizerFast

import runtime
from graphs.sealed_folder import seal
from models.checkpoint import Checkpoint
from runtime import SamplingParams
from runtime.cli import main
from runtime.engine import Engine

ROOT = Path(__file__).parents[2]
PROMPT = "to be or"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a byte-level tokenizer (one token a byte) and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def generate(folder: Path, *options: str) -> int:
    return main(["generate", "--model", str(folder), "--backend", "eager", "--max-model-len", "64", *options])


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """What the engine says to PROMPT in 12 greedy tokens."""
    with runtime.compile(folder, backend="eager", progress=False, max_model_len=64) as engine:
        params = SamplingParams(max_tokens=12, temperature=0)
        return engine.generate(PROMPT, params, progress=False)[0].outputs[0].text


def test_only_the_text_is_on_stdout(folder: Path, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, PROMPT, "--max-tokens", "12") == 0
    output = capfd.readouterr()
    assert output.out == expected + "\n"
    assert "12 tokens, decode" in output.err
    assert all(f"{phase} " in output.err for phase in ("fetch", "load", "compile", "prefill", "decode"))


def test_quiet_says_nothing_else(folder: Path, expected: str) -> None:
    command = [sys.executable, "-m", "runtime.cli", "generate", PROMPT, "--model", str(folder), "--quiet"]
    options = ["--backend", "eager", "--max-tokens", "12", "--max-model-len", "64"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (expected + "\n", "")


def test_prompt_from_standard_input(
    folder: Path, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate(folder, "-", "--max-tokens", "12") == 0
    assert capfd.readouterr().out == expected + "\n"


def test_chat_wraps_the_prompt(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "hi", "--chat", "--max-tokens", "5") == 0
    chat = capfd.readouterr().out
    assert generate(folder, "<hi>", "--max-tokens", "5") == 0
    assert capfd.readouterr().out == chat


def test_stop_text_ends_the_output(folder: Path, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    stop = expected[3:5]
    assert generate(folder, PROMPT, "--max-tokens", "12", "--stop", stop) == 0
    assert capfd.readouterr().out == expected[: expected.find(stop)] + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((PROMPT, "--temperature", "-1"), "temperature"),
        ((PROMPT, "--max-tokens", "0"), "max_tokens"),
        ((PROMPT, "--dtype", "int3"), "dtype must be"),
        (("x" * 64,), "max_model_len"),
        (("",), "empty prompt"),
    ],
)
def test_a_users_error_is_one_line(
    folder: Path, options: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, *options) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    assert output.err.splitlines()[-1].startswith("pagegraph: ")
    assert message in output.err.splitlines()[-1]


def test_a_memory_report_shows_the_request_before_its_end(
    folder: Path, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.txt"
    assert generate(folder, PROMPT, "--max-tokens", "12", "--memory-report", str(file)) == 0
    assert capfd.readouterr().out == expected + "\n"
    page = file.read_text()
    assert page.startswith("memory by owner\n")
    (line,) = [line for line in page.splitlines() if "request-0" in line]
    assert "running" in line
    assert "logical 0..1 -> physical 1+ 2 " in line, "8 tokens of the prompt, and from 9 to 11 of the 12 that follow"


def test_a_memory_report_as_json(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert generate(folder, PROMPT, "--max-tokens", "12", "--memory-report", str(file), "--quiet") == 0
    report = json.loads(file.read_text())
    (request,) = report["requests"]
    assert request["num_tokens"] == request["num_computed_tokens"] + 1 <= len(PROMPT) + 11
    assert report["pool"]["num_used"] == len(request["table"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_memory_report_after_one_token_shows_what_is_left(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    assert generate(folder, PROMPT, "--max-tokens", "1", "--memory-report", str(file)) == 0
    assert "no live requests" in file.read_text()


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_picture_of_the_memory_has_its_text_beside_it(folder: Path, tmp_path: Path, name: str, start: bytes) -> None:
    assert generate(folder, PROMPT, "--memory-report", str(tmp_path / name)) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert "request-0" in (tmp_path / "a.txt").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("report", "must be one of .txt, .json, .png, .svg, .pdf"),
        ("report.jpeg", "must be one of .txt, .json, .png, .svg, .pdf"),
        ("none/report.txt", "none/report.txt cannot be written"),
        ("folder.json", "folder.json cannot be written"),
        ("folder.png", "folder.txt cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written_ends_before_the_model_is_looked_for(
    tmp_path: Path, name: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for taken in ("folder.json", "folder.txt"):
        (tmp_path / taken).mkdir()
    assert generate(tmp_path / "no model", PROMPT, "--memory-report", str(tmp_path / name)) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "no model" not in error


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert generate(tmp_path / "no model", PROMPT, "--memory-report", str(tmp_path / "a.png")) == 2
    assert "pip install matplotlib" in capfd.readouterr().err


def test_a_missing_model_names_what_is_supported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(tmp_path / "nothing", PROMPT) == 2
    assert "config.json" in capfd.readouterr().err


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What runtime.compile is called with; nothing is compiled."""
    given: dict[str, Any] = {}

    def stand_in(model: Path, **knobs: Any) -> Engine:
        given.update(model=model, **knobs)
        raise ValueError("that is enough")

    monkeypatch.setattr(runtime, "compile", stand_in)
    return given


def test_the_command_serves_uncompiled_while_it_compiles(folder: Path, knobs: dict[str, Any]) -> None:
    for options, eager_start in (((), True), (("--no-eager-start",), False), (("--eager-start",), True)):
        assert main(["generate", PROMPT, "--model", str(folder), *options]) == 2
        assert knobs["eager_start"] is eager_start


def test_only_options_that_were_given_reach_the_engine(folder: Path, knobs: dict[str, Any]) -> None:
    assert main(["generate", PROMPT, "--model", str(folder)]) == 2
    assert not knobs.keys() & {"backend", "dtype", "device", "optimize"}
    assert main(["generate", PROMPT, "--model", str(folder), "--dtype", "float16", "--optimize", "latency"]) == 2
    assert (knobs["dtype"], knobs["optimize"]) == ("float16", "latency")


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Engine], None]) -> None:
    """Have runtime.compile return its engine after `change`."""
    compile = runtime.compile

    def make(model: Path, **knobs: Any) -> Engine:
        engine = compile(model, **knobs)
        change(engine)
        return engine

    monkeypatch.setattr(runtime, "compile", make)


def test_the_summary_says_when_the_compiled_graph_took_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def switched(engine: Engine) -> None:
        engine.seconds.eager = 21.34

    monkeypatch.setattr(Engine, "switched_at_step", 14)
    changed(monkeypatch, switched)
    assert generate(folder, PROMPT, "--max-tokens", "2") == 0
    error = capfd.readouterr().err
    assert "compiled graph from step 14 on, after 21.3 s" in error
    assert "goes on in the background" not in error


def test_a_compiler_that_is_not_done_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unfinished(engine: Engine) -> None:
        monkeypatch.setattr(engine, "keep_compiling", lambda: True)

    changed(monkeypatch, unfinished)
    assert generate(folder, PROMPT, "--max-tokens", "2") == 0
    error = capfd.readouterr().err
    assert "the compiler goes on in the background" in error
    assert "compiled graph from" not in error
    assert generate(folder, PROMPT, "--max-tokens", "2", "--quiet") == 0
    assert capfd.readouterr().err == ""


def test_an_artifact_is_served(
    folder: Path, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def load(path: Path, *, progress: bool, **given: Any) -> Engine:
        calls.append((path, given))
        return runtime.compile(folder, backend="eager", max_model_len=64, progress=progress)

    monkeypatch.setattr(runtime, "load", load)
    assert main(["generate", PROMPT, "--artifact", "made", "--max-tokens", "12"]) == 0
    assert capfd.readouterr().out == expected + "\n"
    options = ["--model", "moved", "--device", "cpu", "--max-model-len", "64", "--no-eager-start"]
    assert main(["generate", "x" * 64, "--artifact", "made", *options]) == 2
    assert "max_model_len" in capfd.readouterr().err
    given = {"model": "moved", "device": "cpu", "max_model_len": 64, "eager_start": False}
    assert calls == [(Path("made"), {"model": None}), (Path("made"), given)]


@pytest.mark.compile
def test_an_artifact_is_made_looked_at_and_served(
    folder: Path, expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    artifact = str(tmp_path / "artifact")
    assert main(["export", str(folder), "-o", artifact]) == 0
    assert capfd.readouterr().out == f"{artifact}\n"
    assert main(["export", str(folder), "-o", artifact]) == 2
    assert "exists already" in capfd.readouterr().err
    assert main(["inspect", artifact]) == 0
    assert str(folder) in capfd.readouterr().out
    report = ["--max-model-len", "64", "--memory-report", str(tmp_path / "report.txt")]
    assert main(["generate", PROMPT, "--artifact", artifact, "--max-tokens", "12", *report]) == 0
    assert capfd.readouterr().out == expected + "\n"
    assert "request-0" in (tmp_path / "report.txt").read_text()
    moved = folder.rename(tmp_path / "moved")
    try:
        assert main(["generate", PROMPT, "--artifact", artifact, "--model", str(moved), "--max-tokens", "12"]) == 0
        assert capfd.readouterr().out == expected + "\n"
    finally:
        moved.rename(folder)
    assert main(["generate", PROMPT, "--artifact", artifact, "--dtype", "float16"]) == 2
    assert "dtype is part of what was compiled" in capfd.readouterr().err


def test_an_artifact_without_a_tokenizer_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed = []
    engine = SimpleNamespace(tokenizer=None, close=lambda: closed.append(True))
    monkeypatch.setattr(runtime, "load", lambda path, **knobs: engine)
    assert main(["generate", PROMPT, "--artifact", str(tmp_path)]) == 2
    assert "has no tokenizer" in capfd.readouterr().err
    assert closed == [True]


def test_export_prints_where_the_artifact_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exported = []

    def export(path: Path, *, include_weights: bool) -> None:
        exported.append((path, include_weights))

    engine = nullcontext(SimpleNamespace(export=export))
    monkeypatch.setattr(runtime, "compile", lambda model, **knobs: engine)
    target = tmp_path / "artifact"
    assert main(["export", str(folder), "-o", str(target)]) == 0
    assert capfd.readouterr().out == f"{target}\n"
    assert main(["export", str(folder), "-o", str(target), "--include-weights", "--quiet"]) == 0
    assert exported == [(target, False), (target, True)]


def test_export_hands_on_what_was_given(folder: Path, tmp_path: Path, knobs: dict[str, Any]) -> None:
    options = ["--dtype", "float64", "--device", "cpu", "--optimize", "latency"]
    assert main(["export", str(folder), "-o", str(tmp_path / "artifact"), *options]) == 2
    given = {"dtype": "float64", "device": "cpu", "optimize": "latency", "progress": True}
    assert knobs == {"model": str(folder), **given}


def test_export_looks_at_the_output_before_it_compiles(
    folder: Path, tmp_path: Path, knobs: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    for name in ("full/file", "file"):
        (tmp_path / name).touch()
    for name in ("full", "file"):
        assert main(["export", str(folder), "-o", str(tmp_path / name)]) == 2
        assert "exists already" in capfd.readouterr().err
    assert knobs == {}
    (tmp_path / "empty").mkdir()
    assert main(["export", str(folder), "-o", str(tmp_path / "empty")]) == 2
    assert knobs["model"] == str(folder)


def test_inspect_says_how_a_model_is_rewritten_without_its_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Checkpoint, "get", None)  # which reads a tensor
    assert main(["inspect", str(folder)]) == 0
    page = capfd.readouterr().out
    assert page.startswith("LlamaForCausalLM: proven, 3 attention sites, 3 caches\n")
    assert "merge_qkv: applied at 3 modules" in page
    assert "paged_attention: provider" in page
    assert page.endswith("KV cache: 384 bytes a token in float32\n"), "3 caches, 2 heads of 8 + 8 elements of 4 bytes"


def test_inspect_says_why_a_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import MambaForCausalLM

    config = MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    capfd.readouterr()
    assert main(["inspect", str(tmp_path)]) == 2
    assert "MambaForCausalLM is not supported" in capfd.readouterr().err


def test_inspect_knows_an_artifact_by_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seal(tmp_path, {})
    module = SimpleNamespace(inspect=lambda path: f"summary of {path}")
    monkeypatch.setitem(sys.modules, "runtime.artifact", module)
    assert main(["inspect", str(tmp_path)]) == 0
    assert capfd.readouterr().out == f"summary of {tmp_path}\n"


def test_the_cache_is_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    assert main(["cache", "list"]) == 0
    assert capfd.readouterr().out == ""
    for key in ("a" * 64, "b" * 64):
        folder = tmp_path / "graphs" / key
        folder.mkdir(parents=True)
        (folder / "unit-0.pt2").write_bytes(bytes(3 << 19))
        seal(folder, {"description": f"model {key[0]}"})
    assert main(["cache", "list"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["a" * 12, "b" * 12]
    assert all("1.5 MiB  model " in line for line in lines)
    assert main(["cache", "clear"]) == 0
    assert capfd.readouterr().out == "3.0 MiB freed\n"
    assert main(["cache", "list"]) == 0
    assert capfd.readouterr().out == ""
