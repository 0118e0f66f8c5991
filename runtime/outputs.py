"""What a step gives back of the requests that it advanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.request import FinishReason


@dataclass(frozen=True)
class CompletionOutput:
    """One completion so far: all of its tokens and text, not only what is new. Nothing that comes later changes it.

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

    @classmethod
    def snapshot(
        cls,
        index: int,
        tokens: list[int],
        start: int,
        text: str,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        """One whose `token_ids` are `tokens[start:]` as they are now, but copied only when they are first read.

        `tokens` may grow afterwards; nothing else of it may change.
        """
        output = cls.__new__(cls)
        fields = output.__dict__  # twice as quick as the setters of a frozen dataclass
        fields["index"], fields["_slice"], fields["text"] = index, (tokens, start, len(tokens)), text
        fields["finish_reason"], fields["stop_reason"], fields["score"] = finish_reason, stop_reason, None
        return output

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> list[int]:
            """The `token_ids` of a snapshot, on the first read: from then on they are an ordinary attribute."""
            fields = self.__dict__
            source = fields.get("_slice") if name == "token_ids" else None
            if source is not None:
                tokens, start, end = source
                fields.setdefault(name, tokens[start:end])  # another thread may be here too
                fields.pop("_slice", None)
            if name not in fields:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return fields[name]


@dataclass(frozen=True, init=False)
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

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        outputs: list[CompletionOutput],
        finished: bool,
        num_cached_tokens: int,
    ) -> None:
        fields = self.__dict__  # as in `snapshot`
        fields["request_id"], fields["prompt"], fields["prompt_token_ids"] = request_id, prompt, prompt_token_ids
        fields["outputs"], fields["finished"], fields["num_cached_tokens"] = outputs, finished, num_cached_tokens
