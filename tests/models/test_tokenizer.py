"""Tokenizers of folders: what AutoTokenizer gives, with less imported."""

import json
import logging
import subprocess
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from models.default_model import fetch
from models.tokenizer import load_tokenizer, save_tokenizer
from runtime.detokenizer import IncrementalDetokenizer

TEXTS = ["", "Hello, world!", "  two  spaces\n\tand a tab", "naïve 東京 🙂 12345", "a<|end|>b", "don't , won't ."]
TEMPLATE = "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    """A folder with a trained byte-level tokenizer that adds a token at the start of each text."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials, alphabet = ["<|start|>", "<|end|>"], ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3 + [TEMPLATE], trainer)
    backend.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def assert_same_as_auto(folder):
    found, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.eos_token_id == expected.eos_token_id is not None
    assert found.all_special_tokens == expected.all_special_tokens
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "world"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert found.apply_chat_template(messages, **options) == expected.apply_chat_template(messages, **options)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == expected.encode(text)
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
    return found


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "model_type", [None, "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "mixtral", "gpt_oss"]
)
def test_the_generic_class_is_taken_where_auto_tokenizer_takes_it(folder, monkeypatch, model_type, name):
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    if model_type is not None:
        edit(folder / "config.json", model_type=model_type)
    assert type(assert_same_as_auto(folder)) is PreTrainedTokenizerFast
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: pytest.fail("asked for nothing"))
    load_tokenizer(folder)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gpt2", "GPT2Tokenizer"), ("llama", "LlamaTokenizerFast"), ("qwen3", None), ("qwen2", "PreTrainedTokenizerFast")],
)
def test_where_the_class_does_not_follow_from_the_folder_auto_tokenizer_is_asked(folder, monkeypatch, model_type, name):
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    edit(folder / "config.json", model_type=model_type)
    assert_same_as_auto(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, *, trust_remote_code: (path, trust_remote_code))
    assert load_tokenizer(folder) == (folder, False)


def test_a_folder_without_a_tokenizer_has_none(tmp_path, caplog):
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(tmp_path) is None
    assert "carries no tokenizer" in caplog.text


@pytest.mark.parametrize("damaged", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_transformers_to_judge(folder, damaged):
    (folder / damaged).write_text("{")
    with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever transformers raises)
        AutoTokenizer.from_pretrained(folder)
    with pytest.raises(expected.type):
        load_tokenizer(folder)


IMPORTED = """
import sys
from pathlib import Path
from models.tokenizer import load_tokenizer
print(load_tokenizer(Path(sys.argv[1])).encode("Hello"))
heavy = ("torch._dynamo", "torch._inductor", "transformers.modeling_utils")
print([name for name in sys.modules if name in heavy or name.startswith("transformers.models") and "modeling_" in name])
"""


def test_the_generic_class_needs_no_modelling_code(folder):
    command = [sys.executable, "-c", IMPORTED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ids, heavy = done.stdout.splitlines()
    assert json.loads(ids) == AutoTokenizer.from_pretrained(folder).encode("Hello")
    assert heavy == "[]"


def test_its_rust_part_decodes_the_stream(folder):
    tokenizer = load_tokenizer(folder)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer._tokenizer is tokenizer.backend_tokenizer
    for token_id in tokenizer.encode(TEXTS[3]):
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.text == TEXTS[3]


@pytest.mark.parametrize("kind", [Qwen2Tokenizer, GPT2Tokenizer, LlamaTokenizer, GemmaTokenizer])
def test_a_saved_tokenizer_of_another_class_is_read_the_same_as_one_of_the_generic_class(tmp_path, kind):
    tokenizer = kind().train_new_from_iterator(TEXTS * 3, 300)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    save_tokenizer(tokenizer, tmp_path)
    found = load_tokenizer(tmp_path)
    assert type(found) is PreTrainedTokenizerFast
    assert found.eos_token_id == tokenizer.eos_token_id
    messages = [{"role": "user", "content": "Hello world"}]
    options = {"tokenize": True, "return_dict": False}
    assert found.apply_chat_template(messages, **options) == tokenizer.apply_chat_template(messages, **options)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert found.encode(text) == ids
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


def test_a_tokenizer_that_does_more_than_its_rust_part_keeps_its_class(folder):
    save_tokenizer(Shouting.from_pretrained(folder), folder / "saved")
    assert json.loads((folder / "saved" / "tokenizer_config.json").read_text())["tokenizer_class"] == "Shouting"


@pytest.mark.smollm2
def test_the_default_model_has_the_generic_class(monkeypatch):
    folder = fetch(progress=False)
    assert_same_as_auto(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: pytest.fail("asked for nothing"))
    load_tokenizer(folder)
