"""What may be given as a prompt and with it, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from runtime.sampling import SamplingParams

Prompt = str | list[int]


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or token ids, or a list of prompts, as a list of prompts."""
    if isinstance(prompts, list | tuple) and all(isinstance(prompt, str | list | tuple) for prompt in prompts):
        return list(prompts)
    return [prompts]  # type: ignore[list-item]


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Turn a prompt into token ids.

    Raises ValueError for what is no prompt, for text without a tokenizer, and for ids outside of the vocabulary.
    """
    if isinstance(prompt, str):
        _check_tokenizer("a text prompt needs", tokenizer)
    token_ids = list(tokenizer.encode(prompt)) if isinstance(prompt, str) else _token_ids(prompt)
    if not token_ids:
        raise ValueError("an empty prompt: give at least one token (a begin-of-text token, for example)")
    _check_ids("token", token_ids, vocab_size)
    return token_ids


def check_params(params: object, tokenizer: Any, vocab_size: int) -> None:
    """Raise ValueError for what are no sampling parameters, or none for this model and tokenizer."""
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"params must be a runtime.SamplingParams, not {type(params).__name__}; a new request may have "
            "runtime.BeamSearchParams instead"
        )
    if params.stop:
        _check_tokenizer("stop strings need", tokenizer)
    _check_ids("stop token", params.stop_token_ids, vocab_size)


def check_arguments(request_id: object, cache_salt: object, priority: object) -> None:
    """Raise ValueError for what is given with a prompt and is of the wrong type."""
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be text, not {type(value).__name__}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be a whole number, not {priority!r}")


def _check_tokenizer(what: str, tokenizer: Any) -> None:
    if tokenizer is None:
        raise ValueError(
            f"{what} a tokenizer, and the model came without one: give token ids and stop_token_ids, or "
            "runtime.compile(..., tokenizer=...)"
        )


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    bad = [token for token in ids if not 0 <= token < vocab_size]
    if bad:
        raise ValueError(f"{what} id {bad[0]} is out of the vocabulary; ids are 0 to {vocab_size - 1}")


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of token ids as plain ints; what merely converts to ints (bytes, floats) is a mistake."""
    if not isinstance(prompt, list | tuple):
        raise ValueError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ValueError(f"a prompt must be text or a list of token ids, but {token!r} in it is not an integer")
    return [int(token) for token in prompt]
