from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runtime.detokenizer import Decoder, IncrementalDetokenizer

SPECIAL = 1000
TEXT = "Grüße 👩‍👩‍👧 and 你好、世界! 🇫🇷 naïve\u2028日本語 e\u0301 \U0001f468\U0001f3fd done"


class ByteTokenizer:
    """Token i is the bytes `pieces[i]`, by default byte i; token SPECIAL is special."""

    def __init__(self, pieces: Sequence[bytes] | None = None) -> None:
        self.pieces = pieces or [bytes([i]) for i in range(256)]
        self.longest_call = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest_call = max(self.longest_call, len(token_ids))
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(special if i == SPECIAL else self.pieces[i] for i in token_ids).decode("utf-8", "replace")


def stream(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text after each token, and after finish; ends early at a stop string."""
    texts = [detokenizer.text]
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        texts.append(detokenizer.text)
        if stopped is not None:
            break
    detokenizer.finish()
    return [*texts, detokenizer.text]


def deltas(texts: list[str]) -> list[str]:
    assert all(after.startswith(before) for before, after in pairwise(texts)), "text only grows"
    return [after[len(before) :] for before, after in pairwise(texts)]


def run(
    token_ids: Sequence[int], *, stop: tuple[str, ...] = (), min_tokens: int = 0, tokenizer: Decoder | None = None
) -> tuple[str, str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer or ByteTokenizer(), [], stop=stop, min_tokens=min_tokens)
    texts = stream(detokenizer, token_ids)
    return texts[-1], detokenizer.finish()


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE of English words: any other character takes a token a byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox and the end"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Sentencepiece-like: words carry their leading space, and unknown characters are byte tokens."""
    words = ["<s>", "<unk>", "▁and", "▁Gr", "▁done", "!", "▁"]
    vocab = {piece: i for i, piece in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


class Shouting(PreTrainedTokenizerFast):
    """Decodes by more than its Rust part."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


class Window:
    """The definition of a token's text: a window from the tokens that brought the last text out, decoded twice."""

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip, self.token_ids, self.waiting = tokenizer, skip_special_tokens, list(prompt[-6:]), 0
        self.read, self.emitted = len(self.token_ids), len(self.decode())

    def decode(self) -> str:
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=self.skip)

    def append(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        text = self.decode()
        end = len(text)
        self.waiting = self.waiting + 1 if text.endswith("\ufffd") else 0
        if 0 < self.waiting < 4:
            end = len(text.rstrip("\ufffd"))
        elif 0 < self.waiting < 16:
            end -= 1
        delta = text[self.emitted : end]
        if delta:
            self.token_ids = self.token_ids[self.read :]
            self.read, self.waiting = len(self.token_ids), 0
            self.emitted = len(self.decode()) - (len(text) - end)
        elif self.waiting == 0 and len(self.token_ids) - self.read > 8:
            self.token_ids.pop()
        return delta

    def finish(self) -> str:
        return self.decode()[self.emitted :]


def test_multi_byte_characters_come_whole() -> None:
    token_ids = BYTE_LEVEL.encode(TEXT)
    assert len(token_ids) > len(TEXT), "characters are split over tokens"
    parts = deltas(stream(IncrementalDetokenizer(BYTE_LEVEL, BYTE_LEVEL.encode("the fox")), token_ids))
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert "你" in parts


def test_byte_fallback_characters_come_whole() -> None:
    words = BYTE_FALLBACK.convert_tokens_to_ids
    token_ids = [words("▁and"), *BYTE_FALLBACK.encode("你好👩‍👧"), words("!"), words("▁done")]
    assert len(token_ids) == 3 + 2 * 3 + 4 + 3 + 4, "a token a byte"
    parts = deltas(stream(IncrementalDetokenizer(BYTE_FALLBACK, [words("▁Gr")]), token_ids))
    assert [part for part in parts if part] == [" and", "你", "好", "👩", "\u200d", "👧", "!", " done"]


def test_prompt_is_context_and_never_text() -> None:
    word = BYTE_FALLBACK.convert_tokens_to_ids("▁and")
    assert BYTE_FALLBACK.decode([word]) == "and"
    after_prompt = IncrementalDetokenizer(BYTE_FALLBACK, [word])
    assert stream(after_prompt, [word, word]) == ["", " and", " and and", " and and"]
    assert stream(IncrementalDetokenizer(BYTE_FALLBACK, []), [word, word]) == ["", "and", "and and", "and and"]


def test_special_tokens() -> None:
    token_ids = [*b"a", SPECIAL, *b"b"]
    assert run(token_ids) == ("ab", None)
    shown = IncrementalDetokenizer(ByteTokenizer(), [], skip_special_tokens=False)
    assert stream(shown, token_ids)[-1] == "a<s>b"


@pytest.mark.parametrize("silent", [1, 7, 8, 9, 40])
def test_tokens_without_text_keep_the_context(silent: int) -> None:
    word, special = BYTE_FALLBACK.convert_tokens_to_ids("▁and"), BYTE_FALLBACK.bos_token_id
    bytes_of_you = BYTE_FALLBACK.encode("你")
    token_ids = [word, *[special] * silent, word, *[special] * silent, *bytes_of_you]
    parts = deltas(stream(IncrementalDetokenizer(BYTE_FALLBACK, [word]), token_ids))
    assert [part for part in parts if part] == [" and", " and", "你"]


def test_cut_character_is_shown_only_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [])
    assert stream(detokenizer, [*b"ab", *"👩".encode()[:3]]) == ["", "a", "ab", "ab", "ab", "ab", "ab\ufffd"]


def test_invalid_bytes_do_not_wait_forever() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [])
    texts = stream(detokenizer, [0xFF] * 5)
    assert [len(text) for text in texts] == [0, 0, 0, 0, 3, 3, 5]


@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8")), st.text("aé你👩", max_size=8))
def test_any_text_by_bytes(text: str, prompt: str) -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), prompt.encode())
    texts = stream(detokenizer, text.encode())
    assert not any("\ufffd" in part for part in deltas(texts))
    assert texts[-1] == text
    assert texts[-2] == text, "nothing waits once the last character is whole"


@given(st.text(st.characters(exclude_characters="\ufffd▁", codec="utf-8"), max_size=30))
def test_any_text_by_real_tokenizers(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        token_ids = tokenizer.encode(text)
        context = tokenizer.encode("!")
        texts = stream(IncrementalDetokenizer(tokenizer, context), token_ids)
        assert not any("\ufffd" in part for part in deltas(texts))
        assert "!" + texts[-1] == tokenizer.decode([*context, *token_ids])


fragments = st.sampled_from(
    ["👩".encode()[:k] for k in (1, 2, 3)] + [b"\x80", b"\x9f\x98", b"\xff", "é".encode(), b"a"]
)


@given(st.lists(st.lists(st.binary(max_size=3) | fragments, min_size=1, max_size=3).map(b"".join), max_size=40))
def test_any_bytes_in_any_pieces(pieces: list[bytes]) -> None:
    """Invalid UTF-8, cut anywhere, and tokens without bytes: as decoded at once, by short windows."""
    tokenizer = ByteTokenizer([*pieces, b"prompt"])
    texts = stream(IncrementalDetokenizer(tokenizer, [len(pieces)]), range(len(pieces)))
    assert "".join(deltas(texts)) == b"".join(pieces).decode("utf-8", "replace")
    assert tokenizer.longest_call <= 40


@pytest.mark.parametrize("token_ids", [list(b"abc") * 700, [SPECIAL] * 2000, [0xF0] * 2000, [0xF0, SPECIAL] * 1000])
def test_windows_stay_short(token_ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    stream(IncrementalDetokenizer(tokenizer, [97] * 500), token_ids)
    assert tokenizer.longest_call <= 40


def test_stop_string_across_tokens_is_never_shown() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [], stop=("END",))
    assert [detokenizer.append(token) for token in b"okEND"] == [None] * 4 + ["END"]
    assert detokenizer.text == "ok"
    assert detokenizer.finish() == "END"
    assert detokenizer.text == "ok"


def test_what_was_held_back_is_flushed() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [], stop=("END",))
    assert stream(detokenizer, b"okEN") == ["", "o", "ok", "ok", "ok", "okEN"]
    assert stream(IncrementalDetokenizer(ByteTokenizer(), [], stop=("END",)), b"EX") == ["", "", "EX", "EX"]


def test_the_first_match_then_the_longest() -> None:
    tokenizer = ByteTokenizer([b"one STOPPED END", b" END"])
    assert run([1, 0], stop=("PED", "STOP", "STOPPED", "END"), tokenizer=tokenizer) == (" ", "END")
    assert run([0], stop=("END", "PED", "STOP", "STOPPED"), tokenizer=tokenizer) == ("one ", "STOPPED")


def test_overlapping_beginnings() -> None:
    assert run(b"aab", stop=("ab",)) == ("a", "ab")
    assert run(b"ababc", stop=("abc",)) == ("ab", "abc")
    assert run(b"aaa", stop=("aaaa",)) == ("aaa", None)


def test_stop_string_before_a_cut_character() -> None:
    tokenizer = ByteTokenizer([b"aEN", b"D\xf0"])
    assert run([0, 1], stop=("END",), tokenizer=tokenizer) == ("a", "END")
    assert run(b"aEN\xe4\xbd", stop=("EN\ufffd",)) == ("a", "EN\ufffd"), "found by finish"


def test_min_tokens() -> None:
    assert run(b"ENDEND", stop=("END",), min_tokens=3) == ("END", "END")
    assert run(b"ENDEND", stop=("END",), min_tokens=1) == ("ENDEND"[:3], "END")
    assert run(b"END", stop=("END",), min_tokens=2) == ("END", None)
    held = ByteTokenizer([b"END\xf0", b"x"])
    assert run([0, 1], stop=("END",), min_tokens=1, tokenizer=held) == ("END\ufffdx", None)
    shown_at_once = IncrementalDetokenizer(ByteTokenizer(), [], stop=("END",), min_tokens=2)
    assert stream(shown_at_once, b"ENE") == ["", "E", "EN", "EN", "ENE"]


def held(text: str, stop: tuple[str, ...]) -> int:
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
    st.integers(0, 6),
)
def test_stop_strings_against_the_definition(pieces: list[str], stop: tuple[str, ...], min_tokens: int) -> None:
    """After each token: the whole text searched afresh, and the longest proper prefix of a stop string held back."""
    tokenizer = ByteTokenizer([piece.encode() for piece in pieces])
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=stop, min_tokens=min_tokens)
    safe, searched = "", ""
    for index, piece in enumerate(pieces):
        stopped = detokenizer.append(index)
        if index < min_tokens:
            safe += piece
        else:
            searched += piece
        matches = [(searched.index(s), -len(s), s) for s in stop if s in searched]
        if matches:
            start, _, longest = min(matches)
            assert (detokenizer.text, stopped) == (safe + searched[:start], longest)
            return
        assert (detokenizer.text, stopped) == (safe + searched[: len(searched) - held(searched, stop)], None)
    assert detokenizer.finish() is None
    assert detokenizer.text == safe + searched


cuts = st.integers(0, 4)
# Words, single bytes, the special token and ids without a token; characters, whole and cut.
byte_level_ids = st.lists(
    st.integers(0, len(BYTE_LEVEL) + 1).map(lambda token: [token])
    | st.text("aé你👩\u200d\ufffd ", min_size=1, max_size=3).map(BYTE_LEVEL.encode)
    | st.builds(lambda text, start, end: BYTE_LEVEL.encode(text)[start:end], st.sampled_from("é你👩"), cuts, cuts),
    max_size=20,
).map(lambda runs: [token for run in runs for token in run])


def is_silent(token: int) -> bool:
    return not BYTE_LEVEL.decode([token], skip_special_tokens=True)


@given(byte_level_ids, byte_level_ids, st.booleans())
def test_every_token_has_the_text_that_its_window_gives(prompt: list[int], token_ids: list[int], skip: bool) -> None:
    window = Window(BYTE_LEVEL, prompt, skip)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt, skip_special_tokens=skip)
    *parts, rest = deltas(stream(detokenizer, token_ids))
    assert parts == [window.append(token_id) for token_id in token_ids]
    assert rest == window.finish()


@given(byte_level_ids, st.sampled_from(["", "the ", "你"]))
def test_byte_level_tokens_join_to_the_text_of_all(token_ids: list[int], prompt: str) -> None:
    assume(sum(map(is_silent, token_ids)) < 12)  # more between its bytes cut a character
    context = BYTE_LEVEL.encode(prompt)
    parts = deltas(stream(IncrementalDetokenizer(BYTE_LEVEL, context), token_ids))
    assert prompt + "".join(parts) == BYTE_LEVEL.decode([*context, *token_ids], skip_special_tokens=True)


@given(byte_level_ids, byte_level_ids, byte_level_ids, st.sampled_from([(), ("a",), ("é你", "the"), ("\ufffd",)]))
def test_forks_go_their_own_ways(before: list[int], left: list[int], right: list[int], stop: tuple[str, ...]) -> None:
    def fresh(tokens: list[int]) -> tuple[IncrementalDetokenizer, list[str]]:
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], stop=stop)
        return detokenizer, stream(detokenizer, tokens)

    parent = IncrementalDetokenizer(BYTE_LEVEL, [], stop=stop)
    if any(parent.append(token) for token in before):
        return
    forks = [parent.fork(stop=stop, min_tokens=0), parent.copy()]
    ends = [stream(fork, tokens)[-1] for fork, tokens in zip(forks, (left, right), strict=True)]
    assert ends == [fresh([*before, *tokens])[1][-1] for tokens in (left, right)]
    assert [fork.matched for fork in forks] == [fresh([*before, *tokens])[0].matched for tokens in (left, right)]
    assert (parent.text, parent.num_tokens) == (fresh(before)[1][-2], len(before))
    other = parent.fork(stop=("d",), min_tokens=0)
    shown = other.text
    assert parent.text == shown[: len(parent.text)]
    assert "d" not in stream(other, left)[-1][len(shown) :]


def test_tokens_of_whole_characters_need_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = BYTE_LEVEL.encode("the quick 👩 and the end")
    assert stream(IncrementalDetokenizer(BYTE_LEVEL, []), token_ids)[-1] == "the quick 👩 and the end"
    detokenizer, taken = IncrementalDetokenizer(BYTE_LEVEL, []), []
    next_delta = detokenizer._next_delta

    def note(token_id: int) -> Any:
        taken.append(token_id)
        return next_delta(token_id)

    monkeypatch.setattr(detokenizer, "_next_delta", note)
    stream(detokenizer, token_ids)
    assert taken == BYTE_LEVEL.encode("👩")


def word_pieces(**options: Any) -> PreTrainedTokenizerFast:
    vocab = {piece: i for i, piece in enumerate(["<s>", "do", "##ing", "n't", ".", "it", "'s"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<s>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **options)


def patched() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    decode = tokenizer.decode
    tokenizer.decode = lambda *args, **kwargs: decode(*args, **kwargs).upper()  # type: ignore[method-assign]
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (Shouting(tokenizer_object=byte_level().backend_tokenizer, bos_token="<s>"), "THE FOX"),
        (patched(), "THE FOX"),
        (byte_level(), "the fox"),
        (byte_level().backend_tokenizer, "the fox"),
    ],
)
def test_a_tokenizer_with_a_decoding_of_its_own_keeps_it(tokenizer: Any, text: str) -> None:
    token_ids = BYTE_LEVEL.encode("the fox")
    assert stream(IncrementalDetokenizer(tokenizer, []), token_ids)[-1] == text


@pytest.mark.parametrize("cleans_up", [False, True])
def test_spaces_are_cleaned_up_where_the_tokenizer_does(cleans_up: bool) -> None:
    tokenizer = word_pieces(clean_up_tokenization_spaces=cleans_up)
    token_ids = [1, 2, 5, 6, 4, 1, 3]
    whole = tokenizer.decode(token_ids)
    assert whole == ("doing it's. don't" if cleans_up else "doing it 's . do n't")
    window = Window(tokenizer, [])
    parts = deltas(stream(IncrementalDetokenizer(tokenizer, []), token_ids))
    assert parts == [*map(window.append, token_ids), window.finish()]
    if not cleans_up:
        assert "".join(parts) == whole


def test_two_tokenizers_keep_their_texts_apart() -> None:
    shifted = byte_level()
    shifted.add_special_tokens({"additional_special_tokens": [AddedToken("the", special=True)]})
    token_ids = BYTE_LEVEL.encode("the fox")
    assert stream(IncrementalDetokenizer(BYTE_LEVEL, []), token_ids)[-1] == "the fox"
    assert stream(IncrementalDetokenizer(shifted, []), token_ids)[-1] == " fox"


class Failing(ByteTokenizer):
    """Raises in the calls that `fails` names."""

    def __init__(self, fails: set[int]) -> None:
        super().__init__()
        self.fails, self.calls = fails, count()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if next(self.calls) in self.fails:
            raise KeyboardInterrupt
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.sets(st.integers(1, 60)), st.lists(st.sampled_from("aé👩END"), max_size=8).map("".join))
def test_what_is_interrupted_can_be_done_again(fails: set[int], text: str) -> None:
    """The tokenizer's first call is the constructor's; any later one may fail."""
    detokenizer = IncrementalDetokenizer(Failing(fails), [97], stop=("END",))

    def insist(call: Any, *args: Any) -> Any:
        while True:
            before = detokenizer.text, detokenizer.num_tokens
            try:
                return call(*args)
            except KeyboardInterrupt:
                assert (detokenizer.text, detokenizer.num_tokens) == before

    token_ids = text.encode()[:-1]
    if not any(insist(detokenizer.append, token) for token in token_ids):
        insist(detokenizer.finish)
    assert (detokenizer.text, detokenizer.matched) == run(token_ids, stop=("END",))
