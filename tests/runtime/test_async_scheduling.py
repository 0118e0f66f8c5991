"""One step ahead: the outputs are those of one step after the other, whatever happens while a step is in flight."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.model_runner import StepInFlight
from runtime.request import Request

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Drain = Callable[[Engine], dict[str, RequestOutput]]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7]]


@pytest.fixture
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(params=["eager", "graphs", pytest.param("cuda", marks=pytest.mark.cuda)])
def make_ahead(request: pytest.FixtureRequest, make_engine: MakeEngine) -> MakeEngine:
    """`make_engine` with steps ahead: without graphs, with imitated ones, and with CUDA's."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")

    def make(model: PreTrainedModel, **knobs: Any) -> Engine:
        device = {"device": "cuda" if request.param == "cuda" else "cpu", "cuda_graphs": request.param != "eager"}
        return make_engine(model, **{"async_scheduling": True, "debug": True, **device, **knobs})

    return make


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def completions(outputs: dict[str, RequestOutput]) -> dict[str, list[tuple[list[int], str, Any, Any]]]:
    return {
        request_id: [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
        for request_id, output in outputs.items()
    }


def test_a_decode_step_is_launched_before_the_tokens_before_it_are_known(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama)
    ids = [engine.add_request(prompt, greedy(12)) for prompt in PROMPTS]
    outputs = drain(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [hf_greedy(llama, prompt, 12) for prompt in PROMPTS]
    stats = engine.stats()
    assert (stats.num_steps, stats.num_steps_ahead) == (12, 11)  # no step in vain: the length was foreseen
    assert stats.num_output_tokens == 36


def test_every_family_gives_the_same_tokens(
    family: str, tiny_model: TinyModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    model = tiny_model(family)
    engine = make_ahead(model)
    ids = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
    outputs = drain(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [hf_greedy(model, prompt, 9) for prompt in PROMPTS]
    assert engine.stats().num_steps_ahead > 5


MANY: list[SamplingParams | BeamSearchParams] = [
    greedy(20),
    SamplingParams(max_tokens=17, temperature=0.9, seed=3),
    SamplingParams(max_tokens=15, temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(max_tokens=20, temperature=1.0, seed=5, stop_token_ids=list(range(40))),
    SamplingParams(max_tokens=20, temperature=1.0, seed=6, stop_token_ids=list(range(40)), min_tokens=6),
    SamplingParams(max_tokens=20, temperature=1.0, seed=7, stop=["a", "B", "7"]),
    SamplingParams(max_tokens=7, temperature=1.0, seed=8, n=3),
    BeamSearchParams(beam_width=3, max_tokens=6),
    SamplingParams(max_tokens=1, temperature=1.0, seed=9),
    SamplingParams(max_tokens=30, temperature=1.0, seed=10, stop_token_ids=list(range(12)), min_tokens=20),
]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"num_blocks": 14, "preemption": "recompute"},
        {"num_blocks": 14, "preemption": "swap"},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 3, "enable_prefix_caching": False},
        {"max_num_seqs": 4, "enable_chunked_prefill": False, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_outputs_are_those_of_one_step_after_the_other(
    knobs: dict[str, Any],
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    make_ahead: MakeEngine,
    drain: Drain,
    byte_tokenizer: object,
) -> None:
    """All that ends a request, and all that cannot run ahead, arriving at different times."""

    def run(engine: Engine) -> dict[str, RequestOutput]:
        last: dict[str, RequestOutput] = {}
        for number, params in enumerate(MANY):
            engine.add_request(PROMPTS[number % 3] + [number], params, request_id=str(number))
            for _ in range(number % 4):
                last.update({output.request_id: output for output in engine.step()})
        last.update(drain(engine))
        return last

    plain = make_engine(llama, tokenizer=byte_tokenizer, **knobs)
    ahead = make_ahead(llama, tokenizer=byte_tokenizer, **knobs)
    assert completions(run(ahead)) == completions(run(plain))
    assert plain.stats().num_steps_ahead == 0
    assert ahead.stats().num_steps_ahead > 5
    assert ahead.stats().num_output_tokens == plain.stats().num_output_tokens


def test_what_is_aborted_in_flight_leaves_its_blocks_to_others(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    """The pool holds two requests: the third can only take the blocks of the one that is in flight."""
    engine = make_ahead(llama, num_blocks=11, block_size=4, enable_prefix_caching=False)
    engine.add_request(PROMPTS[0], greedy(12), request_id="stays")
    engine.add_request(PROMPTS[1], greedy(12), request_id="goes")
    for _ in range(4):
        engine.step()
    engine.abort_request("goes")
    engine.check_integrity()
    engine.add_request(PROMPTS[2], greedy(9), request_id="comes")
    outputs = drain(engine)
    assert outputs["stays"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[0], 12)
    assert outputs["comes"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[2], 9)
    assert set(outputs) == {"stays", "comes"}


def test_what_ends_in_flight_leaves_its_blocks_to_others(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    """A stop token is seen only when the next step, with a row in vain, has been launched."""
    expected = hf_greedy(llama, PROMPTS[0], 12)
    stop = next(index for index in range(3, 12) if expected[index] not in expected[:index])
    engine = make_ahead(llama, num_blocks=9, block_size=4, enable_prefix_caching=False)
    engine.add_request(PROMPTS[0], greedy(12, stop_token_ids=[expected[stop]]), request_id="ends")
    engine.add_request(PROMPTS[1], greedy(12), request_id="stays")
    engine.add_request(PROMPTS[2], greedy(9), request_id="waits")
    outputs = drain(engine)
    assert outputs["ends"].outputs[0].token_ids == expected[: stop + 1]
    assert outputs["ends"].outputs[0].finish_reason == "stop"
    assert outputs["stays"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[1], 12)
    assert outputs["waits"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[2], 9)


@pytest.mark.parametrize("params", [greedy(16), SamplingParams(max_tokens=12, temperature=1.0, seed=3)], ids=str)
def test_a_fork_goes_on_from_what_was_delivered(
    params: SamplingParams, llama: PreTrainedModel, make_engine: MakeEngine, make_ahead: MakeEngine, drain: Drain
) -> None:
    """A token in flight is the parent's alone: it is drawn again after the fork, and the child draws its own."""
    found = []
    for engine in (make_engine(llama), make_ahead(llama)):
        engine.add_request(PROMPTS[0], params, request_id="parent")
        for _ in range(5):
            engine.step()
        engine.fork("parent", new_id="child")
        found.append(completions(drain(engine)))
    assert found[0] == found[1]


def test_what_has_one_token_in_flight_left_can_still_be_forked(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama)
    engine.add_request(PROMPTS[0], greedy(3), request_id="short")
    engine.step()
    engine.step()
    engine.fork("short", greedy(9), new_id="long")
    outputs = drain(engine)
    assert outputs["short"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[0], 3)
    assert outputs["long"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[0], 9)


def test_new_weights_replace_those_of_a_step_in_flight(
    llama: PreTrainedModel, tiny_model: TinyModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama)
    engine.add_request(PROMPTS[0], greedy(8), request_id="a")
    for _ in range(4):
        engine.step()
    negated = {name: -tensor for name, tensor in llama.state_dict().items()}
    engine.load_weights(negated)
    engine.load_weights(llama.state_dict())
    outputs = drain(engine)
    assert outputs["a"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[0], 8)


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_failure_ends_the_requests_of_its_step_after_the_tokens_before(
    fails_at: int, llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama)
    run, count = engine.runner.executor.run, iter(range(100))

    def failing(inputs: object) -> object:
        if next(count) == fails_at:
            raise RuntimeError("the device is on fire")
        return run(inputs)  # type: ignore[arg-type]

    engine.runner.executor.run = failing  # type: ignore[method-assign, assignment]
    for index in range(2):
        engine.add_request(PROMPTS[index], greedy(9), request_id=str(index))
    outputs = drain(engine)
    for index in range(2):
        (one,) = outputs[str(index)].outputs
        assert one.finish_reason == "error"
        assert one.token_ids == hf_greedy(llama, PROMPTS[index], 9)[:fails_at]
    engine.add_request(PROMPTS[2], greedy(5), request_id="after")
    assert drain(engine)["after"].outputs[0].token_ids == hf_greedy(llama, PROMPTS[2], 5)


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_an_interruption_loses_no_token(
    where: str,
    at: int,
    llama: PreTrainedModel,
    make_ahead: MakeEngine,
    hf_greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the device has run the step, and before its tokens are taken."""
    engine = make_ahead(llama)
    target: Any = engine.runner if where == "launch" else StepInFlight
    original, count = getattr(target, where), iter(range(1000))

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if next(count) == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(target, where, interrupted)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(10), request_id=str(index))
    last: dict[str, list[int]] = {}
    num_interrupted = 0
    while engine.has_unfinished_requests():
        try:
            last.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        except KeyboardInterrupt:
            num_interrupted += 1
            engine.check_integrity()
    assert num_interrupted == 1
    assert last == {str(index): hf_greedy(llama, prompt, 10) for index, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("at", [2, 4, 7, 11])
def test_an_interruption_between_tokens_loses_none(
    at: int, ahead: bool, llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, monkeypatch: Any
) -> None:
    """Ctrl-C after some requests of a step have got their tokens, and others not."""
    engine = make_engine(llama, async_scheduling=ahead)
    append, count = Request.append_token, iter(range(1000))

    def interrupted(self: Request, token: int) -> bool:
        ended = append(self, token)
        if next(count) == at:
            raise KeyboardInterrupt
        return ended

    monkeypatch.setattr(Request, "append_token", interrupted)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(10), request_id=str(index))
    last: dict[str, list[int]] = {}
    num_interrupted = 0
    while engine.has_unfinished_requests():
        try:
            last.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        except KeyboardInterrupt:
            num_interrupted += 1
    assert num_interrupted == 1
    assert last == {str(index): hf_greedy(llama, prompt, 10) for index, prompt in enumerate(PROMPTS)}


def test_steps_run_ahead_while_a_request_waits_for_blocks(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama, num_blocks=9, block_size=4, enable_prefix_caching=False)
    ids = [engine.add_request(prompt, greedy(16)) for prompt in (PROMPTS[1], PROMPTS[0], PROMPTS[2])]
    outputs = drain(engine)
    assert [outputs[i].outputs[0].token_ids for i in ids] == [
        hf_greedy(llama, prompt, 16) for prompt in (PROMPTS[1], PROMPTS[0], PROMPTS[2])
    ]
    assert engine.stats().num_steps_ahead > 0.6 * engine.stats().num_steps


def test_streams_and_batches_go_on_side_by_side(
    llama: PreTrainedModel, make_ahead: MakeEngine, hf_greedy: Greedy, byte_tokenizer: object
) -> None:
    engine = make_ahead(llama, tokenizer=byte_tokenizer)
    stream = engine.stream(PROMPTS[0], greedy(12))
    pieces = [next(stream)]
    (output,) = engine.generate([PROMPTS[1]], greedy(8), progress=False)
    assert output.outputs[0].token_ids == hf_greedy(llama, PROMPTS[1], 8)
    pieces += list(stream)
    (alone,) = engine.generate([PROMPTS[0]], greedy(12), progress=False)
    assert "".join(pieces) == alone.outputs[0].text
    assert not engine.has_unfinished_requests()
