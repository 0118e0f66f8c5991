"""One step ahead: the outputs are those of one step after the other, whatever happens while a step is in flight."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.model_runner import StepInFlight

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Drain = Callable[[Engine], dict[str, RequestOutput]]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7]]


@pytest.fixture
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def make_ahead(request: pytest.FixtureRequest, make_engine: MakeEngine) -> MakeEngine:
    """`make_engine` with steps ahead, without graphs and with imitated ones."""

    def make(model: PreTrainedModel, **knobs: Any) -> Engine:
        return make_engine(model, **{"async_scheduling": True, "cuda_graphs": request.param, "debug": True, **knobs})

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


def test_a_fork_of_what_is_in_flight_goes_on_from_its_latest_token(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain, hf_greedy: Greedy
) -> None:
    engine = make_ahead(llama)
    engine.add_request(PROMPTS[0], greedy(16), request_id="parent")
    for _ in range(5):
        engine.step()
    engine.fork("parent", new_id="child")
    outputs = drain(engine)
    expected = hf_greedy(llama, PROMPTS[0], 16)
    assert outputs["parent"].outputs[0].token_ids == outputs["child"].outputs[0].token_ids == expected


def test_a_fork_of_what_ended_in_flight_is_refused(
    llama: PreTrainedModel, make_ahead: MakeEngine, drain: Drain
) -> None:
    engine = make_ahead(llama)
    engine.add_request(PROMPTS[0], greedy(3), request_id="short")
    engine.add_request(PROMPTS[1], greedy(9), request_id="long")
    engine.step()
    engine.step()
    with pytest.raises(ValueError, match="unknown or has ended"):
        engine.fork("short")
    outputs = drain(engine)  # what was collected for the fork is still delivered
    assert {request_id: len(output.outputs[0].token_ids) for request_id, output in outputs.items()} == {
        "short": 3,
        "long": 9,
    }


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
