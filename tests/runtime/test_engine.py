"""The engine over a tiny real model: the API, the schedule's edges, and equality whatever happens around a request."""

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch
from transformers import PreTrainedModel

from models.step_inputs import StepInputs, StepOutputs
from runtime import RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

LONG = [(7 * i * i + 3 * i) % 256 for i in range(48)]
A, B, C = LONG[:13], LONG[20:25], LONG[25:45]


def greedy(n: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, **fields)  # type: ignore[arg-type]


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def engine(llama: PreTrainedModel, make_engine: MakeEngine) -> Engine:
    return make_engine(llama)


@pytest.fixture(scope="module")
def indifferent(tiny_model: TinyModel) -> PreTrainedModel:
    """A model whose logits are all 0: greedy rows tie, and random ones show their noise alone."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


class FailingExecutor:
    """Raises in the runs of these numbers, counted from 0, after the forward has written the cache."""

    num_recompiles = 0

    def __init__(self, engine: Engine, *failing: int) -> None:
        self._run, self._numbers, self._failing = engine.runner.executor.run, itertools.count(), failing

    def run(self, inputs: StepInputs) -> StepOutputs:
        outputs = self._run(inputs)
        if next(self._numbers) in self._failing:
            raise RuntimeError("the device is on fire")
        return outputs


# --- step, generate, stats ---


def test_step_returns_cumulative_outputs(engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy) -> None:
    expected = hf_greedy(llama, A, 6)
    assert engine.add_request(A, greedy(6), request_id="a") == "a"
    for n in range(1, 7):
        (output,) = engine.step()
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", None, A)
        assert output.finished == (n == 6)
        (completion,) = output.outputs
        assert (completion.index, completion.token_ids, completion.text) == (0, expected[:n], "")
        assert (completion.finish_reason, completion.stop_reason) == ("length" if n == 6 else None, None)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_a_chunk_in_mid_prompt_returns_nothing(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, max_num_batched_tokens=5)
    engine.add_request(A, greedy(1))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]


def test_generate_takes_one_prompt_or_many(engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy) -> None:
    assert [tokens(o) for o in engine.generate(A, greedy(3), progress=False)] == [hf_greedy(llama, A, 3)]
    many = engine.generate([A, B, C], [greedy(2), greedy(5), greedy(3)], progress=False)
    assert [tokens(o) for o in many] == [hf_greedy(llama, p, n) for p, n in ((A, 2), (B, 5), (C, 3))]
    assert [o.prompt_token_ids for o in many] == [A, B, C]
    assert engine.generate([], progress=False) == []
    assert len(tokens(engine.generate(A, progress=False)[0])) == SamplingParams().max_tokens


def test_generate_keeps_the_outputs_of_other_requests_for_step(
    engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy, drain: Drain
) -> None:
    engine.add_request(A, greedy(4), request_id="short")
    engine.add_request(C, greedy(12), request_id="long")
    (output,) = engine.generate(B, greedy(8), progress=False)
    assert tokens(output) == hf_greedy(llama, B, 8)
    assert engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="'short' has output that step"):
        engine.add_request(B, request_id="short")
    first = {o.request_id: o for o in engine.step()}
    assert first["short"].finished
    assert tokens(first["short"]) == hf_greedy(llama, A, 4)
    assert tokens(first["long"]) == hf_greedy(llama, C, 9)
    assert tokens(drain(engine)["long"]) == hf_greedy(llama, C, 12)


def test_generate_leaves_nothing_behind_if_a_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.generate([A, B, []], progress=False)
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match=r"2 prompts need one SamplingParams, or one each; 3 were given"):
        engine.generate([A, B], [greedy(1)] * 3, progress=False)


def test_stats(llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain) -> None:
    engine = make_engine(llama, max_num_seqs=1, num_blocks=11)
    for prompt in (A, A):
        engine.add_request(prompt, greedy(4))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.kv_cache_usage) == (0, 2, 0, 0.0)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert stats.kv_cache_usage == 0.4, "13 tokens take 4 of 10 blocks"
    drain(engine)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_output_tokens) == (8, 8)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (26, 12)
    assert stats.num_prompt_tokens == 13 + 1
    assert (stats.num_preemptions, stats.resumed_cache_queries, stats.resumed_cache_hits) == (0, 0, 0)
    assert stats.num_recompiles == 0
    with pytest.raises(FrozenInstanceError):
        stats.num_steps = 0  # type: ignore[misc]


# --- prefix cache ---


def test_a_prompt_wholly_cached_computes_one_token(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    engine = make_engine(llama, block_size=16, num_blocks=20)
    expected = hf_greedy(llama, LONG, 20)
    (first,) = engine.generate(LONG, greedy(20), progress=False)
    (second,) = engine.generate(LONG, greedy(20), progress=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 47)
    assert tokens(first) == tokens(second) == expected


def test_salts_keep_prefixes_apart(engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy, drain: Drain) -> None:
    hits = {}
    for request_id, salt in (("1", "s"), ("2", "s"), ("3", "t"), ("4", None), ("5", None)):
        engine.add_request(C, greedy(4), request_id=request_id, cache_salt=salt)
        output = drain(engine)[request_id]
        hits[request_id] = output.num_cached_tokens
        assert tokens(output) == hf_greedy(llama, C, 4)
    assert hits == {"1": 0, "2": 19, "3": 0, "4": 0, "5": 19}, "all but the last token"


def test_reset_prefix_cache(engine: Engine, drain: Drain) -> None:
    engine.add_request(C, greedy(4))
    engine.step()
    assert engine.reset_prefix_cache() is False, "a block is in use"
    drain(engine)
    assert engine.reset_prefix_cache() is True
    assert engine.generate(C, greedy(4), progress=False)[0].num_cached_tokens == 0
    assert engine.generate(C, greedy(4), progress=False)[0].num_cached_tokens == 19


# --- scheduling over a real model ---


def test_a_lone_request_that_outgrows_the_pool(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    with pytest.warns(UserWarning, match=r"max_model_len=256 is larger than the KV cache, which holds 20 tokens"):
        engine = make_engine(llama, num_blocks=6, max_model_len=256)
    (output,) = engine.generate(A, greedy(50), progress=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", "kv_cache_full")
    # The 21st token is drawn from the 20th's logits and needs no slot of its own.
    assert tokens(output) == hf_greedy(llama, A, 20 - len(A) + 1)


def test_max_model_len(llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    engine = make_engine(llama, max_model_len=32)
    (output,) = engine.generate(LONG[:31], greedy(9), progress=False)
    assert tokens(output) == hf_greedy(llama, LONG[:31], 1)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    for n in (32, 33):
        with pytest.raises(ValueError, match=rf"a prompt of {n} tokens .* max_model_len=32"):
            engine.add_request(LONG[:n])
    assert tokens(engine.generate(A, greedy(3), progress=False)[0]) == hf_greedy(llama, A, 3)


def test_default_max_model_len_is_what_model_and_pool_hold(
    llama: PreTrainedModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="runtime"):
        assert make_engine(llama, num_blocks=11).max_model_len == 40
        assert "max_model_len is 40, what the KV cache holds; the model allows 256" in caplog.text
    assert make_engine(llama, num_blocks=100).max_model_len == 256
    bytes_per_token = 3 * 2 * 2 * 8 * 4  # layers, K and V, kv heads, head dim, float32
    by_bytes = make_engine(llama, num_blocks=None, kv_cache_memory_bytes=11 * 4 * bytes_per_token + 5)
    assert by_bytes.max_model_len == 40
    assert make_engine(llama, num_blocks=None, max_num_seqs=2).max_model_len == 256


def test_fewer_tokens_a_step_than_sequences(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    engine = make_engine(llama, max_num_batched_tokens=2, max_num_seqs=8)
    ids = [engine.add_request(prompt, greedy(6)) for prompt in (B, A, B)]
    outputs = drain(engine)
    assert [tokens(outputs[i]) for i in ids] == [hf_greedy(llama, p, 6) for p in (B, A, B)]


def test_limits_and_cutting_do_not_change_the_tokens(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    batch, params = [C, A, B, LONG], greedy(12)
    expected = [hf_greedy(llama, prompt, 12) for prompt in batch]
    for knobs in (
        {},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 48},
        {"long_prefill_token_threshold": 5},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "block_size": 1, "num_blocks": 200},
        {"num_blocks": 22},  # the first two hold 8 + 7 blocks, and LONG wants 15 in the end
        {"num_blocks": 22, "enable_prefix_caching": False, "max_num_batched_tokens": 9},
    ):
        engine = make_engine(llama, **knobs)
        outputs = engine.generate(batch, params, progress=False)
        assert [tokens(o) for o in outputs] == expected, knobs


# --- abort ---


def test_abort_in_every_state(llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain) -> None:
    """19 usable blocks: "keep" and "running" decode, "chunk" is in mid-prompt, "waiting" does not fit."""
    engine = make_engine(llama, num_blocks=20, max_num_batched_tokens=12)
    for request_id, prompt in (("keep", B), ("running", A), ("chunk", C[::-1]), ("waiting", LONG)):
        engine.add_request(prompt, greedy(16), request_id=request_id)
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)
    chunk = scheduler.get("chunk")
    assert chunk is not None
    assert 0 < chunk.num_computed_tokens < len(C)
    for request_id in ("running", "chunk", "waiting", "unknown", "running"):
        engine.abort_request(request_id)
        engine.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    outputs = drain(engine)
    assert outputs.keys() == {"keep"}
    assert tokens(outputs["keep"]) == hf_greedy(llama, B, 16)
    engine.abort_request("keep")


def test_abort_of_a_preempted_request(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    engine = make_engine(llama, num_blocks=11)
    engine.add_request(A, greedy(20), request_id="first")
    engine.add_request(C[:13], greedy(20), request_id="second")
    while engine.stats().num_preemptions == 0:
        engine.step()
    engine.abort_request("second")
    outputs = drain(engine)
    assert outputs.keys() == {"first"}
    assert tokens(outputs["first"]) == hf_greedy(llama, A, 20)


def test_abort_drops_undelivered_output_and_frees_the_id(engine: Engine, drain: Drain) -> None:
    engine.add_request(A, greedy(2), request_id="a")
    engine.generate(B, greedy(4), progress=False)
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    engine.add_request(A, greedy(2), request_id="a")
    assert drain(engine).keys() == {"a"}


# --- a forward that fails ---


def test_a_failed_forward_ends_its_requests_only(
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    hf_greedy: Greedy,
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of three requests, the third waits while the step of the two others fails, and shares the first one's prompt."""
    engine = make_engine(llama, max_num_seqs=2)
    engine.runner.executor = FailingExecutor(engine, 1)
    for request_id, prompt in (("a", A), ("b", B), ("c", A)):
        engine.add_request(prompt, greedy(8), request_id=request_id)
    outputs = drain(engine)
    assert "the device is on fire" in caplog.text
    for request_id, prompt in (("a", A), ("b", B)):
        assert outputs[request_id].outputs[0].finish_reason == "error"
        assert tokens(outputs[request_id]) == hf_greedy(llama, prompt, 1), "what was drawn before the failure"
    assert outputs["c"].outputs[0].finish_reason == "length"
    assert tokens(outputs["c"]) == hf_greedy(llama, A, 8)
    assert tokens(engine.generate(B, greedy(8), progress=False)[0]) == hf_greedy(llama, B, 8)


def test_a_failed_prefill_publishes_nothing(engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy) -> None:
    engine.runner.executor = FailingExecutor(engine, 0)
    (failed,) = engine.generate(C, greedy(3), progress=False)
    assert (failed.finished, tokens(failed), failed.outputs[0].finish_reason) == (True, [], "error")
    (output,) = engine.generate(C, greedy(3), progress=False)
    assert output.num_cached_tokens == 0
    assert tokens(output) == hf_greedy(llama, C, 3)


# --- stops, by token ---


def test_stop_token_and_min_tokens(engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy) -> None:
    free = hf_greedy(llama, A, 20)
    stop = free[4]
    at = free.index(stop)
    batch = [greedy(20, stop_token_ids=[stop]), greedy(20, stop_token_ids=[stop], min_tokens=10), greedy(20)]
    stopped, later, unstopped = engine.generate([A] * 3, batch, progress=False)
    assert tokens(stopped) == free[: at + 1], "the stop token is kept"
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert tokens(unstopped) == free
    # Hugging Face's min_new_tokens masks EOS just so.
    ids = torch.tensor([A])
    masked = llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        eos_token_id=stop,
        pad_token_id=0,
        min_new_tokens=10,
        max_new_tokens=20,
        do_sample=False,
    )
    assert tokens(later) == masked[0, len(A) :].tolist()
    assert stop not in tokens(later)[:10]
    assert len(tokens(later)) >= 10


def test_eos_of_the_generation_config(llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    free = hf_greedy(llama, A, 12)
    model = copy.deepcopy(llama)
    model.generation_config.eos_token_id = [free[3], 50_000]  # the second is beyond the vocabulary
    engine = make_engine(model)
    batch = [greedy(12), greedy(12, ignore_eos=True), greedy(12, min_tokens=12)]
    stopped, ignoring, masked = engine.generate([A] * 3, batch, progress=False)
    assert tokens(stopped) == free[: free.index(free[3]) + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", free[3])
    assert (tokens(ignoring), ignoring.outputs[0].finish_reason) == (free, "length")
    assert len(tokens(masked)) == 12
    assert free[3] not in tokens(masked)[:11]


# --- sampling ---


def test_ties_go_to_the_lowest_id_among_random_rows(indifferent: PreTrainedModel, make_engine: MakeEngine) -> None:
    fields = [
        {"temperature": 0},
        {},
        {"top_k": 1},
        {"seed": 3},
        {"temperature": 0, "stop_token_ids": [0], "min_tokens": 8},
    ]
    batch = [SamplingParams(max_tokens=8, **field) for field in fields]  # type: ignore[arg-type]
    zero, random, top_1, seeded, masked = (
        tokens(o) for o in make_engine(indifferent).generate([A] * 5, batch, progress=False)
    )
    assert zero == top_1 == [0] * 8
    assert masked == [1] * 8
    assert len(set(random)) > 4
    assert len(set(seeded)) > 4


def test_top_k_1_equals_temperature_0_among_random_rows(
    engine: Engine, llama: PreTrainedModel, hf_greedy: Greedy
) -> None:
    batch = [
        greedy(10),
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=10, top_k=1),
        SamplingParams(max_tokens=10),
    ]
    outputs = [tokens(o) for o in engine.generate([C] * 4, batch, progress=False)]
    assert outputs[0] == outputs[2] == hf_greedy(llama, C, 10)
    assert len({tuple(o) for o in outputs}) == 3


def test_a_seed_draws_the_same_whatever_happens_around_it(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    seeded = SamplingParams(max_tokens=20, seed=11, temperature=0.8, top_p=0.95)
    alone = tokens(make_engine(llama).generate(A, seeded, progress=False)[0])
    again = tokens(make_engine(llama, seed=5).generate(A, seeded, progress=False)[0])
    others = SamplingParams(max_tokens=20)
    crowded = make_engine(llama, max_num_batched_tokens=8).generate(
        [B, C, A, LONG, A], [others, others, seeded, others, seeded], progress=False
    )
    tight = make_engine(llama, num_blocks=20)
    preempted = tight.generate([C, A], [others, seeded], progress=False)
    pressed = make_engine(llama, num_blocks=16)
    last = pressed.generate([C, B, A], [others, others, seeded], progress=False)[2]
    assert pressed.stats().num_preemptions > 0
    assert alone == again == tokens(crowded[2]) == tokens(crowded[4]) == tokens(preempted[1]) == tokens(last)
    assert alone != tokens(make_engine(llama).generate(A, SamplingParams(max_tokens=20, seed=12), progress=False)[0])


def test_successive_draws_without_a_seed_differ(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=12)
    engine = make_engine(llama)
    draws = [
        tokens(o) for o in engine.generate([A, A], params, progress=False) + engine.generate(A, params, progress=False)
    ]
    assert len({tuple(draw) for draw in draws}) == 3
    same = make_engine(llama).generate([A, A, A], params, progress=False)
    assert [tokens(o) for o in same] == draws, "an engine's seed makes its whole history repeatable"
    other = make_engine(llama, seed=1).generate([A, A, A], params, progress=False)
    assert [tokens(o) for o in other] != draws


def test_two_prompts_under_one_seed_do_not_share_noise(indifferent: PreTrainedModel, make_engine: MakeEngine) -> None:
    """With all logits equal and prompts of one length, what is drawn is the noise and nothing else."""
    params = SamplingParams(max_tokens=12, seed=4)
    one, other, again = make_engine(indifferent).generate([A, A[::-1], A], params, progress=False)
    assert tokens(one) == tokens(again)
    assert sum(x == y for x, y in zip(tokens(one), tokens(other), strict=True)) < 3
    assert len(set(tokens(one))) > 6, "successive draws differ"


@pytest.mark.parametrize("params", [greedy(10), SamplingParams(max_tokens=10, seed=0)])
def test_generating_twice_and_equal_prompts_in_a_batch(engine: Engine, params: SamplingParams) -> None:
    outputs = engine.generate([A, A, B], params, progress=False) + engine.generate([B, A], params, progress=False)
    first, second, b, b_again, third = map(tokens, outputs)
    assert first == second == third
    assert b == b_again


# --- engines ---


def test_two_engines_step_by_step(tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    models = [tiny_model("llama"), tiny_model("gpt_oss")]
    engines = [make_engine(models[0]), make_engine(models[1], block_size=3, max_num_batched_tokens=5)]
    done: list[dict[str, list[int]]] = [{}, {}]
    for engine in engines:
        for prompt in (A, C):
            engine.add_request(prompt, greedy(10), request_id=str(len(prompt)))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, outputs in zip(engines, done, strict=True):
            outputs.update({o.request_id: tokens(o) for o in engine.step()})
    for model, outputs in zip(models, done, strict=True):
        assert outputs == {str(len(p)): hf_greedy(model, p, 10) for p in (A, C)}


def test_two_engines_over_one_module(
    engine: Engine, llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    other = make_engine(llama, block_size=16)
    engine.add_request(A, greedy(6))
    engine.step()
    assert tokens(other.generate(B, greedy(6), progress=False)[0]) == hf_greedy(llama, B, 6)
    other.close()
    for n in range(2, 7):
        assert tokens(engine.step()[0]) == hf_greedy(llama, A, n)


def test_close(llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    with make_engine(llama) as engine:
        assert tokens(engine.generate(A, greedy(2), progress=False)[0]) == hf_greedy(llama, A, 2)
        engine.add_request(A)
        engine.step()
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.add_request(A),
        engine.step,
        engine.stats,
        lambda: list(engine.stream("text")),
        lambda: engine.load_weights({}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"closed: make a new one with runtime\.compile"):
            call()


def test_a_float32_model_with_experts_runs_in_float64(tiny_model, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    model = tiny_model("mixtral")
    output = make_engine(model, dtype="float64").generate(C, greedy(6), progress=False)[0]
    assert tokens(output) == hf_greedy(model, C, 6)


@pytest.mark.filterwarnings("ignore:max_model_len=40 is larger than the KV cache")
@pytest.mark.parametrize("where", ["executor", "tokenizer"])
def test_an_interrupted_step_loses_nothing(
    llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer, drain: Drain, monkeypatch, where: str
) -> None:
    """Ctrl-C at each of the steps in turn, then on: outputs, texts and a request that outgrew the pool all arrive."""
    knobs = {"num_blocks": 5, "block_size": 4, "max_model_len": 40, "tokenizer": byte_tokenizer}
    prompts = {"long": [5] * 9, "short": [6, 7]}

    def run(interrupt_at: int | None) -> dict[str, tuple]:
        engine, calls = make_engine(llama, **knobs), 0
        target, name = (engine.runner.executor, "run") if where == "executor" else (byte_tokenizer, "decode")
        original = getattr(target, name)

        def interrupted(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == interrupt_at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        for request_id, prompt in prompts.items():
            engine.add_request(prompt, greedy(30 if request_id == "long" else 4), request_id=request_id)
        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupted)
            last: dict[str, RequestOutput] = {}
            while engine.has_unfinished_requests():
                try:
                    last.update({output.request_id: output for output in engine.step()})
                except KeyboardInterrupt:
                    engine.check_integrity()
        return {name: (tokens(o), o.outputs[0].text, o.outputs[0].stop_reason, o.finished) for name, o in last.items()}

    expected = run(None)
    assert expected["long"][2:] == ("kv_cache_full", True)
    for step in range(1, 12):
        assert run(step) == expected, step


def test_priority_under_its_policy_and_a_warning_without(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain
) -> None:
    engine = make_engine(llama, scheduling_policy="priority", max_num_seqs=1)
    for request_id, priority in (("low", 2), ("high", -2)):
        engine.add_request(C, greedy(1), request_id=request_id, priority=priority)
    assert [output.request_id for _ in range(2) for output in engine.step()] == ["high", "low"]
    plain = make_engine(llama)
    with pytest.warns(UserWarning, match='priority is ignored: give .*scheduling_policy="priority"'):
        plain.add_request(C, greedy(1), priority=1)
    drain(plain)
    with pytest.raises(ValueError, match="priority must be a whole number"):
        plain.add_request(C, greedy(1), priority=0.5)
    with pytest.raises(ValueError, match="scheduling_policy must be one of fcfs, priority, not 'lifo'"):
        make_engine(llama, scheduling_policy="lifo")
