"""The text side of a request: one detokenizer for each of its completions, and the outputs made from them."""

from __future__ import annotations

from collections import Counter

from runtime.beam_search import BeamSearch
from runtime.detokenizer import Decoder, IncrementalDetokenizer
from runtime.outputs import CompletionOutput, RequestOutput
from runtime.request import Request


class Completions:
    """All completions of one live request as the user added it; `prompt` is None where token ids were given."""

    def __init__(self, root: Request, prompt: str | None, tokenizer: Decoder | None) -> None:
        self.root, self.prompt, self._tokenizer = root, prompt, tokenizer
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # by child index
        self._num_decoded: Counter[int] = Counter()  # output tokens that the detokenizer has taken
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

    @property
    def is_deliverable(self) -> bool:
        """Whether there is something to return: of a beam search, not before its end."""
        return self.root.search is None or self.is_finished

    def fork(self, child: Request) -> Completions:
        """The completions of a fork of the root: its text goes on from here."""
        forked = Completions(child, self.prompt, None)
        forked._tokenizer = self._tokenizer
        if self._tokenizer is not None:
            params, parent = child.params, self._detokenizer(self.root)
            forked._detokenizers[child.child_index] = parent.fork(stop=tuple(params.stop), min_tokens=params.min_tokens)
            forked._num_decoded[child.child_index] = self._num_decoded[self.root.child_index]
        return forked

    def take(self, member: Request) -> str | None:
        """Decode what is new of one of the members, and what is held back once it has ended.

        Returns the stop string that is now complete, or None. Raises what the tokenizer raises.
        """
        if self._tokenizer is None or member.search is not None:
            return None
        index = member.child_index
        # On a copy: what interrupts the tokenizer half-way leaves the state before, and all is decoded again.
        detokenizer, stop = self._detokenizer(member).copy(), None
        # A token that ended the request has no text.
        end = member.num_tokens - (member.finish_reason == "stop" and isinstance(member.stop_reason, int))
        for token in member.token_ids[member.num_prompt_tokens + self._num_decoded[index] : end]:
            stop = detokenizer.append(token)
            if stop is not None:
                break
        if stop is None and member.is_finished:
            stop = detokenizer.finish()
        self._detokenizers[index], self._num_decoded[index] = detokenizer, end - member.num_prompt_tokens
        return stop

    def output(self) -> RequestOutput:
        """The cumulative output of all completions."""
        completions = (
            self._hypotheses(self.root.search)
            if self.root.search is not None
            else [
                CompletionOutput(
                    index=index,
                    token_ids=member.output_token_ids,
                    text=self._text(member),
                    finish_reason=member.finish_reason,
                    stop_reason=member.stop_reason,
                )
                for index, member in enumerate(self.members)
            ]
        )
        return RequestOutput(
            request_id=self.root.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.root.token_ids[: self.root.num_prompt_tokens],
            outputs=completions,
            finished=self.is_finished,
            num_cached_tokens=self.root.num_cached_tokens,
        )

    def _hypotheses(self, search: BeamSearch) -> list[CompletionOutput]:
        """What a search has found, best first; nothing if it was cut off before its end."""
        found = []
        for index, hypothesis in enumerate(search.hypotheses if self.root.finish_reason in ("stop", "length") else ()):
            ended = hypothesis.stop_reason is not None
            found.append(
                CompletionOutput(
                    index=index,
                    token_ids=hypothesis.token_ids,
                    text=self._decode(hypothesis.token_ids[: len(hypothesis.token_ids) - ended]),
                    finish_reason="stop" if ended else "length",
                    stop_reason=hypothesis.stop_reason,
                    score=hypothesis.score,
                )
            )
        return found

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        prompt = self.root.token_ids[: self.root.num_prompt_tokens]
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt)
        for token in token_ids:
            detokenizer.append(token)
        detokenizer.finish()
        return detokenizer.text

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
