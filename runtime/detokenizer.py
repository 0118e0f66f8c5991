"""From token ids to text, one token at a time: whole characters only, and no part of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

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

    A U+FFFD at the end may be a character whose other bytes are still to come, so it waits. Where the text still ends
    so after four tokens, there are bytes that no later token can complete: all but the last U+FFFD are let out.
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
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._read = len(self._window)  # how many of the window's tokens have their text out
        self._emitted = len(self._decode())  # how many characters of the window's text are out
        self._waiting = 0  # how many tokens in a row left the window's text ending in U+FFFD
        self._decoded = ""  # all text so far; `text` is a prefix of it
        self._num_shown = 0
        self._search_from = 0  # no match starts before
        self._matched: str | None = None

    def copy(self) -> IncrementalDetokenizer:
        """One of the same state, which goes its own way from here."""
        copied = copy.copy(self)
        copied._window = list(self._window)
        return copied

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
        assert self._matched is None, "append after a stop string"
        self._num_tokens += 1
        self._window.append(token_id)
        return self._extend(self._next_delta())

    def finish(self) -> str | None:
        """Let out what was held back, unless a stop string ended the text. No more tokens may be appended.

        Returns:
            The stop string that ended the text (it may be found only now, before a cut character), or None.
        """
        if self._matched is None:
            self._extend(self._decode()[self._emitted :])
            self._window, self._read, self._emitted = [], 0, 0
        if self._matched is None:
            self._num_shown = len(self._decoded)
        return self._matched

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _next_delta(self) -> str:
        """The text that the window's last token completed; moves the window on when there is some."""
        text = self._decode()
        end = len(text)
        self._waiting = self._waiting + 1 if text.endswith(_REPLACEMENT) else 0
        if 0 < self._waiting < _MAX_CHAR_TOKENS:
            end = len(text.rstrip(_REPLACEMENT))
        elif 0 < self._waiting < _MAX_WAITING:
            end -= 1
        delta = text[self._emitted : end]
        if delta:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._emitted = len(self._decode()) - (len(text) - end)
            self._waiting = 0
        elif self._waiting == 0 and len(self._window) - self._read > _MAX_SILENT:
            self._window.pop()
        return delta

    def _extend(self, delta: str) -> str | None:
        """Add decoded text, look for stop strings in what is new, and show all that can be no part of one."""
        known = len(self._decoded)
        self._decoded += delta
        if self._num_tokens <= self._min_tokens:
            self._search_from = self._num_shown = len(self._decoded)
            return None
        longest = max(map(len, self._stop), default=0)
        start = max(self._search_from, known - longest + 1)
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := self._decoded.find(stop, start)) >= 0]
        if matches:
            self._num_shown, _, self._matched = min(matches)
            return self._matched
        self._num_shown = len(self._decoded) - self._num_held()
        return None

    def _num_held(self) -> int:
        """Length of the longest suffix of the searched text that is a proper prefix of a stop string."""
        room = len(self._decoded) - self._search_from
        for length in range(min(room, max(map(len, self._stop), default=1) - 1), 0, -1):
            suffix = self._decoded[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
