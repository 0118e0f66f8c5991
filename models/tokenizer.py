"""Tokenizers in folders, loaded without transformers' modelling code where that changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FILES = ("tokenizer*.json", "tokenizer*.model", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken")

# Two names of the class that takes all of tokenizer.json as it is; others build parts of it anew.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_METHODS = ("encode", "_encode_plus", "decode", "_decode", "apply_chat_template")
# Model types for which AutoTokenizer was seen to go by these names. For some others it knows better.
_MODEL_TYPES = (None, "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "mixtral", "gpt_oss")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that AutoTokenizer finds in `folder`; None, with a log line, when the folder carries none.

    AutoTokenizer imports parts of the modelling code and takes three times as long, so it is asked only where the
    class does not follow from the folder's JSON files. Raises what transformers raises for damaged files.
    """
    if not any(path for pattern in _FILES for path in folder.glob(pattern)):
        logger.warning("%s carries no tokenizer: prompts must be token ids, and outputs have no text", folder)
        return None
    if _is_generic(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into `folder`, as one of the generic class where that reads the same from what was written.

    Most classes of transformers differ only in how they build the Rust part, which the files hold in full.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not (folder / "tokenizer.json").is_file():
        return
    inherited = [getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in _METHODS]
    read = PreTrainedTokenizerFast.from_pretrained(folder)
    if all(inherited) and _state(read) == _state(tokenizer):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**_read(path), "tokenizer_class": _GENERIC[0]}, indent=2), encoding="utf-8")


def _state(tokenizer: Any) -> tuple[Any, ...]:
    """What the methods in _METHODS go by."""
    settings = (tokenizer.special_tokens_map, tokenizer.clean_up_tokenization_spaces, tokenizer.chat_template)
    return (tokenizer.backend_tokenizer.to_str(), *settings)


def _is_generic(folder: Path) -> bool:
    """Whether AutoTokenizer would take the generic class."""
    if not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists():
        return False
    tokenizer, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    named = tokenizer.get("tokenizer_class") in _GENERIC and "auto_map" not in tokenizer
    return named and model.get("model_type") in _MODEL_TYPES


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one for what is missing or cannot be read, which transformers will judge."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
