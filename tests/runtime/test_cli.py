"""The `pagegraph` command on a tiny model in a folder: what goes to stdout, and what a user's error looks like."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runtime import SamplingParams
from runtime.cli import main

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
    import runtime

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
