"""The text side of a request: one detokenizer for each of its completions, and the outputs made from them."""

from __future__ import annotations

from runtime.detokenizer import Decoder, IncrementalDetokenizer
from runtime.outputs import CompletionOutput, RequestOutput
from runtime.request import Request


class Completions:
    """All completions of one live request as the user added it; `prompt` is None where token ids were given."""

    def __init__(self, root: Request, prompt: str | None, tokenizer: Decoder | None) -> None:
        self.root, self.prompt, self._tokenizer = root, prompt, tokenizer
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        if tokenizer is not None:  # now, since it decodes the prompt, which may raise
            self._detokenizer(root)

    @property
    def members(self) -> list[Request]:
        """The request itself and, once its prompt has run, its children."""
        return [self.root, *self.root.children]

    @property
    def text(self) -> str:
        """The text of the request itself so far; empty without a tokenizer."""
        return self._text(self.root)

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return all(member.is_finished for member in self.members)

    def fork(self, child: Request) -> Completions:
        """The completions of a fork of the root: its text goes on from here."""
        forked = Completions(child, self.prompt, None)
        forked._tokenizer = self._tokenizer
        if self._tokenizer is not None:
            params = child.params
            parent = self._detokenizer(self.root)
            forked._detokenizers[child.child_index] = parent.fork(stop=tuple(params.stop), min_tokens=params.min_tokens)
        return forked

    def take(self, request: Request) -> str | None:
        """Decode the newest token of one of the members, and what is held back once it has ended.

        Returns the stop string that is now complete, or None. Raises what the tokenizer raises.
        """
        if self._tokenizer is None:
            return None
        detokenizer, stop = self._detokenizer(request), None
        # A stop token has no text, and one that ended for want of blocks has no new token.
        if request.finish_reason != "stop" and request.stop_reason != "kv_cache_full":
            stop = detokenizer.append(request.token_ids[-1])
        return detokenizer.finish() if stop is None and request.is_finished else stop

    def output(self) -> RequestOutput:
        """The cumulative output of all completions."""
        completions = [
            CompletionOutput(
                index=index,
                token_ids=member.output_token_ids,
                text=self._text(member),
                finish_reason=member.finish_reason,
                stop_reason=member.stop_reason,
            )
            for index, member in enumerate(self.members)
        ]
        return RequestOutput(
            request_id=self.root.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.root.token_ids[: self.root.num_prompt_tokens],
            outputs=completions,
            finished=self.is_finished,
            num_cached_tokens=self.root.num_cached_tokens,
        )

    def _text(self, member: Request) -> str:
        return "" if self._tokenizer is None else self._detokenizer(member).text

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        assert self._tokenizer is not None
        if request.child_index not in self._detokenizers:
            prompt, params = request.token_ids[: request.num_prompt_tokens], request.params
            self._detokenizers[request.child_index] = IncrementalDetokenizer(
                self._tokenizer, prompt, stop=tuple(params.stop), min_tokens=params.min_tokens
            )
        return self._detokenizers[request.child_index]
