"""What a step gives back of the requests that it advanced."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.request import FinishReason


@dataclass(frozen=True)
class CompletionOutput:
    """One completion so far: all of its tokens and text, not only what is new.

    `token_ids` keeps an ending EOS or stop token; `text` does not, nor a stop string. `stop_reason` is the token id or
    the text that ended it, or "kv_cache_full". `score` is set by a beam search: the sum of the tokens'
    log-probabilities over the length to the power of `length_penalty`; its completions come best first.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request so far. `prompt` is None if token ids were given; `num_cached_tokens` of it came from the cache.

    `prompt_token_ids` is one list in all outputs of a request: not to be changed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
