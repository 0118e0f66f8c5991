"""One request from arrival to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

from runtime.memory.hashing import ExtraKeys, hash_block
from runtime.sampling import SamplingParams, noise_key

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(Enum):
    """Where a request is: only RUNNING ones hold blocks."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """The state of one request; the scheduler alone moves it from one status to the next.

    `token_ids` is the prompt followed by the output. The first `num_computed_tokens` of them have their keys and values
    in the cache (or in a forward that was launched); `num_cached_tokens` of the prompt were found there at the first
    admission. `arrival` orders requests. Raises ValueError for an empty prompt.
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
        default_seed: int = 0,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"the prompt of request {request_id!r} is empty: at least one token is needed")
        self.request_id = request_id
        self.params = params
        self.arrival = arrival
        self.max_model_len = max_model_len
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.extra_keys: ExtraKeys = () if cache_salt is None else (("salt", cache_salt),)
        self.block_hashes: list[bytes] = []
        digest = hash_block(None, self.token_ids)
        if params.seed is None:
            self.noise_key = noise_key(default_seed, digest, arrival=arrival)
        else:
            self.noise_key = noise_key(params.seed, digest)
        self._ending_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)

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
        return self.status is RequestStatus.FINISHED

    def append_token(self, token: int) -> None:
        """Append a sampled token and decide whether it ends the request.

        EOS and stop tokens (reported as `stop_reason`) end it once `min_tokens` are there, then `max_tokens` and
        `max_model_len` do. Holds no blocks and frees none: that is the scheduler's part.
        """
        assert not self.is_finished, f"request {self.request_id!r} has ended and got another token"
        self.token_ids.append(token)
        if token in self._ending_ids and self.num_output_tokens >= self.params.min_tokens:
            self.finish("stop", token)
        elif self.num_output_tokens >= self.params.max_tokens or self.num_tokens >= self.max_model_len:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark the request as ended; a later reason replaces an earlier one."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def masked_token_ids(self) -> tuple[int, ...]:
        """The ids that the next draw must not give, ascending: whatever would end the output before `min_tokens`."""
        if self.num_output_tokens >= self.params.min_tokens:
            return ()
        return tuple(sorted(self._ending_ids))
