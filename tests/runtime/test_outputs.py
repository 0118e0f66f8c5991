"""Outputs are snapshots: what comes later changes none of them, though their tokens are copied only when read."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from runtime import CompletionOutput, RequestOutput

PROMPT = [7, 8]


def snapshot(tokens: list[int]) -> CompletionOutput:
    return CompletionOutput.snapshot(0, tokens, len(PROMPT), "text", "stop", 6)


def test_a_snapshot_is_the_output_of_its_moment() -> None:
    tokens = [*PROMPT, 5, 6]
    unread, read = snapshot(tokens), snapshot(tokens)
    kept = read.token_ids
    tokens.append(9)
    later = snapshot(tokens)
    assert unread == read == CompletionOutput(0, [5, 6], "text", "stop", 6)
    assert repr(unread) == repr(CompletionOutput(0, [5, 6], "text", "stop", 6))
    assert later.token_ids == [5, 6, 9]
    assert kept == [5, 6]


def test_its_list_is_its_own() -> None:
    tokens = [*PROMPT, 5, 6]
    one, other = snapshot(tokens), snapshot(tokens)
    one.token_ids.append(99)
    assert one.token_ids is one.token_ids
    assert (one.token_ids, other.token_ids, tokens) == ([5, 6, 99], [5, 6], [7, 8, 5, 6])
    tokens.append(9)
    other.token_ids.clear()
    assert tokens == [7, 8, 5, 6, 9]


@pytest.mark.parametrize("read_before", [False, True])
def test_copies_and_pickles(read_before: bool) -> None:
    tokens = [*PROMPT, 5, 6]
    output = snapshot(tokens)
    if read_before:
        assert output.token_ids == [5, 6]
    copies = [copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))]
    tokens.append(9)
    expected = CompletionOutput(0, [5, 6], "text", "stop", 6)
    assert copies == [expected] * 3
    assert asdict(output) == asdict(expected)
    assert replace(output, text="") == replace(expected, text="")


def test_no_other_field_comes_out_of_nowhere() -> None:
    for output in (snapshot([*PROMPT, 5]), CompletionOutput(0, [5], "")):
        with pytest.raises(AttributeError, match="'CompletionOutput' object has no attribute 'tokens_ids'"):
            output.tokens_ids  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(FrozenInstanceError):
            output.text = "other"  # type: ignore[misc]


def test_a_request_output_is_a_frozen_dataclass() -> None:
    output = RequestOutput("r", None, PROMPT, [snapshot([*PROMPT, 5])], False, 0)
    assert output == RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=PROMPT,
        outputs=[CompletionOutput(0, [5], "text", "stop", 6)],
        finished=False,
        num_cached_tokens=0,
    )
    assert replace(output, finished=True) != output
    with pytest.raises(FrozenInstanceError):
        output.finished = True  # type: ignore[misc]
