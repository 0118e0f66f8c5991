"""A request's ends and masks, without a scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.request import Request, RequestStatus
from runtime.sampling import SamplingParams

EOS = 2


def make_request(prompt: list[int], *, arrival: int = 0, max_model_len: int = 100, **params: Any) -> Request:
    return Request(
        "r",
        prompt,
        SamplingParams(**params),
        arrival=arrival,
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
        default_seed=11,
    )


def feed(request: Request, tokens: list[int]) -> tuple[list[int], str | None, int | str | None]:
    for token in tokens:
        if request.is_finished:
            break
        request.append_token(token)
    return request.output_token_ids, request.finish_reason, request.stop_reason


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({"max_tokens": 3}, [5, 6, 7, 8], ([5, 6, 7], "length", None)),
        ({"max_tokens": 9}, [5, EOS, 7], ([5, EOS], "stop", EOS)),
        ({"max_tokens": 2}, [5, EOS], ([5, EOS], "stop", EOS)),
        ({"max_tokens": 9, "stop_token_ids": [7]}, [5, 7, 8], ([5, 7], "stop", 7)),
        ({"max_tokens": 3, "ignore_eos": True}, [5, EOS, 6], ([5, EOS, 6], "length", None)),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], ([EOS], "stop", EOS)),
        ({"max_tokens": 9, "min_tokens": 3}, [EOS, EOS, EOS, 5], ([EOS, EOS, EOS], "stop", EOS)),
        ({"max_tokens": 9}, [5, 6], ([5, 6], None, None)),
    ],
)
def test_ends(params: dict[str, Any], tokens: list[int], expected: tuple[list[int], str | None, object]) -> None:
    assert feed(make_request([1, 9], **params), tokens) == expected


def test_max_model_len_31_of_32_gives_one_token() -> None:
    request = make_request(list(range(31)), max_model_len=32, max_tokens=50)
    assert feed(request, [5, 6]) == ([5], "length", None)
    assert request.status is RequestStatus.FINISHED


def test_an_ended_request_takes_no_token_but_a_later_reason() -> None:
    request = make_request([1], max_tokens=1)
    request.append_token(5)
    with pytest.raises(AssertionError, match="'r' has ended"):
        request.append_token(6)
    request.finish("stop", "END")
    assert (request.finish_reason, request.stop_reason, request.output_token_ids) == ("stop", "END", [5])


def test_min_tokens_masks_what_would_end_the_output() -> None:
    request = make_request([1], max_tokens=9, min_tokens=2, stop_token_ids=[7, 4])
    masks = [request.masked_token_ids()]
    for token in (5, 6):
        request.append_token(token)
        masks.append(request.masked_token_ids())
    assert masks == [(2, 4, 7), (2, 4, 7), ()]
    assert make_request([1], stop_token_ids=[7]).masked_token_ids() == ()
    assert make_request([1], min_tokens=2, ignore_eos=True, stop_token_ids=[7]).masked_token_ids() == (7,)


def test_counts_follow_the_tokens() -> None:
    prompt = [1, 2, 3]
    request = make_request(prompt)
    request.append_token(5)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 4, 1)
    assert (request.token_ids, request.output_token_ids, prompt) == ([1, 2, 3, 5], [5], [1, 2, 3])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of request 'r' is empty"):
        make_request([])


def test_a_seed_fixes_the_noise_and_no_seed_draws_anew() -> None:
    def key(prompt: list[int], arrival: int, **params: Any) -> int:
        return make_request(prompt, arrival=arrival, **params).noise_key

    assert key([1, 2], 0, seed=3) == key([1, 2], 5, seed=3)
    keys = [key([1, 2], 0, seed=3), key([1, 2], 0, seed=4), key([1, 3], 0, seed=3), key([1, 2], 0, seed=11)]
    keys += [key([1, 2], arrival) for arrival in range(3)]
    assert len(set(keys)) == len(keys)
    assert key([1, 2], 1) == key([1, 2], 1)
