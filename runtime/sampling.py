"""How a request's tokens are drawn, and the key of its noise."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

from runtime.suggest import reject_unknown


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; the defaults sample from the model's own distribution.

    Raises ValueError, naming the field and what is supported, for an unknown keyword or a bad value.
    """

    max_tokens: int = 16
    """The most tokens to generate, at least 1."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose mass reaches this, in (0, 1]."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is off, and -1 is accepted and stored as 0."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one, in [0, 1]."""
    seed: int | None = None
    """Makes the draws repeatable; None draws anew for each request."""
    stop: Sequence[str] = ()
    """Texts that end the output, itself not included: one string or several, stored as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, stored as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop text takes effect before this many tokens; at most max_tokens."""
    n: int = 1
    """Number of completions, drawn from one prefill of the prompt."""

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Reject unknown keywords before the generated `__init__` would, with the nearest valid name."""
        reject_unknown(kwargs, (f.name for f in fields(cls)), cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        top_k = check_integer("top_k", self.top_k, -1, "-1 or 0 turns it off")
        normalised = {
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "n": check_integer("n", self.n, 1),
            "temperature": check_number("temperature", self.temperature, "0 (greedy) or above", 0.0),
            "top_p": check_number("top_p", self.top_p, "in (0, 1]; 1 turns it off", math.nextafter(0.0, 1.0), 1.0),
            "top_k": max(top_k, 0),
            "min_p": check_number("min_p", self.min_p, "in [0, 1]; 0 turns it off", 0.0, 1.0),
            "seed": None if self.seed is None else check_integer("seed", self.seed),
            "stop": _stop_texts(self.stop),
            "stop_token_ids": check_token_ids(self.stop_token_ids),
            "min_tokens": check_integer("min_tokens", self.min_tokens, 0),
        }
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}: "
                "lower min_tokens or raise max_tokens"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that neither seed nor noise matters."""
        return self.temperature == 0 or self.top_k == 1


def noise_key(seed: int, prompt_digest: bytes, child_index: int = 0, arrival: int | None = None) -> int:
    """The signed 64-bit key of a request's sampling noise: BLAKE2b over all arguments.

    The noise is stateless in (key, position, token id), so a request draws the same whatever its neighbours. The
    prompt's digest keeps two prompts under one seed apart, `child_index` the children of one prompt. Requests without
    a seed of their own give their `arrival` number, so that asking twice draws twice.
    """
    fields_read = f"{seed} {child_index} {arrival} ".encode()
    return int.from_bytes(blake2b(fields_read + prompt_digest, digest_size=8).digest(), "little", signed=True)


def check_integer(name: str, value: object, minimum: int | None = None, note: str = "") -> int:
    """The value of a field as an int. Raises ValueError for what is none, or less than `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value!r} must be at least {minimum}" + (f" ({note})" if note else ""))
    return operator.index(value)


def check_number(name: str, value: object, supported: str, low: float = -math.inf, high: float = math.inf) -> float:
    """The value of a field as a float. Raises ValueError unless it is finite and within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    # Written so that nan fails too: no comparison with it is true.
    if not (low <= number <= high and math.isfinite(number)):
        raise ValueError(f"{name}={value!r} must be finite and {supported}")
    return number


def _stop_texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Iterable):
        raise ValueError(f"stop={value!r} must be a string or several strings")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={value!r} must hold non-empty strings; {text!r} is not one")
    return texts


def check_token_ids(value: object) -> tuple[int, ...]:
    """Stop tokens as a tuple of ints. Raises ValueError for anything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"stop_token_ids={value!r} must be several token ids")
    return tuple(check_integer("an entry of stop_token_ids", token, 0) for token in value)
