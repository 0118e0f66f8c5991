"""Sampling parameters: normalisation, errors, and the noise key."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from runtime.sampling import SamplingParams, noise_key
from runtime.suggest import reject_unknown


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "n": 1,
    }


@pytest.mark.parametrize(
    ("given", "field", "stored"),
    [
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "bc"]}, "stop", ("a", "bc")),
        ({"stop_token_ids": [3, np.int64(5)]}, "stop_token_ids", (3, 5)),
        ({"top_k": -1}, "top_k", 0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"max_tokens": np.int32(4)}, "max_tokens", 4),
        ({"seed": -7}, "seed", -7),
        ({"top_p": 1}, "top_p", 1.0),
        ({"min_p": 1}, "min_p", 1.0),
        ({"min_tokens": 16}, "min_tokens", 16),
    ],
)
def test_values_are_normalised(given: dict[str, Any], field: str, stored: object) -> None:
    value = getattr(SamplingParams(**given), field)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 2.0}, "max_tokens=2.0 must be an integer, not float"),
        ({"max_tokens": True}, "max_tokens=True must be an integer, not bool"),
        ({"max_tokens": None}, "max_tokens=None must be an integer"),
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and 0"),
        ({"temperature": float("nan")}, "temperature=nan must be finite"),
        ({"temperature": float("inf")}, "temperature=inf must be finite"),
        ({"temperature": "hot"}, "temperature='hot' must be a number, not str"),
        ({"temperature": True}, "temperature=True must be a number, not bool"),
        ({"top_p": 0.0}, r"top_p=0.0 must be finite and in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p=1.01 must be finite and in \(0, 1\]"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"min_p": -0.1}, r"min_p=-0.1 must be finite and in \[0, 1\]"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"top_k": -2}, "top_k=-2 must be at least -1"),
        ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
        ({"seed": 1.0}, "seed=1.0 must be an integer"),
        ({"seed": False}, "seed=False must be an integer"),
        ({"stop": ""}, "stop='' must hold non-empty strings"),
        ({"stop": ["a", ""]}, "must hold non-empty strings; '' is not one"),
        ({"stop": [3]}, "3 is not one"),
        ({"stop": 3}, "stop=3 must be a string or several"),
        ({"stop": None}, "stop=None must be a string or several"),
        ({"stop_token_ids": 3}, "stop_token_ids=3 must be several token ids"),
        ({"stop_token_ids": "3"}, "stop_token_ids='3' must be several token ids"),
        ({"stop_token_ids": [-1]}, "an entry of stop_token_ids=-1 must be at least 0"),
        ({"stop_token_ids": [1.0]}, "an entry of stop_token_ids=1.0 must be an integer"),
        ({"min_tokens": -1}, "min_tokens=-1 must be at least 0"),
        ({"min_tokens": 17}, "min_tokens=17 must not exceed max_tokens=16"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("temprature", "did you mean temperature?"),
        ("zzz", "supported: ignore_eos, max_tokens, min_p"),
    ],
)
def test_an_unknown_keyword_gets_the_nearest_name(keyword: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams got an unknown keyword '{keyword}'") as error:
        SamplingParams(**{keyword: 3})  # type: ignore[arg-type]
    assert hint in str(error.value)


def test_reject_unknown_passes_known_names() -> None:
    reject_unknown(["a", "b"], ["b", "a", "c"], "f()")
    reject_unknown([], [], "f()")
    with pytest.raises(ValueError, match=r"f\(\) got an unknown keyword 'block_sise'; did you mean block_size\?"):
        reject_unknown(["dtype", "block_sise"], ["dtype", "block_size"], "f()")


def test_params_are_frozen_values() -> None:
    params = SamplingParams(stop=["a"], seed=3)
    assert params == SamplingParams(stop="a", seed=3)
    assert hash(params) == hash(SamplingParams(stop="a", seed=3))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=4) == SamplingParams(stop="a", seed=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "greedy"), [({"temperature": 0}, True), ({"top_k": 1}, True), ({}, False), ({"top_k": -1}, False)]
)
def test_is_greedy(given: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**given).is_greedy is greedy


def test_noise_key_is_int64_repeatable_and_depends_on_everything() -> None:
    keys = [
        noise_key(0, b"prompt"),
        noise_key(1, b"prompt"),
        noise_key(0, b"other"),
        noise_key(0, b"prompt", 1),
        noise_key(0, b"prompt", arrival=0),
        noise_key(0, b"prompt", arrival=1),
        noise_key(-(2**70), b"prompt"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert keys[0] == noise_key(0, b"prompt", 0, None)
    many = [noise_key(seed, b"prompt") for seed in range(64)]
    assert min(many) < 0 < max(many)
