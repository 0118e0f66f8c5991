"""Beam search: which continuations of the beams of one request go on, and which are its results.

The algorithm is transformers' `generate(num_beams=...)`, so that sequences and scores are equal: from all continuations
of all beams the best ones are looked at, enough of them that as many as there are beams do not end; those that end
are ranked by their length-normalised score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from runtime.sampling import SamplingParams, check_integer, check_number, check_token_ids
from runtime.suggest import reject_unknown

Candidates = Sequence[tuple[int, float]]
"""The likeliest next tokens of one beam and their log-probabilities, in descending order."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of one request that is searched with beams; given where SamplingParams are.

    It has `beam_width` completions, best first. The search is deterministic. Raises ValueError, naming the field and
    what is supported, for an unknown keyword or a bad value.
    """

    beam_width: int
    """Sequences that are followed at once and returned, at least 1."""
    max_tokens: int = 16
    """The most tokens to generate, at least 1."""
    length_penalty: float = 1.0
    """A completion's score is the sum of its tokens' log-probabilities over its length (EOS included) to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: end when beam_width completions are there. False: when no beam, at its present length, could still beat
    the worst of them. "never": when none could at any length."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    stop_token_ids: Sequence[int] = ()
    """Further tokens that end a completion, stored as a tuple."""

    def __new__(cls, *args: Any, **kwargs: Any) -> BeamSearchParams:
        """Reject unknown keywords before the generated `__init__` would, with the nearest valid name."""
        reject_unknown(kwargs, (f.name for f in fields(cls)), cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        normalised = {
            "beam_width": check_integer("beam_width", self.beam_width, 1),
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "length_penalty": check_number("length_penalty", self.length_penalty, "in [-32, 32]; 0: off", -32.0, 32.0),
            "stop_token_ids": check_token_ids(self.stop_token_ids),
        }
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping={self.early_stopping!r} must be True, False or "never"')

    @property
    def sampling(self) -> SamplingParams:
        """What of it concerns each beam as a sequence: its length and its ends."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One completion that has ended; `stop_reason` is the token that ended it, None where the length did."""

    score: float
    token_ids: list[int]
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: beam number `parent` of this one and one more token."""

    parent: int
    token: int
    score: float


class BeamSearch:
    """The state of one search: `scores`, a sum of log-probabilities for each running beam, and the ended `hypotheses`,
    best first, at most `beam_width`."""

    def __init__(self, params: BeamSearchParams, ending_ids: frozenset[int], max_tokens: int) -> None:
        """max_tokens: the most that a completion may have, at most `params.max_tokens`."""
        self.params = params
        self.scores = [0.0]
        self.hypotheses: list[Hypothesis] = []
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens

    @property
    def num_candidates(self) -> int:
        """How many continuations are looked at: were all that can end among them, `beam_width` would still go on."""
        return self.params.beam_width * max(2, 1 + len(self._ending_ids))

    def advance(self, outputs: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[Continuation]:
        """Take the candidates of all beams, whose tokens so far are `outputs`; returns the beams of the next step.

        A beam that goes on keeps its number (its first continuation does), and so its blocks. Empty: the search has
        ended. Side effects: `scores` and `hypotheses`.
        """
        ranked = self._best(candidates)
        length = len(outputs[0]) + 1
        at_limit = length >= self._max_tokens
        width, penalty = self.params.beam_width, length**self.params.length_penalty
        going = [one for one in ranked if one.token not in self._ending_ids][:width] if not at_limit else []
        for one in ranked[:width]:  # what ends below is only there to let enough beams go on
            if at_limit or one.token in self._ending_ids:
                stop_reason = one.token if one.token in self._ending_ids else None
                self.hypotheses.append(Hypothesis(one.score / penalty, [*outputs[one.parent], one.token], stop_reason))
        self.hypotheses.sort(key=lambda ended: -ended.score)  # stable: the earlier of equals stays before
        del self.hypotheses[width:]
        if not going or self._is_decided(going[0].score, length):
            return []
        beams = _in_place(going, len(outputs))
        self.scores = [one.score for one in beams]
        return beams

    def _best(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """The best continuations over all beams, in descending order."""
        every = [
            Continuation(beam, token, score + logprob)
            for beam, (score, offered) in enumerate(zip(self.scores, candidates, strict=True))
            for token, logprob in offered
        ]
        return sorted(every, key=lambda one: -one.score)[: self.num_candidates]

    def _is_decided(self, best_running: float, length: int) -> bool:
        """Whether to stop although beams could go on: transformers' heuristic, which is exact for "never" only."""
        params = self.params
        if len(self.hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        return best_running / length**params.length_penalty <= self.hypotheses[-1].score


def _in_place(going: list[Continuation], num_beams: int) -> list[Continuation]:
    """Reorder continuations so that the first of each parent has its parent's number."""
    rest, places = [], {}
    for one in going:
        if one.parent in places:
            rest.append(one)
        else:
            places[one.parent] = one
    assert len(going) >= num_beams, "too few candidates to go on with"
    others = iter(rest)
    return [places[i] if i in places else next(others) for i in range(len(going))]
