"""One request from arrival to its last token."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

from runtime.beam_search import BeamSearch, BeamSearchParams
from runtime.memory.hashing import ExtraKeys, hash_block
from runtime.sampling import SamplingParams, noise_key

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(Enum):
    """Where a request is: only RUNNING ones hold blocks."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


_FINISHED = RequestStatus.FINISHED  # reading an Enum's member costs ten times what a plain name does


class Request:
    """The state of one request; the scheduler alone moves it from one status to the next.

    `token_ids` is the prompt followed by the output. The first `num_computed_tokens` of them have their keys and values
    in the cache (or in a forward that was launched); `num_cached_tokens` of the prompt were found there at the first
    admission. Up to `num_writable_tokens` its blocks are known to be its own to write: the KVCacheManager's note, so
    that most steps need not look. The next row that samples draws `num_draws` tokens. `arrival` orders requests, after
    `priority` (smaller is sooner) where the scheduler honours it.

    Raises ValueError for an empty prompt.

    One that asks for n completions is one request until its prompt has run; then `children` are forked off, one for
    each further completion. `root` is the request that the user added: itself, but for children.

    One with a `search` is scheduled as a unit: itself, the `lead`, and its other `beams`, once there are any. Beams are
    requests that have tokens and blocks of their own, but nobody else knows them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        cache_salt: str | None = None,
        priority: int = 0,
        default_seed: int = 0,
        beam_search: BeamSearchParams | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"the prompt of request {request_id!r} is empty: at least one token is needed")
        self.request_id = request_id
        self.arrival = arrival
        self.priority = priority
        self.max_model_len = max_model_len
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_writable_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.extra_keys: ExtraKeys = () if cache_salt is None else (("salt", cache_salt),)
        self.block_hashes: list[bytes] = []
        self.root = self
        self.children: list[Request] = []
        self._eos_token_ids = eos_token_ids
        self._digest = hash_block(None, self.token_ids)
        # Shared by all forks: no two of a family get the same index, so no two draw the same noise.
        self._fork_indices = itertools.count(params.n)
        self._noise_seed = (default_seed, arrival) if params.seed is None else (params.seed, None)
        self.num_draws = params.n
        self._become(0, params)
        self.lead = self
        self.beams: list[Request] = []
        self.num_common_tokens = 0  # of a preempted search: how many first tokens all its beams share
        self.search: BeamSearch | None = None
        if beam_search is not None:
            self.search = BeamSearch(beam_search, self._ending_ids, self.max_output_tokens)

    @property
    def sequences(self) -> list[Request]:
        """What of it may hold blocks: itself and its other beams."""
        return [self, *self.beams]

    @property
    def num_goal_tokens(self) -> int:
        """How many tokens it computes by itself: all it has, but of a preempted search those that its beams share."""
        return self.num_common_tokens or len(self.token_ids)

    @property
    def num_slots(self) -> int:
        """How many sequences it may become by itself while it runs."""
        return self.num_draws if self.search is None else self.search.params.beam_width

    def draw_keys(self) -> list[int]:
        """The noise keys of the next draws: its own and, at the end of the prompt, those of the children to come."""
        if self.num_draws == 1:
            return [self.noise_key]
        return [self.noise_key, *(self._noise_key(index) for index in range(1, self.num_draws))]

    def fork(self, request_id: str, child_index: int | None = None, params: SamplingParams | None = None) -> Request:
        """A request with the same tokens and computed state, for one further completion; holds no blocks yet.

        child_index: of a child of n; None makes a request of its own with the next free index, so that it diverges.
        """
        child = copy.copy(self)
        child.request_id = request_id
        child.token_ids, child.block_hashes, child.children = list(self.token_ids), list(self.block_hashes), []
        child.lead, child.beams, child.search = child, [], None
        child.num_draws, child.num_writable_tokens, child.num_common_tokens = 1, 0, 0
        if params is not None and params.seed is not None:
            child._noise_seed = params.seed, None
        if child_index is None:
            child.root = child
        child._become(next(self._fork_indices) if child_index is None else child_index, params or self.params)
        return child

    def take_over(self, other: Request) -> None:
        """Become a copy of another beam, in tokens and computed state; blocks are the caller's part."""
        self.token_ids, self.block_hashes = list(other.token_ids), list(other.block_hashes)
        self.num_computed_tokens = other.num_computed_tokens

    def _become(self, child_index: int, params: SamplingParams) -> None:
        self.child_index, self.params = child_index, params
        self.max_output_tokens = min(params.max_tokens, self.max_model_len - self.num_prompt_tokens)
        self.noise_key = self._noise_key(child_index)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        self._ending_ids = eos | frozenset(params.stop_token_ids)
        # Lengths, prompt included, from which on it may end and at which it does.
        self._min_length = self.num_prompt_tokens + params.min_tokens
        self._max_length = self.num_prompt_tokens + self.max_output_tokens

    def _noise_key(self, child_index: int) -> int:
        seed, arrival = self._noise_seed
        return noise_key(seed, self._digest, child_index, arrival)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, as a new list; an ending EOS or stop token is among them."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self.status is _FINISHED

    def append_token(self, token: int) -> bool:
        """Append a sampled token; returns whether it ends the request.

        EOS and stop tokens (reported as `stop_reason`) end it once `min_tokens` are there, then `max_tokens` and
        `max_model_len` do. Holds no blocks and frees none: that is the scheduler's part.
        """
        assert self.status is not _FINISHED, f"request {self.request_id!r} has ended and got another token"
        self.token_ids.append(token)
        length = len(self.token_ids)
        if token in self._ending_ids and length >= self._min_length:
            self.finish("stop", token)
            return True
        if length >= self._max_length:
            self.finish("length")
            return True
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark the request as ended; a later reason replaces an earlier one."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def ends_at(self, length: int) -> bool:
        """Whether it ends once it has that many tokens, whatever they are."""
        return length >= self._max_length

    def masked_token_ids(self, length: int | None = None) -> tuple[int, ...]:
        """The ids that the draw after `length` tokens (None: those it has) must not give, ascending.

        That is whatever would end the output before `min_tokens`.
        """
        if (len(self.token_ids) if length is None else length) >= self._min_length:
            return ()
        return tuple(sorted(self._ending_ids))
