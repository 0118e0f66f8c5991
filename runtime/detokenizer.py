"""From token ids to text, one token at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

_REPLACEMENT = "\ufffd"  # what tokenizers decode a cut or invalid UTF-8 sequence to
_CONTEXT = 6  # prompt tokens in the first window
_MAX_CHAR_TOKENS = 4  # a UTF-8 character has at most four bytes, and a token at least one
_MAX_WAITING = 16  # tokens in a row that may leave a character cut (special tokens may stand between its bytes)
_MAX_SILENT = 8  # tokens without text that a window keeps


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""
        ...


class IncrementalDetokenizer:
    """The text of one request's output as its tokens arrive.

    The prefix-window method: a token's text depends on its neighbours (leading spaces, characters split over tokens),
    so a short window of tokens is decoded with and without the new ones, and the difference is the new text. The
    window starts at the tokens that brought the last text out, so the cost of a token does not grow with the output.
    Most tokens of a byte-level tokenizer need no window: their text is the same wherever a character may begin.

    A U+FFFD at the end may be a character whose other bytes are still to come, so it waits. Where the text still ends
    so after four tokens, there are bytes that no later token can complete: all but the last U+FFFD are let out.

    A method that is interrupted, or whose tokenizer raises, changes nothing: all is computed first, then stored, and
    Python runs no signal handler between plain stores.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Start after the prompt.

        Args:
            tokenizer: decodes lists of token ids.
            prompt_token_ids: the last few are the context of the first output token; their text is never returned.
            stop: non-empty strings that end the text; it is cut before the match.
            skip_special_tokens: whether special tokens have no text.
            min_tokens: the text of that many first tokens is no part of any match.
        """
        assert all(stop), "an empty stop string matches everything"
        self.num_tokens = 0  # that were appended
        self.matched: str | None = None  # the stop string that ended the text
        self._tokenizer = _backend(tokenizer)
        self._pieces = _pieces(tokenizer, self._tokenizer) if skip_special_tokens else None
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._token_ids = list(prompt_token_ids[-_CONTEXT:])  # the window; replaced, never changed: copies share it
        self._num_read = len(self._token_ids)  # how many of the window's tokens have their text out
        self._emitted = len(self._decode(self._token_ids))  # how many characters of the window's text are out
        self._waiting = 0  # how many tokens in a row left the window's text ending in U+FFFD
        self._is_out = True  # whether all of the window's text is out: no character of it may go on
        self._decoded = ""  # all text so far; `text` is a prefix of it
        self._num_shown = 0
        self._search_from = 0  # no match starts before

    def copy(self) -> IncrementalDetokenizer:
        """One of the same state, which goes its own way from here."""
        return copy.copy(self)

    def fork(self, *, stop: tuple[str, ...], min_tokens: int) -> IncrementalDetokenizer:
        """A detokenizer that goes on from the same state; no match of its stop strings begins before here."""
        forked = self.copy()
        forked._stop, forked._min_tokens = stop, min_tokens
        if stop != self._stop:
            forked._search_from = forked._num_shown = len(self._decoded)
        return forked

    @property
    def text(self) -> str:
        """All text that may be shown so far. It only ever grows."""
        return self._decoded[: self._num_shown]

    def append(self, token_id: int) -> str | None:
        """Take the next output token.

        Returns:
            The stop string that ended the text, or None. After one, no more tokens may be appended.
        """
        assert self.matched is None, "append after a stop string"
        piece = self._pieces[token_id] if self._pieces is not None and self._is_out else None
        if piece is None:
            delta, window = self._next_delta(token_id)
        else:
            delta, window = piece, ([token_id], 1, len(piece), 0, True)
        num_tokens = self.num_tokens + 1
        decoded, search_from, num_shown, matched = self._search(delta, num_tokens)
        self._token_ids, self._num_read, self._emitted, self._waiting, self._is_out = window
        self._decoded, self._search_from, self._num_shown = decoded, search_from, num_shown
        self.num_tokens, self.matched = num_tokens, matched
        return matched

    def finish(self) -> str | None:
        """Let out what was held back, unless a stop string ended the text. No more tokens may be appended.

        Returns:
            The stop string that ended the text (it may be found only now, before a cut character), or None.
        """
        if self.matched is None and self._token_ids:
            delta = self._decode(self._token_ids)[self._emitted :]
            decoded, search_from, num_shown, matched = self._search(delta, self.num_tokens)
            if matched is None:
                num_shown = len(decoded)
            self._token_ids, self._num_read, self._emitted = [], 0, 0
            self._decoded, self._search_from, self._num_shown = decoded, search_from, num_shown
            self.matched = matched
        return self.matched

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _next_delta(self, token_id: int) -> tuple[str, tuple[list[int], int, int, int, bool]]:
        """The text that the window and this token complete, and the window after it."""
        token_ids, num_read, emitted, waiting = [*self._token_ids, token_id], self._num_read, self._emitted, 0
        text = self._decode(token_ids)
        length = end = len(text)
        if text.endswith(_REPLACEMENT):
            waiting = self._waiting + 1
            end = _complete(text, waiting)
        delta = text[emitted:end]
        if delta:
            token_ids = token_ids[num_read:]
            return delta, (token_ids, len(token_ids), len(self._decode(token_ids)) - (length - end), 0, end == length)
        if waiting == 0 and len(token_ids) - num_read > _MAX_SILENT:
            token_ids.pop()
        return delta, (token_ids, num_read, emitted, waiting, emitted == length)

    def _search(self, delta: str, num_tokens: int) -> tuple[str, int, int, str | None]:
        """Look for stop strings in what is new once `delta`, of a token of this number, is added.

        Returns:
            All text, where matches may start, how much of it may be shown (all that can be no part of a match), and
            the stop string found.
        """
        known, decoded = len(self._decoded), self._decoded + delta
        length, search_from = len(decoded), self._search_from
        if num_tokens <= self._min_tokens:
            return decoded, length, length, None
        num_shown, matches = length, []
        for stop in self._stop:
            at = decoded.find(stop, max(search_from, known - len(stop) + 1))
            if at >= 0:
                matches.append((at, -len(stop), stop))
            else:
                num_shown = min(num_shown, _held_from(decoded, stop, search_from))
        if not matches:
            return decoded, search_from, num_shown, None
        num_shown, _, matched = min(matches)
        return decoded, search_from, num_shown, matched


class _Pieces(dict[int, str | None]):
    """What each token of a byte-level tokenizer adds to a text of whole characters; None where a window has to tell.

    The bytes of such tokens just follow each other, so one that decodes to whole characters adds just them.
    Filled as tokens come.
    """

    def __init__(self, backend: Decoder) -> None:
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        text = self._backend.decode([token_id], skip_special_tokens=True)
        piece = text if text and _REPLACEMENT not in text else None
        self[token_id] = piece
        return piece


_PIECES: WeakKeyDictionary[Decoder, _Pieces] = WeakKeyDictionary()  # by tokenizer, for all requests of any engine


def _pieces(tokenizer: Decoder, backend: Decoder) -> _Pieces | None:
    """The pieces of the tokenizer's tokens; None if it is not byte-level, or does not decode by its Rust part alone."""
    if backend is tokenizer or not isinstance(backend, Tokenizer) or not isinstance(backend.decoder, ByteLevel):
        return None
    return _PIECES.setdefault(tokenizer, _Pieces(backend))


def _backend(tokenizer: Decoder) -> Decoder:
    """The tokenizer's Rust part where it alone decodes: transformers' wrapper takes several times as long."""
    transformers = sys.modules.get("transformers")  # not imported for the question: that takes most of a second
    if transformers is None:
        return tokenizer
    fast = transformers.PreTrainedTokenizerFast
    kind: Any = type(tokenizer)
    if not isinstance(tokenizer, fast) or "decode" in vars(tokenizer):
        return tokenizer
    if kind.decode is not fast.decode or kind._decode is not fast._decode:
        return tokenizer
    backend = tokenizer.backend_tokenizer
    # transformers ignores the wish to clean up spaces for byte pair encodings, unless it is made twice.
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    cleans_up = tokenizer.clean_up_tokenization_spaces and (forced or not isinstance(backend.model, BPE))
    return tokenizer if cleans_up else backend


def _complete(text: str, waiting: int) -> int:
    """How many characters may be let out of a text that `waiting` tokens in a row left ending in U+FFFD."""
    if waiting < _MAX_CHAR_TOKENS:
        return len(text.rstrip(_REPLACEMENT))
    return len(text) - (waiting < _MAX_WAITING)


def _held_from(text: str, stop: str, search_from: int) -> int:
    """Where the longest suffix of `text` that `stop` begins with starts, not before `search_from`; its end if none."""
    at = text.find(stop[0], max(search_from, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
