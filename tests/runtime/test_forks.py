"""Forks through the engine, on a tiny model: n completions and `engine.fork`, against each sequence run alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

import runtime
from runtime import RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
Drain = Callable[[Engine], dict[str, RequestOutput]]
PROMPT = [(7 * i) % 250 for i in range(10)]
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tiny_model) -> PreTrainedModel:
    return tiny_model("llama")


def completions(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_n_completions_share_one_prefill(llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain) -> None:
    engine = make_engine(llama)
    engine.add_request(PROMPT, replace(DRAWN, n=3), request_id="a")
    (first,) = engine.step()
    assert [len(tokens) for tokens in completions(first)] == [1, 1, 1]
    assert engine.stats().num_prompt_tokens == 10
    blocks = engine.scheduler.manager.pool.blocks
    assert [blocks[i].ref_cnt for i in (1, 2, 3)] == [3, 3, 3]
    engine.step()
    assert [blocks[i].ref_cnt for i in (1, 2, 3)] == [3, 3, 1], (
        "the tail was copied twice, its last owner wrote in place"
    )
    output = drain(engine)["a"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in completions(output)}) == 3, "distinct draws"
    assert all(completion.finish_reason == "length" for completion in output.outputs)
    assert completions(output)[0] == completions(engine.generate(PROMPT, DRAWN, progress=False)[0])[0]


@pytest.mark.parametrize("num_blocks", [80, 13])
def test_n_completions_do_not_depend_on_neighbours_or_preemption(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain, num_blocks: int
) -> None:
    alone = make_engine(llama).generate(PROMPT, replace(DRAWN, n=3), progress=False)[0]
    engine = make_engine(llama, num_blocks=num_blocks, max_num_batched_tokens=7)
    engine.add_request([9] * 17, SamplingParams(max_tokens=15, seed=1, ignore_eos=True))
    engine.step()
    engine.add_request(PROMPT, replace(DRAWN, n=3), request_id="a")
    output = drain(engine)["a"]
    assert completions(output) == completions(alone)
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 13)


def test_completions_end_one_by_one(
    llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer, drain: Drain
) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    whole = engine.generate(PROMPT, replace(DRAWN, n=3), progress=False)[0]
    stop = whole.outputs[1].token_ids[2]
    engine.add_request(PROMPT, replace(DRAWN, n=3, stop_token_ids=[stop]), request_id="a")
    last = drain(engine)["a"]
    for full, cut in zip(completions(whole), completions(last), strict=True):
        assert cut == (full[: full.index(stop) + 1] if stop in full else full)
    assert last.outputs[1].finish_reason == "stop"
    assert last.finished


def test_aborting_a_parent_aborts_its_children(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    engine.add_request(PROMPT, replace(DRAWN, n=3), request_id="a")
    engine.step()
    assert engine.stats().num_running == 3
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()
    assert (engine.stats().num_running, engine.stats().kv_cache_usage) == (0, 0.0)


def test_too_many_completions_are_refused(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, max_num_seqs=2)
    with pytest.raises(ValueError, match="n=3 completions are more than max_num_seqs=2"):
        engine.add_request(PROMPT, replace(DRAWN, n=3))
    with pytest.raises(ValueError, match="n=2: stream yields the text of one completion"):
        list(make_engine(llama, tokenizer=object()).stream([1], replace(DRAWN, n=2)))


def test_a_greedy_fork_goes_on_like_its_parent(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy, drain: Drain
) -> None:
    engine = make_engine(llama)
    greedy = SamplingParams(max_tokens=12, temperature=0)
    engine.add_request(PROMPT, greedy, request_id="a")
    for _ in range(4):
        engine.step()
    computed = engine.stats().num_prompt_tokens
    assert engine.fork("a", new_id="b") == "b"
    outputs = drain(engine)
    expected = hf_greedy(llama, PROMPT, 12)
    assert completions(outputs["a"]) == completions(outputs["b"]) == [expected]
    assert outputs["b"].prompt_token_ids == PROMPT
    assert engine.stats().num_prompt_tokens == computed, "nothing of the prompt was computed again"


def test_forks_that_draw_diverge_and_leave_the_parent_alone(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain
) -> None:
    engine = make_engine(llama)
    alone = completions(engine.generate(PROMPT, DRAWN, progress=False)[0])[0]
    engine.add_request(PROMPT, DRAWN, request_id="a")
    for _ in range(4):
        engine.step()
    forks = [engine.fork("a"), engine.fork("a", replace(DRAWN, max_tokens=20))]
    forks.append(engine.fork(forks[0]))
    outputs = drain(engine)
    assert completions(outputs["a"]) == [alone]
    drawn = [completions(outputs[fork])[0] for fork in forks]
    assert [len(tokens) for tokens in drawn] == [12, 20, 12]
    assert all(tokens[:4] == alone[:4] for tokens in drawn)
    assert len({tuple(tokens[4:12]) for tokens in [alone, *drawn]}) == 4


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "running", "preempted"])
def test_a_request_can_be_forked_in_any_live_state(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy, drain: Drain, state: str
) -> None:
    engine = make_engine(llama, max_num_batched_tokens=4)
    greedy = SamplingParams(max_tokens=8, temperature=0)
    engine.add_request(PROMPT, greedy, request_id="a")
    for _ in range({"waiting": 0, "mid-prefill": 2, "running": 5, "preempted": 5}[state]):
        engine.step()
    if state == "preempted":
        engine.scheduler.preempt_all()
    engine.fork("a", new_id="b")
    engine.check_integrity()
    outputs = drain(engine)
    assert completions(outputs["a"]) == completions(outputs["b"]) == [hf_greedy(llama, PROMPT, 8)]


def test_a_fork_of_a_long_request_copies_one_block_at_most(tiny_model, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_model("llama", max_position_embeddings=4096), num_blocks=520)
    engine.add_request([3] * 2001, replace(DRAWN, max_tokens=20), request_id="a")
    engine.step()
    usage = engine.stats().kv_cache_usage
    engine.fork("a", new_id="b")
    assert engine.stats().kv_cache_usage == usage
    engine.step()
    assert engine.stats().num_blocks_copied == 1
    assert (engine.stats().num_prompt_tokens, engine.stats().num_output_tokens) == (2001, 1 + 2)
    assert engine.stats().kv_cache_usage == pytest.approx(usage + 1 / 519)


def test_a_fork_needs_a_live_parent_a_new_id_and_room_for_tokens(
    llama: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama)
    with pytest.raises(ValueError, match="'a' is unknown or has ended"):
        engine.fork("a")
    engine.add_request(PROMPT, DRAWN, request_id="a")
    for _ in range(3):
        engine.step()
    with pytest.raises(ValueError, match="'a' is still alive"):
        engine.fork("a", new_id="a")
    with pytest.raises(ValueError, match="has 3 tokens already, so max_tokens=3 leaves none"):
        engine.fork("a", runtime.SamplingParams(max_tokens=3))


def test_a_fork_goes_on_with_the_text(
    llama: PreTrainedModel, make_engine: MakeEngine, byte_tokenizer, drain: Drain
) -> None:
    engine = make_engine(llama, tokenizer=byte_tokenizer)
    engine.add_request("prompt", replace(DRAWN, temperature=0), request_id="a")
    for _ in range(5):
        engine.step()
    engine.fork("a", new_id="b")
    outputs = drain(engine)
    assert outputs["a"].outputs[0].text == outputs["b"].outputs[0].text != ""
    assert outputs["b"].prompt == "prompt"
