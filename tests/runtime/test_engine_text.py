"""Text in, text out: tokenizers, streaming, stop strings. Outputs are scripted where the text itself matters."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models.step_inputs import StepInputs, StepOutputs
from runtime import RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

PROMPT = "Say: "
EOS = 256
TEXT = "Grüße 👩‍👩‍👧 你好! 🇫🇷 e\u0301 done"


class Script:
    """An executor that draws the token written down for each position, whatever the request; 32, a blank, elsewhere."""

    num_recompiles = 0

    def __init__(self, tokens: Sequence[int], start: int = len(PROMPT)) -> None:
        self._token_at: Mapping[int, int] = dict(enumerate(tokens, start))
        self.failing = False

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self.failing:
            raise RuntimeError("the device is on fire")
        drawn = [self._token_at.get(position, 32) for position in inputs.noise_position.tolist()]
        return StepOutputs(torch.tensor(drawn), torch.empty(len(drawn), 0))


@pytest.fixture
def engine(tiny_model: TinyModel, make_engine: MakeEngine, byte_tokenizer: Any) -> Engine:
    return make_engine(tiny_model("llama"), tokenizer=byte_tokenizer)


@pytest.fixture
def scripted(engine: Engine) -> Callable[..., Engine]:
    def say(text: str | bytes | list[int]) -> Engine:
        engine.runner.executor = Script(list(text.encode() if isinstance(text, str) else text))
        return engine

    return say


def finish(engine: Engine, **fields: Any) -> tuple[str, str | None, int | str | None, list[int]]:
    """(text, finish_reason, stop_reason, token_ids) of PROMPT's output."""
    (output,) = engine.generate(PROMPT, SamplingParams(**{"max_tokens": 40, **fields}), progress=False)
    completion = output.outputs[0]
    return completion.text, completion.finish_reason, completion.stop_reason, completion.token_ids


def test_text_prompts_are_tokenized_and_outputs_decoded(
    engine: Engine, tiny_model: TinyModel, hf_greedy: Greedy, byte_tokenizer: Any
) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    texts: list[str | list[int]] = ["Hello", list(b"Hello"), PROMPT]
    outputs = engine.generate(texts, greedy, progress=False)
    assert [o.prompt for o in outputs] == ["Hello", None, PROMPT]
    assert [o.prompt_token_ids for o in outputs] == [list(b"Hello"), list(b"Hello"), list(PROMPT.encode())]
    assert outputs[0].outputs == outputs[1].outputs
    for output in outputs:
        expected = hf_greedy(tiny_model("llama"), output.prompt_token_ids, 24)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == byte_tokenizer.decode(expected, skip_special_tokens=True)


def test_multibyte_characters_stream_whole(scripted: Callable[..., Engine]) -> None:
    size = len(TEXT.encode())
    pieces = list(scripted(TEXT).stream(PROMPT, SamplingParams(max_tokens=size)))
    assert "".join(pieces) == TEXT
    assert all(pieces), "no empty piece"
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > 20, "it does stream"


def test_multibyte_characters_by_step(scripted: Callable[..., Engine]) -> None:
    engine = scripted(TEXT)
    engine.add_request(PROMPT, SamplingParams(max_tokens=len(TEXT.encode())))
    shown = [""]
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        assert output.outputs[0].text.startswith(shown[-1])
        assert "\ufffd" not in output.outputs[0].text
        shown.append(output.outputs[0].text)
    assert shown[-1] == TEXT


def test_a_character_cut_by_max_tokens_ends_in_a_replacement(scripted: Callable[..., Engine]) -> None:
    engine = scripted("ab👧")
    assert "".join(engine.stream(PROMPT, SamplingParams(max_tokens=4))) == "ab\ufffd"
    assert finish(engine, max_tokens=6)[0] == "ab👧"


def test_stop_string_across_tokens(scripted: Callable[..., Engine]) -> None:
    engine = scripted("one END two")
    assert finish(engine, stop="END") == ("one ", "stop", "END", list(b"one END"))
    pieces = list(engine.stream(PROMPT, SamplingParams(max_tokens=40, stop=["END"])))
    assert "".join(pieces) == "one "
    assert not any("E" in piece for piece in pieces)


def test_what_was_held_back_for_a_stop_string_is_flushed(scripted: Callable[..., Engine]) -> None:
    engine = scripted("EX")
    assert finish(engine, stop="END", max_tokens=2) == ("EX", "length", None, list(b"EX"))
    engine = scripted("EN")
    assert finish(engine, stop="END", max_tokens=2) == ("EN", "length", None, list(b"EN"))
    assert list(engine.stream(PROMPT, SamplingParams(max_tokens=2, stop=["END"]))) == ["EN"]


def test_a_stop_string_may_be_complete_only_at_the_end(scripted: Callable[..., Engine]) -> None:
    """A cut character is text, U+FFFD, only once nothing can follow."""
    assert finish(scripted(b"a\xc3"), stop="\ufffd", max_tokens=2) == ("a", "stop", "\ufffd", [97, 0xC3])


def test_the_first_match_wins_then_the_longest(scripted: Callable[..., Engine]) -> None:
    engine = scripted("abcdef")
    assert finish(engine, stop=["cd", "bc"])[:3] == ("a", "stop", "bc")
    assert finish(engine, stop=["d", "abcd"])[:3] == ("", "stop", "abcd")
    engine = scripted([ord("x"), *"é".encode()])
    assert finish(engine, stop=["é", "x"], max_tokens=3)[:3] == ("", "stop", "x")


def test_stops_of_a_batch_belong_to_their_requests(scripted: Callable[..., Engine]) -> None:
    stops: list[dict[str, Any]] = [
        {"stop": "cd"},
        {"stop_token_ids": [ord("e")]},
        {"max_tokens": 2},
        {"stop": "f", "stop_token_ids": [ord("d")]},
        {"stop": "b", "min_tokens": 3, "max_tokens": 8},
    ]
    params = [SamplingParams(**{"max_tokens": 40, **fields}) for fields in stops]
    outputs = scripted("abcdefab").generate([PROMPT] * 5, params, progress=False)
    assert [(o.outputs[0].text, o.outputs[0].stop_reason, len(o.outputs[0].token_ids)) for o in outputs] == [
        ("ab", "cd", 4),
        ("abcd", ord("e"), 5),
        ("ab", None, 2),
        ("abc", ord("d"), 4),
        ("abcdefa", "b", 8),
    ]


def test_eos_of_the_tokenizer_ends_and_has_no_text(scripted: Callable[..., Engine]) -> None:
    engine = scripted([*b"ok", EOS, *b"!"])
    assert finish(engine) == ("ok", "stop", EOS, [*b"ok", EOS])
    assert finish(engine, ignore_eos=True, max_tokens=4) == ("ok!", "length", None, [*b"ok", EOS, *b"!"])


def test_a_stop_string_frees_the_blocks_at_once(scripted: Callable[..., Engine]) -> None:
    engine = scripted("a.")
    engine.add_request(PROMPT, SamplingParams(max_tokens=40, stop=["."]))
    engine.step()
    assert engine.stats().kv_cache_usage > 0
    assert engine.step()[0].finished
    assert (engine.stats().kv_cache_usage, engine.has_unfinished_requests()) == (0.0, False)


def test_stream_joins_to_the_text_of_generate(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, seed=5)
    (output,) = engine.generate(PROMPT, params, progress=False)
    assert "".join(engine.stream(PROMPT, params)) == output.outputs[0].text


def test_stream_starts_with_its_first_piece_and_aborts_when_dropped(scripted: Callable[..., Engine]) -> None:
    engine = scripted("abcdef")
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=6))
    assert not engine.has_unfinished_requests()
    assert [next(pieces), next(pieces)] == ["a", "b"]
    assert engine.stats().num_running == 1
    pieces.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished_requests()
    assert engine.stats().kv_cache_usage == 0.0


def test_stream_loses_no_output_of_other_requests(scripted: Callable[..., Engine], drain: Drain) -> None:
    """The other request ends in the very step whose piece the iterator is dropped at."""
    engine = scripted("abcdef")
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=6))
    next(pieces)
    engine.add_request(PROMPT, SamplingParams(max_tokens=2), request_id="other")
    assert list(itertools.islice(pieces, 2)) == ["b", "c"]
    pieces.close()  # type: ignore[attr-defined]
    outputs = drain(engine)
    assert outputs.keys() == {"other"}
    assert outputs["other"].outputs[0].text == "ab"


def test_step_between_the_pieces_of_a_stream(scripted: Callable[..., Engine]) -> None:
    engine = scripted("abcdef")
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=6))
    assert next(pieces) == "a"
    for _ in range(5):
        (output,) = engine.step()
    assert (output.outputs[0].text, output.finished) == ("abcdef", True)
    assert list(pieces) == ["bcdef"]


def test_a_failed_step_of_a_stream_is_an_error(scripted: Callable[..., Engine]) -> None:
    engine = scripted("abcdef")
    script = engine.runner.executor
    assert isinstance(script, Script)
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=6))
    assert next(pieces) == "a"
    script.failing = True
    with pytest.raises(RuntimeError, match="a step failed before the text was complete"):
        next(pieces)
    script.failing = False
    assert "".join(engine.stream(PROMPT, SamplingParams(max_tokens=6))) == "abcdef"


def test_abort_ends_a_stream(scripted: Callable[..., Engine]) -> None:
    engine = scripted("abcdef")
    pieces = engine.stream(PROMPT, SamplingParams(max_tokens=6))
    next(pieces)
    engine.abort_request("request-0")
    assert list(pieces) == []


def test_a_prompt_the_tokenizer_cannot_decode_changes_nothing(
    engine: Engine, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request(PROMPT, SamplingParams(max_tokens=3), request_id="running")
    engine.step()

    def decode(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise KeyError(token_ids[0])

    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "decode", decode)
        with pytest.raises(KeyError, match="7"):
            engine.add_request([7], request_id="new")
    assert drain(engine).keys() == {"running"}


def byte_level_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the end of the other"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_a_folder_with_a_tokenizer(
    tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, tmp_path: Path
) -> None:
    model, tokenizer = tiny_model("llama"), byte_level_tokenizer(260)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))
    ids = tokenizer.encode(f"the {TEXT}")
    assert len(ids) < len(f"the {TEXT}".encode()), "some tokens are several bytes"
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    (output,) = engine.generate(f"the {TEXT}", params, progress=False)
    assert output.prompt_token_ids == ids
    expected = hf_greedy(model, ids, 32)
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    assert "".join(engine.stream(f"the {TEXT}", params)) == output.outputs[0].text


def test_a_folder_without_a_tokenizer(
    tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, byte_tokenizer: Any, tmp_path: Path
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.tokenizer is None
    greedy = SamplingParams(max_tokens=5, temperature=0)
    (output,) = engine.generate([1, 2, 3], greedy, progress=False)
    assert output.outputs[0].token_ids == hf_greedy(tiny_model("qwen3"), [1, 2, 3], 5)
    given = make_engine(tmp_path, tokenizer=byte_tokenizer)
    assert given.generate("\x01\x02\x03", greedy, progress=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
