"""The text side of a request: one detokenizer for each of its completions, and the outputs made from them."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.beam_search import Hypothesis
from runtime.detokenizer import Decoder, IncrementalDetokenizer
from runtime.outputs import CompletionOutput, RequestOutput
from runtime.request import Request


class Completions:
    """All completions of one live request as the user added it; `prompt` is None where token ids were given."""

    def __init__(self, root: Request, prompt: str | None, tokenizer: Decoder | None) -> None:
        self.root, self.prompt, self._tokenizer = root, prompt, tokenizer
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # by child index
        self._prompt_token_ids = root.token_ids[: root.num_prompt_tokens]
        self._texts: list[str] = []  # of the hypotheses of a search
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
        return self.root.is_finished and all(child.is_finished for child in self.root.children)

    @property
    def is_deliverable(self) -> bool:
        """Whether there is something to return: of a beam search, not before its end."""
        return self.root.search is None or self.is_finished

    def fork(self, member: Request, child: Request) -> Completions:
        """The completions of `child`, a fork of one of the members or beams: its text goes on from here."""
        forked = Completions(child, self.prompt, None)
        forked._tokenizer = self._tokenizer
        if self._tokenizer is not None:
            # Nothing of a beam has been decoded before.
            is_beam, params = self.root.search is not None, child.params
            parent = self._read(child.output_token_ids) if is_beam else self._detokenizer(member)
            forked._detokenizers[child.child_index] = parent.fork(stop=tuple(params.stop), min_tokens=params.min_tokens)
        return forked

    def take(self, member: Request) -> str | None:
        """Decode what is new of one of the members, and what is held back once it has ended; of a search, its results.

        Returns the stop string that is now complete, or None. Raises what the tokenizer raises.
        """
        if self._tokenizer is None:
            return None
        if member.search is not None:
            self._texts = [self._text_of(hypothesis) for hypothesis in self._hypotheses]
            return None
        detokenizer, tokens = self._detokenizer(member), member.token_ids
        # A token that ended the request has no text.
        end = len(tokens) - (member.finish_reason == "stop" and isinstance(member.stop_reason, int))
        for token in tokens[member.num_prompt_tokens + detokenizer.num_tokens : end]:
            if detokenizer.matched is None:
                detokenizer.append(token)
        return detokenizer.finish() if member.is_finished else detokenizer.matched

    def output(self) -> RequestOutput:
        """The cumulative output of all completions."""
        root = self.root
        outputs = self._outputs() if root.search is None else self._ranked_outputs()
        return RequestOutput(
            root.request_id, self.prompt, self._prompt_token_ids, outputs, self.is_finished, root.num_cached_tokens
        )

    def _outputs(self) -> list[CompletionOutput]:
        return [
            CompletionOutput.snapshot(
                index,
                member.token_ids,
                member.num_prompt_tokens,
                self._text(member),
                member.finish_reason,
                member.stop_reason,
            )
            for index, member in enumerate(self.members)
        ]

    def _ranked_outputs(self) -> list[CompletionOutput]:
        if not self._hypotheses:  # cut off: that it was has to be said somewhere
            return [CompletionOutput(0, [], "", self.root.finish_reason, self.root.stop_reason)]
        texts = self._texts or [""] * len(self._hypotheses)
        return [
            CompletionOutput(
                index=index,
                token_ids=hypothesis.token_ids,
                text=text,
                finish_reason="length" if hypothesis.stop_reason is None else "stop",
                stop_reason=hypothesis.stop_reason,
                score=hypothesis.score,
            )
            for index, (hypothesis, text) in enumerate(zip(self._hypotheses, texts, strict=True))
        ]

    @property
    def _hypotheses(self) -> list[Hypothesis]:
        """What a search has found, best first; nothing before its end, nor if it was cut off."""
        search = self.root.search
        return search.hypotheses if search is not None and self.root.finish_reason in ("stop", "length") else []

    def _text_of(self, hypothesis: Hypothesis) -> str:
        # A token that ended it has no text.
        detokenizer = self._read(hypothesis.token_ids[: None if hypothesis.stop_reason is None else -1])
        detokenizer.finish()
        return detokenizer.text

    def _read(self, token_ids: Sequence[int]) -> IncrementalDetokenizer:
        """A detokenizer that has taken these tokens of a beam after the prompt."""
        detokenizer = self._detokenizer(self.root).copy()  # of a search it stays at the end of the prompt
        for token in token_ids:
            detokenizer.append(token)
        return detokenizer

    def _text(self, member: Request) -> str:
        detokenizer = self._detokenizers.get(member.child_index)
        return "" if detokenizer is None else detokenizer.text

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        assert self._tokenizer is not None
        detokenizer = self._detokenizers.get(request.child_index)
        if detokenizer is None:
            prompt, params = request.token_ids[: request.num_prompt_tokens], request.params
            detokenizer = self._detokenizers[request.child_index] = IncrementalDetokenizer(
                self._tokenizer, prompt, stop=tuple(params.stop), min_tokens=params.min_tokens
            )
        return detokenizer
