"""Beam search by hand: its parameters, and which beams go on and which completions are kept. No model is needed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest

from runtime import BeamSearchParams, SamplingParams
from runtime.beam_search import BeamSearch, Candidates, Continuation, Hypothesis

END = 9
"""The token that ends a completion; what it follows is of the form (token, log-probability)."""


class Beams:
    """A search and the tokens of its running beams, led by hand. Log-probabilities are sums of powers of 2: exact."""

    def __init__(self, width: int, *, max_tokens: int = 8, ending: tuple[int, ...] = (END,), **fields: Any) -> None:
        params = BeamSearchParams(width, max_tokens, **fields)
        self.search = BeamSearch(params, frozenset(ending), max_tokens)
        self.outputs: list[list[int]] = [[]]

    def step(self, *candidates: Candidates) -> list[Continuation]:
        """One set of candidates for each running beam, in the order of their numbers."""
        chosen = self.search.advance(self.outputs, candidates)
        if chosen:
            self.outputs = [[*self.outputs[one.parent], one.token] for one in chosen]
        return chosen

    @property
    def found(self) -> list[tuple[float, list[int]]]:
        return [(hypothesis.score, hypothesis.token_ids) for hypothesis in self.search.hypotheses]


# --- parameters ---


def test_defaults() -> None:
    assert dataclasses.asdict(BeamSearchParams(3)) == {
        "beam_width": 3,
        "max_tokens": 16,
        "length_penalty": 1.0,
        "early_stopping": False,
        "ignore_eos": False,
        "stop_token_ids": (),
    }
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "field", "stored"),
    [
        ({"beam_width": np.int64(2)}, "beam_width", 2),
        ({"max_tokens": np.int32(4)}, "max_tokens", 4),
        ({"length_penalty": 0}, "length_penalty", 0.0),
        ({"length_penalty": np.float32(-0.5)}, "length_penalty", -0.5),
        ({"length_penalty": -32}, "length_penalty", -32.0),
        ({"length_penalty": 32}, "length_penalty", 32.0),
        ({"stop_token_ids": [3, np.int64(5)]}, "stop_token_ids", (3, 5)),
        ({"stop_token_ids": range(2)}, "stop_token_ids", (0, 1)),
        ({"early_stopping": True}, "early_stopping", True),
        ({"early_stopping": "never"}, "early_stopping", "never"),
    ],
)
def test_values_are_normalised(given: dict[str, Any], field: str, stored: object) -> None:
    value = getattr(BeamSearchParams(**{"beam_width": 4, **given}), field)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be at least 1"),
        ({"beam_width": 2.0}, "beam_width=2.0 must be an integer, not float"),
        ({"beam_width": True}, "beam_width=True must be an integer, not bool"),
        ({"beam_width": None}, "beam_width=None must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": "8"}, "max_tokens='8' must be an integer, not str"),
        ({"length_penalty": "long"}, "length_penalty='long' must be a number, not str"),
        ({"length_penalty": False}, "length_penalty=False must be a number, not bool"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be finite"),
        ({"length_penalty": float("inf")}, "length_penalty=inf must be finite"),
        ({"length_penalty": 32.5}, r"length_penalty=32.5 must be finite and in \[-32, 32\]; 0: off"),
        ({"length_penalty": -33}, r"length_penalty=-33 must be finite and in \[-32, 32\]"),
        ({"early_stopping": "always"}, "early_stopping='always' must be True, False or \"never\""),
        ({"early_stopping": 1}, "early_stopping=1 must be True, False"),
        ({"early_stopping": None}, "early_stopping=None must be True, False"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
        ({"stop_token_ids": 3}, "stop_token_ids=3 must be several token ids"),
        ({"stop_token_ids": "3"}, "stop_token_ids='3' must be several token ids"),
        ({"stop_token_ids": [-1]}, "an entry of stop_token_ids=-1 must be at least 0"),
        ({"stop_token_ids": [1.0]}, "an entry of stop_token_ids=1.0 must be an integer"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 4, **given})


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("beam_with", "did you mean beam_width?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("length_penality", "did you mean length_penalty?"),
        ("temperature", "supported: beam_width, early_stopping, ignore_eos, length_penalty"),
    ],
)
def test_an_unknown_keyword_gets_the_nearest_name(keyword: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"BeamSearchParams got an unknown keyword '{keyword}'") as error:
        BeamSearchParams(4, **{keyword: 3})  # type: ignore[arg-type]
    assert hint in str(error.value)


def test_params_are_frozen_values() -> None:
    params = BeamSearchParams(4, stop_token_ids=[3])
    assert params == BeamSearchParams(4, stop_token_ids=(3,))
    assert hash(params) == hash(BeamSearchParams(4, stop_token_ids=(3,)))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, beam_width=5) == BeamSearchParams(5, stop_token_ids=[3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 5  # type: ignore[misc]


def test_the_sampling_of_a_beam_is_greedy_and_ends_like_the_search() -> None:
    params = BeamSearchParams(4, 7, ignore_eos=True, stop_token_ids=[3])
    assert params.sampling == SamplingParams(max_tokens=7, temperature=0, ignore_eos=True, stop_token_ids=[3])


# --- which beams go on ---


def test_the_first_step_forks_the_best_tokens_of_the_prompt() -> None:
    beams = Beams(2)
    assert beams.step([(7, -1.0), (3, -2.0), (5, -4.0), (1, -8.0)]) == [
        Continuation(0, 7, -1.0),
        Continuation(0, 3, -2.0),
    ]
    assert beams.search.scores == [-1.0, -2.0]
    assert beams.found == []


def test_scores_are_sums_and_beams_compete_with_each_other() -> None:
    beams = Beams(2)
    beams.step([(7, -1.0), (3, -1.5), (5, -4.0), (1, -8.0)])
    assert beams.step([(1, -2.0), (2, -2.5)], [(3, -0.5), (4, -4.0)]) == [
        Continuation(0, 1, -3.0),
        Continuation(1, 3, -2.0),
    ]
    assert beams.outputs == [[7, 1], [3, 3]]


def test_a_beam_that_goes_on_keeps_its_number_whatever_its_rank() -> None:
    """In rank order the continuations are of beams 2, 2 and 0: beam 2's second one takes the place of beam 1."""
    beams = Beams(3)
    beams.step([(1, -1.0), (2, -1.5), (3, -2.0), (4, -16.0)])
    chosen = beams.step([(5, -3.0)], [(6, -8.0)], [(7, -0.5), (8, -1.0)])
    assert chosen == [Continuation(0, 5, -4.0), Continuation(2, 8, -3.0), Continuation(2, 7, -2.5)]
    assert beams.search.scores == [-4.0, -3.0, -2.5]
    assert beams.outputs == [[1, 5], [3, 8], [3, 7]]


def test_one_beam_may_be_the_parent_of_all() -> None:
    beams = Beams(3)
    beams.step([(1, -1.0), (2, -1.5), (3, -2.0)])
    chosen = beams.step([(1, -16.0)], [(4, -0.25), (5, -0.5), (6, -1.0)], [(2, -16.0)])
    assert [(one.parent, one.token) for one in chosen] == [(1, 5), (1, 4), (1, 6)]


def test_equal_scores_go_to_the_earlier_beam_and_the_earlier_candidate() -> None:
    beams = Beams(2)
    beams.step([(4, -1.0), (2, -1.0), (8, -1.0), (6, -1.0)])
    assert beams.outputs == [[4], [2]]
    beams.step([(7, -1.0), (5, -1.0)], [(3, -1.0), (1, -1.0)])
    assert beams.outputs == [[4, 7], [4, 5]]


@pytest.mark.parametrize(
    ("width", "ending", "expected"), [(1, (), 2), (4, (), 8), (4, (9,), 8), (4, (8, 9), 12), (3, range(5), 18)]
)
def test_enough_candidates_that_as_many_as_there_are_beams_do_not_end(
    width: int, ending: tuple[int, ...], expected: int
) -> None:
    search = Beams(width, ending=ending, length_penalty=32, early_stopping="never").search  # it goes on if it can
    assert search.num_candidates == expected
    worst = [*ending, *(token for token in range(100) if token not in ending)]  # all that end are the likeliest
    for num_beams in range(1, width + 1):
        search.scores = [-1.0] * num_beams
        offered = [[(token, -float(rank)) for rank, token in enumerate(worst[:expected])]] * num_beams
        assert len(search.advance([[]] * num_beams, offered)) == width
        search.hypotheses.clear()


def test_too_few_candidates_are_a_defect_of_the_caller() -> None:
    beams = Beams(2)
    beams.step([(1, -1.0), (2, -1.5)])
    with pytest.raises(AssertionError, match="too few candidates"):
        beams.step([(3, -1.0)], [])


# --- which completions are kept ---


def test_an_end_among_the_best_is_a_hypothesis_and_the_next_best_goes_on() -> None:
    beams = Beams(2)
    chosen = beams.step([(1, -1.0), (END, -1.5), (2, -2.0), (3, -4.0)])
    assert beams.outputs == [[1], [2]]
    assert beams.search.hypotheses == [Hypothesis(-1.5, [END], END)]
    assert len(chosen) == 2


def test_an_end_that_ranks_below_the_width_is_dropped() -> None:
    beams = Beams(2)
    beams.step([(1, -1.0), (2, -2.0), (END, -2.5), (3, -4.0)])
    assert beams.outputs == [[1], [2]]
    assert beams.found == []


@pytest.mark.parametrize(("penalty", "score"), [(1.0, -1.5), (0.0, -3.0), (2.0, -0.75), (-1.0, -6.0)])
def test_a_score_is_the_sum_over_the_length_to_the_power_of_the_penalty(penalty: float, score: float) -> None:
    beams = Beams(2, length_penalty=penalty)
    beams.step([(1, -1.0), (2, -4.0), (3, -8.0), (4, -8.0)])
    beams.step([(END, -2.0), (3, -3.0)], [(4, -1.0), (5, -8.0)])
    assert beams.found == [(score, [1, END])]


def test_at_the_length_limit_the_best_of_all_beams_end() -> None:
    beams = Beams(2, max_tokens=2)
    beams.step([(1, -1.0), (2, -2.0), (3, -8.0), (4, -8.0)])
    assert beams.step([(5, -1.0), (6, -2.0)], [(END, -0.5), (7, -8.0)]) == []
    assert beams.search.hypotheses == [Hypothesis(-1.0, [1, 5], None), Hypothesis(-1.25, [2, END], END)]


def test_at_the_length_limit_earlier_hypotheses_keep_their_place() -> None:
    beams = Beams(2, max_tokens=2)
    beams.step([(END, -0.5), (1, -1.0), (2, -2.0), (3, -8.0)])
    assert beams.step([(5, -1.0), (6, -2.0)], [(END, -0.5), (7, -8.0)]) == []
    assert beams.found == [(-0.5, [END]), (-1.0, [1, 5])]


def test_one_token_ends_at_once_with_the_best_tokens_of_the_prompt() -> None:
    beams = Beams(3, max_tokens=1)
    assert beams.step([(4, -0.5), (END, -1.0), (2, -2.0), (1, -4.0)]) == []
    assert beams.found == [(-0.5, [4]), (-1.0, [END]), (-2.0, [2])]


def test_without_ending_tokens_only_the_length_ends() -> None:
    beams = Beams(2, max_tokens=3, ending=())
    for _ in range(2):
        assert len(beams.step(*[[(END, -1.0), (1, -2.0)]] * len(beams.outputs))) == 2
    assert beams.step(*[[(END, -1.0), (1, -2.0)]] * 2) == []
    assert beams.found == [(-1.0, [END, END, END]), (-4 / 3, [END, END, 1])]
    assert [hypothesis.stop_reason for hypothesis in beams.search.hypotheses] == [None, None]


def test_a_better_hypothesis_displaces_the_worst_and_of_equals_the_earlier_stays() -> None:
    beams = Beams(2, early_stopping="never")
    beams.step([(END, -3.0), (1, -3.5), (2, -4.0), (3, -8.0)])
    beams.step([(4, -0.5), (END, -6.5)], [(5, -12.0), (6, -64.0)])
    assert beams.found == [(-3.0, [END]), (-5.0, [1, END])]
    beams.step([(6, -0.5), (END, -5.0)], [(7, -8.0), (8, -64.0)])
    assert beams.found == [(-3.0, [END]), (-3.0, [1, 4, END])]
    assert beams.step([(6, -0.5), (END, -7.5)], [(7, -8.0), (8, -64.0)]) != [], "-12/4, which is no better"
    assert beams.found == [(-3.0, [END]), (-3.0, [1, 4, END])]


# --- when the search ends early ---


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "running", "goes_on"),
    [
        # Hypotheses of 1 and 2 tokens: -2 and -3/2. The worst is -2; a beam of 2 tokens beats it above -4.
        (True, 1.0, -3.25, False),
        (False, 1.0, -3.25, True),
        (False, 1.0, -4.0, False),
        (False, 1.0, -5.0, False),
        # After 8 tokens its score would be above -2 as long as its sum is above -16.
        ("never", 1.0, -5.0, True),
        ("never", 1.0, -15.0, True),
        ("never", 1.0, -16.0, False),
        # Sums: -2 and -3, the worst is -3, and no length helps.
        (False, 0.0, -3.25, False),
        ("never", 0.0, -3.25, False),
        # Hypotheses: -2 and -6. Longer is worse, so the present length is the best there is.
        (True, -1.0, -3.0, False),
        (False, -1.0, -2.75, True),
        (False, -1.0, -3.25, False),
        ("never", -1.0, -2.75, True),
        ("never", -1.0, -3.25, False),
        # Hypotheses: -2 and -3/4; the worst is -2, and two tokens divide by 4.
        (False, 2.0, -7.0, True),
        (False, 2.0, -8.0, False),
        ("never", 2.0, -127.0, True),
        ("never", 2.0, -128.0, False),
    ],
)
def test_when_a_full_search_ends(early_stopping: Any, penalty: float, running: float, goes_on: bool) -> None:
    beams = Beams(2, early_stopping=early_stopping, length_penalty=penalty)
    beams.step([(END, -2.0), (1, -2.5), (2, -64.0), (3, -64.0)])
    chosen = beams.step([(END, -0.5), (4, running + 2.5)], [(5, -64.0), (6, -64.0)])
    assert len(beams.found) == 2
    assert [one.token for one in chosen] == ([4, 5] if goes_on else [])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_without_enough_hypotheses_goes_on_however_bad_its_beams(early_stopping: Any) -> None:
    beams = Beams(2, early_stopping=early_stopping)
    assert beams.step([(END, -0.125), (1, -64.0), (2, -64.0), (3, -64.0)]) != []
    assert beams.step([(1, -64.0), (2, -64.0)], [(END, -128.0), (3, -64.0)]) != []
    assert beams.found == [(-0.125, [END])]


@pytest.mark.parametrize("early_stopping", [True, False])
def test_a_width_of_one_ends_with_the_likeliest_end(early_stopping: Any) -> None:
    beams = Beams(1, early_stopping=early_stopping)
    assert beams.step([(1, -0.5), (END, -1.0)]) == [Continuation(0, 1, -0.5)]
    assert beams.found == [], "the end was second"
    assert beams.step([(END, -0.5), (1, -1.0)]) == []
    assert beams.found == [(-0.5, [1, END])]


# --- as a whole ---


@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.5])
@pytest.mark.parametrize("ending", [(), (2,), (0, 3)])
def test_a_search_wide_enough_for_all_beams_finds_the_best_of_all_sequences(
    penalty: float, ending: tuple[int, ...]
) -> None:
    """4 tokens, at most 3 long: no more than 64 sequences, all of them enumerated, with random log-probabilities."""
    rng = random.Random(0)
    prefixes = [p for n in range(3) for p in itertools.product(range(4), repeat=n)]
    logprobs = {prefix: [-rng.uniform(0.1, 4.0) for _ in range(4)] for prefix in prefixes}

    def is_whole(tokens: tuple[int, ...]) -> bool:
        return not set(tokens[:-1]) & set(ending) and (len(tokens) == 3 or tokens[-1] in ending)

    def score(tokens: tuple[int, ...]) -> float:
        return sum(logprobs[tokens[:i]][token] for i, token in enumerate(tokens)) / len(tokens) ** penalty

    sequences = (s for n in range(1, 4) for s in itertools.product(range(4), repeat=n))
    best = sorted(((score(s), list(s)) for s in sequences if is_whole(s)), reverse=True)
    beams = Beams(64, max_tokens=3, ending=ending, length_penalty=penalty, early_stopping="never")
    for _ in range(3):
        # With this width nothing is ever dropped, so fewer beams than it may go on.
        beams.step(*(list(enumerate(logprobs[tuple(tokens)])) for tokens in beams.outputs))
    assert [tokens for _, tokens in beams.found] == [tokens for _, tokens in best]
    assert [found for found, _ in beams.found] == pytest.approx([expected for expected, _ in best])
