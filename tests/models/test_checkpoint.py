import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models import checkpoint as checkpoint_module
from models import default_model
from models.checkpoint import Checkpoint, resolve


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_reads_what_was_saved(kind: str, request: pytest.FixtureRequest) -> None:
    opened = resolve(request.getfixturevalue(kind))
    expected = tiny_llama().state_dict()
    assert opened.names().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(opened.get(name), tensor)
        assert opened.names()[name].shape == tuple(tensor.shape)
    assert opened.dtype == torch.float32
    assert opened.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert (opened.config.model_type, opened.config.hidden_size) == ("llama", 16)


def test_generation_config_is_optional(folder: Path) -> None:
    generation_config = Checkpoint(folder).generation_config
    assert generation_config is not None
    assert generation_config.eos_token_id == 2
    (folder / "generation_config.json").unlink()
    assert Checkpoint(folder).generation_config is None


def test_dtype_is_that_of_most_elements(folder: Path) -> None:
    tensors = {
        "large": torch.zeros(100, dtype=torch.bfloat16),
        "a": torch.zeros(3),
        "b": torch.zeros(3),
        "ids": torch.zeros(1000, dtype=torch.int64),
    }
    save_file(tensors, folder / "model.safetensors")
    assert Checkpoint(folder).dtype == torch.bfloat16


def test_default_model_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "fetch", lambda progress: folder)
    assert resolve("smollm2").folder == folder


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json; supported: 'smollm2'"):
        resolve(folder)


def test_no_safetensors_names_what_is_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    (folder / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors \(found model\.gguf, pytorch_model\.bin"):
        resolve(str(folder))


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"missing: {shard.name}"):
        resolve(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{shard.name} \(\d+ bytes\) is truncated or damaged"):
        resolve(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert resolve(sharded).names().keys() == tiny_llama().state_dict().keys()
    save_file({"model.norm.weight": torch.zeros(16)}, sharded / "more.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is in both"):
        resolve(sharded)


def test_broken_json(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is not valid JSON"):
        resolve(sharded)


def test_unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(ValueError, match=r"'no_such_model' is unknown to the installed transformers \d"):
        resolve(folder)


def test_quantized_is_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantized \(fp8\); supported: float"):
        resolve(folder)


@pytest.mark.parametrize("model", ["no-such-org/no-such-model", "./nowhere", "a/b/c"])
def test_neither_folder_nor_hub_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=f"model '{model}' is neither a folder nor a hub id") as raised:
        resolve(model)
    assert raised.value.__cause__ is not None
    with pytest.raises(ValueError, match="is not a folder"):
        resolve(Path(model))


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (None, "None, of type NoneType"),
        (5, "5, of type int"),
        (torch.nn.Linear(2, 3), r"Linear\(.*, of type Linear"),
    ],
)
def test_what_names_no_checkpoint(model: Any, given: str) -> None:
    with pytest.raises(ValueError, match=f"^{given}, names no checkpoint; supported: 'smollm2'.*PreTrainedModel"):
        resolve(model)


def test_hub_id_is_downloaded_without_other_layouts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name", progress=False).folder == folder
    (repo_id, options), *others = calls
    assert (repo_id, others) == ("org/name", [])
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.bin" not in options["allow_patterns"]
    assert options["tqdm_class"](total=3).disable


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors is not a folder"):
        resolve(str(folder / "model.safetensors"))


def test_tokenizer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, checkpoint_module.__name__):
        assert Checkpoint(folder).load_tokenizer() is None
    assert [record.message for record in caplog.records] == [
        f"{folder} carries no tokenizer: prompts must be token ids, and outputs have no text"
    ]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    ).save_pretrained(folder)
    tokenizer = Checkpoint(folder).load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.convert_tokens_to_ids("b") == 1
