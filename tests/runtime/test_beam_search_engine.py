"""Beam search through the engine: against Hugging Face's generate, and against itself whatever happens around it."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import runtime
from models.step_inputs import StepInputs, StepOutputs
from runtime import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.request import Request, RequestStatus

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]
Alone = Callable[[list[int], BeamSearchParams | SamplingParams], RequestOutput]

LONG = [(7 * i * i + 3 * i) % 256 for i in range(48)]
A, B, C = LONG[:10], LONG[20:25], LONG[25:45]
ENDS = tuple(range(0, 260, 6))  # so many that some completions of a tiny model end before the length does
GREEDY = SamplingParams(max_tokens=16, temperature=0)
SEARCH = BeamSearchParams(3, 12)
CUT_OFF = CompletionOutput(0, [], "", "error")  # what is returned of a search that failed


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def alone(llama: PreTrainedModel) -> Iterator[Alone]:
    """`alone(prompt, params)`: the output of the only request of a roomy engine over llama."""
    engine = runtime.compile(llama, backend="eager", block_size=4, num_blocks=200, progress=False)
    known: dict[tuple, RequestOutput] = {}

    def run(prompt: list[int], params: BeamSearchParams | SamplingParams) -> RequestOutput:
        key = (*prompt, params)
        if key not in known:
            (known[key],) = engine.generate(prompt, params, progress=False)
        return known[key]

    yield run
    engine.close()


def ranked(output: RequestOutput) -> list[tuple]:
    """All that a search has found; scores are float32 sums, whose rounding depends on what else is in the batch."""
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [
        (one.token_ids, one.finish_reason, one.stop_reason, pytest.approx(one.score, rel=1e-5))
        for one in output.outputs
    ]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def lead(engine: Engine) -> Request:
    """The live search "s"."""
    request = engine.scheduler.get("s")
    assert request is not None
    return request


def generate(
    model: PreTrainedModel, prompt: list[int], params: BeamSearchParams, ending: Sequence[int] | None = None
) -> list[tuple]:
    """`ranked` of what Hugging Face finds. ending: what ends a completion, by default the stop tokens."""
    ids, ending = torch.tensor([prompt]), params.stop_token_ids if ending is None else ending
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(ending) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for sequence, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i for i, token in enumerate(sequence) if token in ending), None)
        reason = ("length", None) if end is None else ("stop", sequence[end])
        found.append((sequence if end is None else sequence[: end + 1], *reason, pytest.approx(score, rel=1e-5)))
    return found


# --- Hugging Face's generate ---


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(3, 10),
        BeamSearchParams(4, 12, stop_token_ids=ENDS),
        BeamSearchParams(2, 12, stop_token_ids=ENDS, length_penalty=-0.5, early_stopping="never"),
    ],
    ids=["length", "stops", "never"],
)
def test_sequences_and_scores_equal_those_of_generate(
    family: str, params: BeamSearchParams, tiny_model: TinyModel, make_engine: MakeEngine
) -> None:
    model = tiny_model(family)
    outputs = make_engine(model).generate([A, C], params, progress=False)
    assert [ranked(output) for output in outputs] == [generate(model, prompt, params) for prompt in (A, C)]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.7, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_every_way_to_score_and_to_stop_equals_generate(
    length_penalty: float, early_stopping: Any, llama: PreTrainedModel, alone: Alone
) -> None:
    reasons = set()
    for beam_width, prompt in itertools.product((2, 5), (A, C)):
        params = BeamSearchParams(beam_width, 12, length_penalty, early_stopping, stop_token_ids=ENDS)
        output = alone(prompt, params)
        assert ranked(output) == generate(llama, prompt, params), params
        reasons |= {completion.finish_reason for completion in output.outputs}
    assert "stop" in reasons, "the stop tokens mattered"


def test_a_width_of_one_is_greedy(llama: PreTrainedModel, alone: Alone, hf_greedy: Greedy) -> None:
    output = alone(A, BeamSearchParams(1, 12))
    assert tokens(output) == [hf_greedy(llama, A, 12)]
    stop = hf_greedy(llama, A, 12)[5]
    stopped = alone(A, BeamSearchParams(1, 12, stop_token_ids=[stop]))
    assert tokens(stopped) == tokens(alone(A, replace(GREEDY, stop_token_ids=[stop])))
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_a_score_is_what_one_forward_of_the_completion_gives(llama: PreTrainedModel, alone: Alone) -> None:
    for penalty in (1.0, 0.5):
        for completion in alone(A, BeamSearchParams(4, 12, penalty, stop_token_ids=ENDS)).outputs:
            ids = torch.tensor([A + completion.token_ids])
            logprobs = llama(ids).logits.log_softmax(-1)[0, len(A) - 1 : -1]
            total = logprobs.gather(1, ids[0, len(A) :, None]).sum().item()
            assert completion.score == pytest.approx(total / len(completion.token_ids) ** penalty, rel=1e-5)


def test_the_eos_of_the_model_ends_a_completion_unless_ignored(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    model = copy.deepcopy(llama)
    model.generation_config.eos_token_id = list(ENDS)
    engine, params = make_engine(model), BeamSearchParams(3, 12)
    stop = 250  # beside EOS: a further one that is in no completion by itself
    stopped, also, ignoring = engine.generate(
        [A] * 3, [params, replace(params, stop_token_ids=[stop]), replace(params, ignore_eos=True)], progress=False
    )
    assert ranked(stopped) == generate(model, A, params, ENDS)
    assert ranked(also) == generate(model, A, params, [*ENDS, stop])
    assert ranked(ignoring) == generate(llama, A, params, [])
    assert "stop" in {completion.finish_reason for completion in stopped.outputs}
    assert {completion.finish_reason for completion in ignoring.outputs} == {"length"}


def test_as_many_candidates_as_the_vocabulary_has_tokens(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    params = BeamSearchParams(130, 2)
    (output,) = make_engine(llama, num_blocks=300).generate(B, params, progress=False)
    assert ranked(output) == generate(llama, B, params)


# --- outputs ---


def test_nothing_is_returned_before_the_end(llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone) -> None:
    engine, params = make_engine(llama), BeamSearchParams(3, 6)
    assert engine.add_request(A, params, request_id="s") == "s"
    for _ in range(5):
        assert engine.step() == []
        assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("s", None, A, True)
    assert ranked(output) == ranked(alone(A, params))
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_output_tokens == 6


def test_completions_come_best_first_with_their_reasons(alone: Alone) -> None:
    completions = alone(A, BeamSearchParams(5, 12, stop_token_ids=ENDS)).outputs
    scores = [completion.score for completion in completions]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({tuple(completion.token_ids) for completion in completions}) == 5
    for completion in completions:
        last = completion.token_ids[-1]
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        assert completion.stop_reason == (last if last in ENDS else None)
        assert completion.finish_reason == ("stop" if last in ENDS else "length")
        assert len(completion.token_ids) == 12 or last in ENDS


def test_an_ordinary_completion_has_no_score(alone: Alone) -> None:
    assert [completion.score for completion in alone(A, replace(GREEDY, n=2)).outputs] == [None, None]


def test_the_text_is_that_of_the_tokens_without_the_one_that_ended_them(
    llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer: Any
) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    letters = tuple(range(ord("a"), ord("z") + 1))
    (output,) = engine.generate("prompt", BeamSearchParams(4, 12, stop_token_ids=letters), progress=False)
    assert (output.prompt, output.prompt_token_ids) == ("prompt", list(b"prompt"))
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    for completion in output.outputs:
        kept = [token for token in completion.token_ids if token not in letters]
        assert len(kept) == len(completion.token_ids) - (completion.finish_reason == "stop")
        assert completion.text == byte_tokenizer.decode(kept, skip_special_tokens=True)


def test_a_tokenizer_that_fails_ends_the_search_and_nobody_else(
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    byte_tokenizer: Any,
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    engine.add_request(B, GREEDY, request_id="b")
    engine.add_request(A, BeamSearchParams(2, 4), request_id="s")
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        decode = byte_tokenizer.decode

        def failing(token_ids: list[int], *, skip_special_tokens: bool) -> str:
            if token_ids[:6] == A[-6:]:  # what a detokenizer begins with
                raise RuntimeError("no such token")
            return decode(token_ids, skip_special_tokens=skip_special_tokens)

        patch.setattr(byte_tokenizer, "decode", failing)
        outputs = {output.request_id: output for output in engine.step()}
    assert "the tokenizer failed on 's', which ends" in caplog.text
    assert (outputs["s"].finished, outputs["s"].outputs) == (True, [CUT_OFF])
    assert not outputs["b"].finished
    assert drain(engine).keys() == {"b"}


def test_an_interrupted_step_loses_nothing(
    llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the texts are made: they are made in the next step."""
    engine, params = make_engine(llama, tokenizer=byte_tokenizer), BeamSearchParams(3, 4)
    (expected,) = engine.generate(A, params, progress=False)
    engine.add_request(A, params, request_id="s")
    for _ in range(3):
        engine.step()
    decode, calls = byte_tokenizer.decode, itertools.count()

    def interrupted(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(byte_tokenizer, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert ranked(output) == ranked(expected)
    assert [one.text for one in output.outputs] == [one.text for one in expected.outputs]
    assert not engine.has_unfinished_requests()


# --- in company ---


def test_searches_and_other_requests_share_their_steps(
    llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    engine = make_engine(llama, num_blocks=200)
    drawn = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=3)
    searches = {"s": (A, BeamSearchParams(4, 12, stop_token_ids=ENDS)), "t": (B, BeamSearchParams(2, 16))}
    others = {"greedy": (C, GREEDY), "drawn": (A, drawn)}
    for request_id, (prompt, params) in others.items():
        engine.add_request(prompt, params, request_id=request_id)
    for request_id, (prompt, search) in searches.items():
        engine.add_request(prompt, search, request_id=request_id)
    engine.step()
    assert engine.stats().num_running == 1 + 3 + 1 + 1
    fork = engine.fork("greedy")
    outputs = drain(engine)
    for request_id, (prompt, search) in searches.items():
        assert ranked(outputs[request_id]) == ranked(alone(prompt, search)), request_id
    for request_id, (prompt, params) in others.items():
        assert tokens(outputs[request_id]) == tokens(alone(prompt, params)), request_id
    assert tokens(outputs[fork]) == tokens(alone(C, GREEDY))
    assert engine.stats().num_steps == 16, "as many as the longest of them takes alone"


def test_limits_and_cutting_change_nothing(llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone) -> None:
    batch: list[tuple[list[int], BeamSearchParams | SamplingParams]] = [
        (C, BeamSearchParams(4, 12)),
        (A, BeamSearchParams(3, 12, stop_token_ids=ENDS)),
        (C[:17], GREEDY),
    ]
    for knobs in (
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 7, "block_size": 1, "num_blocks": 220},
        {"long_prefill_token_threshold": 3, "block_size": 16},
        {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 20},
        {"max_num_seqs": 4, "scheduling_policy": "priority"},
        {"num_blocks": 19, "max_num_batched_tokens": 8, "enable_prefix_caching": False, "preemption": "recompute"},
        {"num_blocks": 19, "max_num_batched_tokens": 8, "preemption": "swap"},
        {"dtype": "float64"},
    ):
        engine = make_engine(llama, **knobs)
        outputs = engine.generate([prompt for prompt, _ in batch], [params for _, params in batch], progress=False)
        for output, (prompt, params) in zip(outputs, batch, strict=True):
            if isinstance(params, BeamSearchParams):
                assert ranked(output) == ranked(alone(prompt, params)), knobs
            else:
                assert tokens(output) == tokens(alone(prompt, params)), knobs
        assert (engine.stats().num_preemptions > 0) == (knobs.get("num_blocks") == 19), knobs


def test_a_cached_prompt_is_not_computed_again(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    params = BeamSearchParams(3, 8)
    cached, plain = make_engine(llama), make_engine(llama, enable_prefix_caching=False)
    first, second = (cached.generate(C, params, progress=False)[0] for _ in range(2))
    uncached = [plain.generate(C, params, progress=False)[0] for _ in range(2)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 19)
    assert [output.num_cached_tokens for output in uncached] == [0, 0]
    assert ranked(first) == ranked(second) == ranked(uncached[0]) == ranked(uncached[1])
    assert cached.stats().num_prompt_tokens == 20 + 1


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(
    llama: PreTrainedModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 25 full blocks and 1 token: what is copied is never more than one block for each beam but one."""
    prompt, width = [(3 * i) % 250 for i in range(101)], 4
    engine = make_engine(llama)
    copied: list[list[tuple[int, int]]] = []
    copy_blocks = engine.runner.cache.copy_blocks

    def copying(pairs: Sequence[tuple[int, int]]) -> None:
        copied.append(list(pairs))
        copy_blocks(pairs)

    monkeypatch.setattr(engine.runner.cache, "copy_blocks", copying)
    engine.add_request(prompt, BeamSearchParams(width, 12), request_id="s")
    engine.step()
    manager = engine.scheduler.manager
    shared = manager.block_ids(lead(engine))[:25]
    while engine.scheduler.get("s"):
        beams = lead(engine).sequences
        assert len(beams) == width
        assert [manager.block_ids(beam)[:25] for beam in beams] == [shared] * width
        assert [manager.pool.blocks[i].ref_cnt for i in shared] == [width] * 25
        own = {i for beam in beams for i in manager.block_ids(beam)[25:]}
        assert len(own) <= width * (manager.num_blocks_for(beams[0].num_tokens) - 25)
        assert engine.stats().kv_cache_usage == pytest.approx((25 + len(own)) / 79)
        assert engine.stats().num_running == 1
        engine.step()
        engine.check_integrity()
    assert engine.stats().num_prompt_tokens == 101
    assert len(copied[0]) == width - 1, "the prompt's last block, and one beam wrote in place"
    assert all(len(pairs) < width for pairs in copied)
    assert not set(shared) & {source for pairs in copied for source, _ in pairs}
    assert engine.stats().kv_cache_usage == 0


def test_max_model_len_ends_a_search_as_max_tokens_does(
    llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone
) -> None:
    engine = make_engine(llama, max_model_len=len(A) + 6)
    for stops in ((), ENDS):
        params = BeamSearchParams(3, 50, early_stopping="never", stop_token_ids=stops)
        (output,) = engine.generate(A, params, progress=False)
        assert ranked(output) == ranked(alone(A, replace(params, max_tokens=6)))
    with pytest.raises(ValueError, match=r"a prompt of 16 tokens leaves no room for output within max_model_len=16"):
        engine.add_request(LONG[:16], BeamSearchParams(2))


# --- preemption ---

LATE = LONG[10:34]


def press(preemption: str, order: str, make_engine: MakeEngine, model: PreTrainedModel, **knobs: Any) -> Engine:
    """An engine of 15 blocks with the search "s", that can take 14, and the greedy request "g", that takes 10, in this
    order; the later one is preempted first."""
    space = {"swap_space": 2**-10} if preemption == "swap" else {}
    engine = make_engine(model, num_blocks=16, preemption=preemption, **space, **knobs)
    for request_id in order:
        engine.add_request(*((A, SEARCH) if request_id == "s" else (LATE, GREEDY)), request_id=request_id)
    return engine


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_search_is_preempted_as_a_unit(
    preemption: str, caching: bool, llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    engine = press(preemption, "gs", make_engine, llama, enable_prefix_caching=caching)
    while engine.stats().num_preemptions == 0:
        engine.step()
    search, manager = lead(engine), engine.scheduler.manager
    assert len(search.sequences) == 3
    assert {beam.status for beam in search.sequences} == {RequestStatus.PREEMPTED}
    assert [request.request_id for request in manager.tables()] == ["g"], "all of its blocks are gone"
    assert [manager.is_swapped(beam) for beam in search.sequences] == [preemption == "swap"] * 3
    assert (search.num_preemptions, engine.stats().num_preemptions) == (1, 1)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    outputs = drain(engine)
    assert ranked(outputs["s"]) == ranked(alone(A, SEARCH))
    assert tokens(outputs["g"]) == tokens(alone(LATE, GREEDY))
    counted = engine.scheduler.preemption
    assert (counted.num_swapped_out > 0, counted.num_recomputed > 0) == (preemption == "swap", preemption != "swap")
    assert manager.host_pool.num_used_blocks == 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_search_preempts_a_later_request(
    preemption: str, llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    engine = press(preemption, "sg", make_engine, llama)
    while engine.stats().num_preemptions == 0:
        engine.step()
    assert lead(engine).num_preemptions == 0
    outputs = drain(engine)
    assert ranked(outputs["s"]) == ranked(alone(A, SEARCH))
    assert tokens(outputs["g"]) == tokens(alone(LATE, GREEDY))


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_two_searches_that_do_not_fit_together(
    preemption: str, llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    batch = {"s": (A, SEARCH), "t": (C[:10], BeamSearchParams(2, 16, stop_token_ids=ENDS)), "u": (A[::-1], SEARCH)}
    engine = make_engine(llama, num_blocks=18, preemption=preemption)
    for request_id, (prompt, params) in batch.items():
        engine.add_request(prompt, params, request_id=request_id)
    outputs = drain(engine)
    for request_id, (prompt, params) in batch.items():
        assert ranked(outputs[request_id]) == ranked(alone(prompt, params)), request_id
    assert engine.stats().num_preemptions > 0


def test_beams_are_computed_again_from_what_they_have_in_common(
    llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    engine = make_engine(llama, enable_prefix_caching=False, preemption="recompute")
    engine.add_request(C, SEARCH, request_id="s")
    for _ in range(6):
        engine.step()
    engine.scheduler.preempt_all()
    computed = engine.stats().num_prompt_tokens
    assert computed == 20
    assert ranked(drain(engine)["s"]) == ranked(alone(C, SEARCH))
    assert engine.stats().num_prompt_tokens == 2 * computed, "the prompt once more, not for each beam"


# --- in every state: abort, fork, failure, new weights ---

STATES = ("waiting", "in its prompt", "running", "preempted", "recomputing", "catching up", "swapped out")


def bring(state: str, make_engine: MakeEngine, model: PreTrainedModel, **knobs: Any) -> Engine:
    """An engine with the search "s" in that state and, if swapped out, the greedy request "g" that did it.

    After a preemption by recomputation the lead first computes what the beams share ("recomputing"), then each beam
    the rest but for its last token ("catching up").
    """
    if state == "swapped out":
        engine = press("swap", "gs", make_engine, model, **knobs)
        while not engine.scheduler.manager.is_swapped(lead(engine)):
            engine.step()
        return engine
    engine = make_engine(model, preemption="recompute", enable_prefix_caching=False, max_num_batched_tokens=3, **knobs)
    engine.add_request(A, SEARCH, request_id="s")
    search = lead(engine)
    for _ in range({"waiting": 0, "in its prompt": 2}.get(state, 8)):
        engine.step()
    if state in ("preempted", "recomputing", "catching up"):
        engine.scheduler.preempt_all()
    if state == "recomputing":
        engine.step()
        assert search.status is RequestStatus.RUNNING
        assert 0 < search.num_computed_tokens < search.num_common_tokens
    if state == "catching up":
        engine.step()
        while search.num_common_tokens:
            engine.step()
        assert any(beam.num_computed_tokens < beam.num_tokens - 1 for beam in search.sequences)
    return engine


@pytest.mark.parametrize("state", STATES)
def test_abort_frees_everything(state: str, llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain) -> None:
    engine = bring(state, make_engine, llama)
    engine.abort_request("s")
    engine.check_integrity()
    manager = engine.scheduler.manager
    assert {request.request_id for request in manager.tables()} == ({"g"} if state == "swapped out" else set())
    assert manager.host_pool.num_used_blocks == 0
    assert drain(engine).keys() == ({"g"} if state == "swapped out" else set())


@pytest.mark.parametrize("state", STATES)
def test_a_fork_goes_on_from_the_best_beam(
    state: str,
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    alone: Alone,
    hf_greedy: Greedy,
    byte_tokenizer: Any,
    drain: Drain,
) -> None:
    engine = bring(state, make_engine, llama, tokenizer=byte_tokenizer)
    so_far = lead(engine).num_output_tokens
    # The beams after so many tokens, as none has ended, are what a search of that length finds.
    best = tokens(alone(A, replace(SEARCH, max_tokens=so_far)))[0] if so_far else []
    assert engine.fork("s", GREEDY, new_id="f") == "f"
    engine.check_integrity()
    outputs = drain(engine)
    (completion,) = outputs["f"].outputs
    assert completion.token_ids == best + hf_greedy(llama, A + best, 16 - so_far)
    assert (outputs["f"].prompt_token_ids, completion.finish_reason, completion.score) == (A, "length", None)
    assert completion.text == byte_tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert ranked(outputs["s"]) == ranked(alone(A, SEARCH))


def test_a_fork_looks_for_stop_strings_in_new_text_only(
    llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, byte_tokenizer: Any, drain: Drain
) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    engine.add_request(A, SEARCH, request_id="s")
    for _ in range(5):
        engine.step()
    plain = engine.fork("s", GREEDY)
    past = byte_tokenizer.decode(tokens(alone(A, replace(SEARCH, max_tokens=5)))[0], skip_special_tokens=True)
    stopped = engine.fork("s", replace(GREEDY, stop=past[0]))
    outputs = drain(engine)
    whole, text = outputs[plain].outputs[0].text, outputs[stopped].outputs[0].text
    assert whole.startswith(past)
    end = whole.find(past[0], len(past))
    assert text == (whole if end < 0 else whole[:end])


def test_a_fork_of_a_running_search_computes_nothing_of_it_again(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain
) -> None:
    engine = make_engine(llama)
    engine.add_request(C, SEARCH, request_id="s")
    for _ in range(4):
        engine.step()
    usage = engine.stats().kv_cache_usage
    engine.fork("s", GREEDY)
    assert (engine.stats().kv_cache_usage, engine.stats().num_running) == (usage, 2)
    drain(engine)
    assert engine.stats().num_prompt_tokens == 20


def test_a_fork_of_a_search_needs_params_that_leave_it_tokens(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = bring("running", make_engine, llama)
    so_far = lead(engine).num_output_tokens
    with pytest.raises(ValueError, match=r"'s' is a beam search: give the SamplingParams of its fork"):
        engine.fork("s")
    with pytest.raises(ValueError, match=r"params must be a runtime\.SamplingParams, not BeamSearchParams"):
        engine.fork("s", SEARCH)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"'s' has {so_far} tokens already, so max_tokens={so_far} leaves none"):
        engine.fork("s", replace(GREEDY, max_tokens=so_far))
    assert engine.stats().num_running == 1


def test_a_fork_of_a_search_that_waits_to_be_computed_again_has_blocks_for_all_its_tokens(
    llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, hf_greedy: Greedy, drain: Drain
) -> None:
    """An older request has filled the pool, and the search could not be readmitted yet."""
    engine = make_engine(llama, num_blocks=15, preemption="recompute")
    engine.add_request([5] * 29, replace(GREEDY, max_tokens=24), request_id="g")
    engine.add_request(A, SEARCH, request_id="s")
    search = lead(engine)
    while search.status is not RequestStatus.PREEMPTED or not search.num_common_tokens:
        engine.step()
    so_far, blocks = search.num_output_tokens, engine.scheduler.manager.num_blocks_for
    assert blocks(search.num_common_tokens) < blocks(search.num_tokens)
    best = tokens(alone(A, replace(SEARCH, max_tokens=so_far)))[0]
    assert best == search.output_token_ids, "the lead is the best"
    engine.fork("s", GREEDY, new_id="f")
    outputs = drain(engine)
    assert tokens(outputs["f"]) == [best + hf_greedy(llama, A + best, 16 - so_far)]
    assert ranked(outputs["s"]) == ranked(alone(A, SEARCH))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_failing_step_ends_the_searches_in_it(
    preemption: str,
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    alone: Alone,
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third step of a pressed engine in turn fails, of those too that swap in or compute again."""
    ends = []
    for number in itertools.count(0, 3):
        engine = press(preemption, "gs", make_engine, llama)
        run, runs = engine.runner.executor.run, itertools.count()

        def failing(inputs: StepInputs, run: Any = run, runs: Any = runs, number: int = number) -> StepOutputs:
            outputs = run(inputs)
            if next(runs) == number:
                raise RuntimeError("the device is on fire")
            return outputs

        monkeypatch.setattr(engine.runner.executor, "run", failing)
        outputs = drain(engine)
        assert engine.scheduler.manager.host_pool.num_used_blocks == 0
        search, greedy = outputs["s"], outputs["g"]
        ends.append((search.outputs != [CUT_OFF], greedy.outputs[0].finish_reason))
        if search.outputs != [CUT_OFF]:
            assert ranked(search) == ranked(alone(A, SEARCH)), number
        if ends[-1][1] == "length":
            assert tokens(greedy) == tokens(alone(LATE, GREEDY)), number
        if next(runs) <= number:  # the last step was before
            break
    assert set(ends) == {(False, "error"), (True, "error"), (False, "length"), (True, "length")}
    assert ends[-1] == (True, "length")


def test_a_search_that_failed_has_no_completions(
    llama: PreTrainedModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(llama)
    engine.add_request(A, BeamSearchParams(3, 12, stop_token_ids=range(60)), request_id="s")
    while not (search := lead(engine)).search.hypotheses:  # type: ignore[union-attr]
        assert engine.step() == []

    def failing(inputs: StepInputs) -> StepOutputs:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine.runner.executor, "run", failing)
    (output,) = engine.step()
    assert "the device is on fire" in caplog.text
    assert (output.request_id, output.finished, output.outputs) == ("s", True, [CUT_OFF])
    assert search.finish_reason == "error"
    assert (engine.stats().num_running, engine.stats().kv_cache_usage) == (0, 0)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("state", STATES)
def test_a_search_goes_on_under_new_weights(
    state: str, llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone, drain: Drain
) -> None:
    """The weights are the old ones first, so that nothing may change, then others."""
    engine = bring(state, make_engine, llama)
    engine.load_weights(llama.state_dict())
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    assert engine.scheduler.manager.host_pool.num_used_blocks == 0
    assert ranked(drain(engine)["s"]) == ranked(alone(A, SEARCH))
    engine = bring(state, make_engine, llama)
    so_far = lead(engine).num_output_tokens
    engine.load_weights({name: tensor.flip(0) for name, tensor in llama.state_dict().items()})
    output = drain(engine)["s"]
    scores = [completion.score for completion in output.outputs]
    assert all(score is not None and math.isfinite(score) for score in scores)
    assert [len(completion.token_ids) for completion in output.outputs] == [12] * 3
    begun = tokens(alone(A, replace(SEARCH, max_tokens=so_far))) if so_far else [[]] * 3
    assert all(completion.token_ids[:so_far] in begun for completion in output.outputs)
    assert tokens(output) != tokens(alone(A, SEARCH))


# --- what is refused, and what is just accepted ---


@pytest.mark.parametrize(
    ("knobs", "prompt", "params", "message"),
    [
        ({"max_num_seqs": 3}, A, BeamSearchParams(4), "beam_width=4 sequences are more than may run in one step, 3"),
        (
            {"max_num_batched_tokens": 3},
            A,
            BeamSearchParams(4),
            "more than may run in one step, 3: lower beam_width or raise max_num_seqs and max_num_batched_tokens",
        ),
        (
            {"num_blocks": 14},
            A,
            BeamSearchParams(3, 12),
            "3 beams of up to 22 tokens can take 14 blocks of 4, the pool offers 13: raise num_blocks to at least 15",
        ),
        ({}, A, BeamSearchParams(131, 1), "beam_width=131 needs 262 candidates, and the vocabulary has 260 tokens"),
        ({}, A, BeamSearchParams(20, 1, stop_token_ids=ENDS), "beam_width=20 needs 900 candidates"),
        ({}, A, BeamSearchParams(2, stop_token_ids=[260]), "stop token id 260 is out of the vocabulary"),
        ({}, [], BeamSearchParams(2), "an empty prompt"),
        ({}, "text", BeamSearchParams(2), "a text prompt needs a tokenizer"),
        ({}, A, {"beam_width": 2}, "params must be a runtime.SamplingParams, not dict"),
        ({}, A, BeamSearchParams, "params must be a runtime.SamplingParams, not type"),
        ({"max_model_len": 10}, A, BeamSearchParams(2), "a prompt of 10 tokens leaves no room for output"),
    ],
)
def test_what_can_never_run_is_refused_and_changes_nothing(
    knobs: dict[str, Any], prompt: Any, params: Any, message: str, llama: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, **knobs)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished_requests()


def test_a_search_cannot_be_streamed(llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer: Any) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    with pytest.raises(ValueError, match="a beam search has no text before its end: use generate, or add_request"):
        next(engine.stream("text", BeamSearchParams(2)))  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def worst_case(prompt: list[int], params: BeamSearchParams, block_size: int) -> int:
    """All full blocks of the prompt once, and for each beam those of all other tokens but the last."""
    shared, whole = len(prompt) // block_size, len(prompt) + params.max_tokens - 1
    return shared + params.beam_width * (-(-whole // block_size) - shared)


SMALLEST = [
    (LONG[:10], BeamSearchParams(3, 12), 4),
    (LONG[:8], BeamSearchParams(4, 9), 4),  # the prompt ends with its block
    (LONG[:1], BeamSearchParams(5, 3), 8),
    (LONG[:7], BeamSearchParams(2, 11), 1),
    (LONG[:16], BeamSearchParams(4, 14, stop_token_ids=ENDS), 8),
]


@pytest.mark.parametrize(("prompt", "params", "block_size"), SMALLEST)
def test_the_smallest_pool_that_is_accepted_is_enough(
    prompt: list[int],
    params: BeamSearchParams,
    block_size: int,
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    alone: Alone,
    drain: Drain,
) -> None:
    num_blocks = worst_case(prompt, params, block_size) + 1
    knobs: dict[str, Any] = {"block_size": block_size}
    with pytest.raises(ValueError, match=rf"raise num_blocks to at least {num_blocks}[,\b]"):
        make_engine(llama, num_blocks=num_blocks - 1, **knobs).add_request(prompt, params)
    for caching in (True, False):
        engine = make_engine(llama, num_blocks=num_blocks, enable_prefix_caching=caching, **knobs)
        # So that the prompt's last block may be cached in part.
        engine.generate([*prompt[:-2], *prompt], replace(GREEDY, max_tokens=2), progress=False)
        engine.add_request(prompt, params, request_id="s")
        assert ranked(drain(engine)["s"]) == ranked(alone(prompt, params)), caching
        assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_smallest_pool_is_enough_after_a_preemption_too(
    preemption: str, llama: PreTrainedModel, make_engine: MakeEngine, alone: Alone
) -> None:
    """4 blocks for 4 beams; the greedy request leaves 3, and in the prefix cache a block that begins as the prompt."""
    engine, params = make_engine(llama, block_size=8, num_blocks=5, preemption=preemption), BeamSearchParams(4, 4)
    engine.add_request([*A[:3], 9], replace(GREEDY, max_tokens=8), request_id="g")
    engine.add_request(A[:3], params, request_id="s")
    outputs: dict[str, RequestOutput] = {}
    for _ in range(8 + 2 * 4):
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert engine.stats().num_preemptions > 0
    assert ranked(outputs["s"]) == ranked(alone(A[:3], params))
