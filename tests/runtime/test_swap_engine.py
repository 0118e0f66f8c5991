"""Preemption by swap over tiny real models: nothing is computed again, and every output is the unpreempted one."""

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphs import swap_space
from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.metrics import StepSeconds
from runtime.model_runner import StepInFlight
from runtime.request import Request
from runtime.schedule import Schedule

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, Sequence[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

SWAP = {"preemption": "swap", "swap_space": 2**-8}  # 4 MiB
TIGHT = {**SWAP, "num_blocks": 11, "enable_prefix_caching": False}
BLOCK_BYTES = 3 * 2 * 2 * 8 * 4 * 4  # of a llama: layers, K and V, kv heads, head dim, float32, tokens
NEW = 24
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
A, B = [(7 * i * i + 3 * i) % 256 for i in range(13)], [(5 * i * i + i + 9) % 256 for i in range(13)]


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


DIFFERENT = random_prompts(23, 5, 12, 17)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def completions(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def add_pair(engine: Engine) -> None:
    """In an engine of TIGHT "b" is preempted when both have 20 of their 13 + 24 tokens."""
    for request_id, prompt in (("a", A), ("b", B)):
        engine.add_request(prompt, GREEDY, request_id=request_id)


def live(engine: Engine, request_id: str) -> Request:
    request = engine.scheduler.get(request_id)
    assert request is not None
    return request


def preempt(engine: Engine, *request_ids: str) -> None:
    for request_id in request_ids:
        engine.scheduler._preempt(live(engine, request_id))
        engine.check_integrity()


def run_until_preempted(engine: Engine) -> None:
    while engine.stats().num_preemptions == 0:
        engine.step()
        engine.check_integrity()


@pytest.fixture
def llama(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def caching(request: pytest.FixtureRequest) -> bool:
    return request.param


# --- nothing is computed again ---


def test_swapped_out_requests_go_on_without_recomputation(
    family: str, caching: bool, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    """23 usable blocks of 4 for four requests that want 12, 8, 9 and 11 in the end."""
    model = tiny_model(family)
    engine = make_engine(model, num_blocks=24, enable_prefix_caching=caching, **SWAP)
    steps: list[int] = []
    launch = engine.runner.launch

    def recorded(schedule: Schedule, seconds: StepSeconds) -> StepInFlight:
        steps.append(schedule.num_tokens)
        return launch(schedule, seconds)

    engine.runner.launch = recorded  # type: ignore[method-assign]
    ids = [engine.add_request(prompt, GREEDY) for prompt in DIFFERENT]
    outputs = drain(engine)
    assert tokens([outputs[i] for i in ids]) == [hf_greedy(model, prompt, NEW) for prompt in DIFFERENT]
    stats, num_prompt_tokens = engine.stats(), sum(map(len, DIFFERENT))
    assert stats.num_preemptions == stats.num_preemptions_swapped > 1
    assert stats.num_prompt_tokens == num_prompt_tokens
    assert steps[0] == num_prompt_tokens
    assert max(steps[1:]) <= len(DIFFERENT), "one token a row"
    assert sum(steps) == num_prompt_tokens + len(DIFFERENT) * (NEW - 1)
    assert stats.swap_space_usage == 0.0


def test_a_prompt_in_pieces_goes_on_with_the_next_piece(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    engine = make_engine(llama, max_num_batched_tokens=6, enable_prefix_caching=False, **SWAP)
    engine.add_request(DIFFERENT[0], GREEDY, request_id="a")
    for computed in (6, 12, 18):
        engine.step()
        assert live(engine, "a").num_computed_tokens == computed
        preempt(engine, "a")
        assert live(engine, "a").num_computed_tokens == 0
    assert tokens([drain(engine)["a"]]) == [hf_greedy(llama, DIFFERENT[0], NEW)]
    assert engine.stats().num_prompt_tokens == len(DIFFERENT[0])


def gathered(engine: Engine, request: Request, num_tokens: int) -> list[Tensor]:
    """K and V of the first tokens of a request, in all layers, [num_tokens, kv heads, head dim] each."""
    blocks = torch.tensor(list(engine.scheduler.manager.block_ids(request)))
    cache = engine.runner.cache
    return [tensor[blocks].flatten(0, 1)[:num_tokens].clone() for tensor in (*cache.k, *cache.v)]


def test_keys_and_values_come_back_bit_for_bit_in_other_blocks(
    family: str, caching: bool, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    """In between all blocks belong to a request of greater urgency, and then hold NaN."""
    model = tiny_model(family)
    engine = make_engine(model, num_blocks=14, enable_prefix_caching=caching, scheduling_policy="priority", **SWAP)
    engine.add_request(A, GREEDY, request_id="a", priority=1)
    for _ in range(5):
        engine.step()
    request, manager = live(engine, "a"), engine.scheduler.manager
    assert request.num_computed_tokens == 17
    before, ids_before = gathered(engine, request, 17), list(manager.block_ids(request))
    preempt(engine, "a")
    engine.add_request(random_prompts(51)[0], replace(GREEDY, max_tokens=1), request_id="urgent")
    (output,) = engine.step()
    assert (output.request_id, output.finished) == ("urgent", True)
    assert manager.usage == 0.0
    for tensor in engine.runner.cache.tensors:
        tensor[1:] = torch.nan
    engine.add_request(B[:4], replace(GREEDY, max_tokens=2), request_id="first", priority=0)  # takes one block or two
    engine.step()
    assert request.num_computed_tokens == 18
    assert all(old != new for old, new in zip(ids_before, manager.block_ids(request), strict=True))
    after = gathered(engine, request, 17)
    assert len(after) == len(before) == 6
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))
    assert engine.stats().num_blocks_swapped_in == engine.stats().num_blocks_swapped_out == 5
    assert tokens([drain(engine)["a"]]) == [hf_greedy(model, A, NEW)]


def test_seeds_survive(llama: PreTrainedModel, make_engine: MakeEngine, caching: bool) -> None:
    params = [SamplingParams(max_tokens=NEW, seed=seed, temperature=0.9, top_p=0.95) for seed in (1, 2, 1, 3)]
    alone = make_engine(llama, num_blocks=200).generate(DIFFERENT, params, progress=False)
    engine = make_engine(llama, num_blocks=20, enable_prefix_caching=caching, max_num_batched_tokens=9, **SWAP)
    assert tokens(engine.generate(DIFFERENT, params, progress=False)) == tokens(alone)
    assert engine.stats().num_preemptions_swapped > 1
    assert engine.stats().num_prompt_tokens == sum(map(len, DIFFERENT))


# --- families of sequences ---


def test_children_that_were_swapped_out_share_again(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain, caching: bool
) -> None:
    alone = make_engine(llama).generate(DIFFERENT[3][:10], replace(DRAWN, n=3), progress=False)[0]
    engine = make_engine(llama, enable_prefix_caching=caching, **SWAP)
    engine.add_request(DIFFERENT[3][:10], replace(DRAWN, n=3), request_id="a")
    engine.step()
    engine.step()
    preempt(engine, "a#2", "a#1", "a")
    engine.scheduler.manager.pool.reset_prefix_cache()  # nothing is left on the device
    outputs = {output.request_id: output for output in engine.step()}
    stats = engine.stats()
    assert (stats.num_blocks_swapped_out, stats.num_blocks_swapped_in) == (5, 5), "two shared, and a tail each"
    pool = engine.scheduler.manager.pool
    tables = [list(engine.scheduler.manager.block_ids(live(engine, name))) for name in ("a", "a#1", "a#2")]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [pool.blocks[i].ref_cnt for i in tables[0]] == [3, 3, 1]
    outputs.update(drain(engine))
    assert completions(outputs["a"]) == completions(alone)
    assert engine.stats().num_prompt_tokens == 10


def test_beams_that_were_swapped_out_go_on(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain, caching: bool
) -> None:
    search = BeamSearchParams(4, max_tokens=10)
    alone = make_engine(llama).generate(A, search, progress=False)[0]
    engine = make_engine(llama, enable_prefix_caching=caching, **SWAP)
    engine.add_request(A, search, request_id="a")
    out = 0
    for _ in range(4):
        engine.step()
        beams, manager = live(engine, "a").sequences, engine.scheduler.manager
        filled = [manager.tables()[beam][: manager.num_blocks_for(beam.num_computed_tokens)] for beam in beams]
        out += len({block for blocks in filled for block in blocks})
        preempt(engine, "a")
        assert all(map(manager.is_swapped, beams))
    output = drain(engine)["a"]
    assert completions(output) == completions(alone)
    assert [one.score for one in output.outputs] == pytest.approx([one.score for one in alone.outputs], abs=1e-5)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_preemptions_swapped) == (4, 4)
    assert (stats.num_blocks_swapped_out, stats.num_prompt_tokens) == (out, len(A))


def test_sequences_of_all_kinds_under_pressure(llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain) -> None:
    wanted: list[tuple[list[int], SamplingParams | BeamSearchParams]] = [
        (DIFFERENT[0], replace(DRAWN, n=3)),
        (A, BeamSearchParams(3, max_tokens=9)),
        (B, GREEDY),
    ]
    alone = [completions(make_engine(llama).generate(p, one, progress=False)[0]) for p, one in wanted]
    engine = make_engine(llama, num_blocks=17, **SWAP)
    ids = [engine.add_request(prompt, params) for prompt, params in wanted]
    outputs = drain(engine)
    assert [completions(outputs[i]) for i in ids] == alone
    assert engine.stats().num_preemptions_swapped > 1
    assert engine.stats().num_preemptions_recomputed == 0


def test_a_fork_of_a_swapped_out_request_computes_nothing(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain, caching: bool
) -> None:
    engine = make_engine(llama, enable_prefix_caching=caching, **SWAP)
    engine.add_request(A, GREEDY, request_id="a")
    for _ in range(6):
        engine.step()
    preempt(engine, "a")
    engine.fork("a", new_id="b")
    engine.check_integrity()
    before = engine.stats().num_steps
    outputs = drain(engine)
    assert tokens([outputs["a"], outputs["b"]]) == [hf_greedy(llama, A, NEW)] * 2
    assert engine.stats().num_prompt_tokens == len(A)
    assert engine.stats().num_steps - before == NEW - 6, "they ran side by side"


# --- counters, warnings, advice ---


def test_swaps_are_counted_and_the_space_is_given_back(
    llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain
) -> None:
    engine = make_engine(llama, **{**TIGHT, "swap_space": 20 * BLOCK_BYTES / 2**30})
    add_pair(engine)
    run_until_preempted(engine)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_preemptions_swapped, stats.num_preemptions_recomputed) == (1, 1, 0)
    assert (stats.num_blocks_swapped_out, stats.num_blocks_swapped_in, stats.swap_space_usage) == (5, 0, 0.25)
    drain(engine)
    stats = engine.stats()
    assert (stats.num_blocks_swapped_out, stats.num_blocks_swapped_in, stats.swap_space_usage) == (5, 5, 0.0)


def test_recomputations_are_counted(llama: PreTrainedModel, make_engine: MakeEngine, drain: Drain) -> None:
    engine = make_engine(llama, num_blocks=11, preemption="recompute")
    add_pair(engine)
    drain(engine)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_preemptions_swapped, stats.num_preemptions_recomputed) == (1, 0, 1)
    assert (stats.num_blocks_swapped_out, stats.num_blocks_swapped_in, stats.swap_space_usage) == (0, 0, 0.0)


def test_the_engine_warns_at_most_once_a_minute(
    llama: PreTrainedModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each batch preempts once: two prompts of 4 blocks fill the pool."""
    engine, counts = make_engine(llama, **{**TIGHT, "num_blocks": 9}), []
    for now in (1000.0, 1059.9, 1060.0, 1119.9, 1200.0):
        monkeypatch.setattr("runtime.engine.time.monotonic", lambda now=now: now)
        engine.generate([A, B], replace(GREEDY, max_tokens=6), progress=False)
        counts.append(sum("requests were preempted so far" in message for message in caplog.messages))
    assert counts == [1, 1, 2, 2, 3]
    assert engine.stats().num_preemptions == 5
    assert "5 requests were preempted so far (5 swapped out, 0 to be computed again)" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("prompts", "params", "knobs"),
    [
        ([A, B], GREEDY, {"num_blocks": 11}),
        (DIFFERENT, GREEDY, {"num_blocks": 24}),
        (DIFFERENT, GREEDY, {"num_blocks": 15}),  # some have to wait at first
        (DIFFERENT, GREEDY, {"num_blocks": 18, "max_num_seqs": 2}),
        (random_prompts(3, 3, 3, 3, 3, 3), GREEDY, {"num_blocks": 8}),
        ([A, B, B[:5], A[:6], A[:5]], [GREEDY] * 4 + [replace(DRAWN, n=4)], {"num_blocks": 19, "max_num_seqs": 4}),
        ([A, B], BeamSearchParams(3, max_tokens=9), {"num_blocks": 17}),
    ],
    ids=["two", "all run", "some wait", "two at once", "short prompts", "completions wait", "beams"],
)
def test_as_many_blocks_as_advised_suffice(
    llama: PreTrainedModel, make_engine: MakeEngine, prompts: list[list[int]], params: Any, knobs: dict[str, int]
) -> None:
    engine = make_engine(llama, **knobs)
    engine.generate(prompts, params, progress=False)
    assert engine.stats().num_preemptions > 0
    advised = re.search(r"(\d+) would have sufficed\. Set num_blocks=(\d+),", engine._preemption.advice())
    assert advised is not None
    assert int(advised[2]) == int(advised[1]) + 1, "block 0 holds no tokens"
    again = make_engine(llama, **{**knobs, "num_blocks": int(advised[2])})
    again.generate(prompts, params, progress=False)
    assert again.stats().num_preemptions == 0


def test_as_few_sequences_as_advised_are_never_preempted(llama: PreTrainedModel, make_engine: MakeEngine) -> None:
    """The largest two come to hold 12 and 10 of 23 blocks, and no other less than 7."""
    engine = make_engine(llama, num_blocks=24)
    engine.generate(DIFFERENT, GREEDY, progress=False)
    assert engine.stats().num_preemptions > 0
    assert "lower max_num_seqs to 2," in engine._preemption.advice()
    again = make_engine(llama, num_blocks=24, max_num_seqs=2)
    again.generate(DIFFERENT, GREEDY, progress=False)
    assert again.stats().num_preemptions == 0


# --- no space ---


def test_a_space_for_some_blocks_only(
    llama: PreTrainedModel,
    make_engine: MakeEngine,
    hf_greedy: Greedy,
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(llama, **{**TIGHT, "swap_space": 4.5 * BLOCK_BYTES / 2**30})
    assert engine.scheduler.manager.host_pool.num_blocks == 4
    for _ in range(2):
        add_pair(engine)
        outputs = drain(engine)
        assert tokens([outputs["a"], outputs["b"]]) == [hf_greedy(llama, prompt, NEW) for prompt in (A, B)]
    stats = engine.stats()
    assert (stats.num_preemptions_swapped, stats.num_preemptions_recomputed) == (0, 2)
    (message,) = [message for message in caplog.messages if "swap space is too small" in message]
    assert "0 of its 4 blocks are in use and a preempted request needs 5" in message


def test_memory_that_cannot_be_had_is_said_once_and_nothing_is_swapped_out(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama, **TIGHT)
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: 0)
    add_pair(engine)
    with pytest.warns(UserWarning, match=r"recomputed, not swapped out: .*lower swap_space"):
        outputs = drain(engine)
    add_pair(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = drain(engine)
    for last in (outputs, again):
        assert tokens([last["a"], last["b"]]) == [hf_greedy(llama, prompt, NEW) for prompt in (A, B)]
    stats = engine.stats()
    assert (stats.num_preemptions_swapped, stats.num_preemptions_recomputed) == (0, 2)


@pytest.mark.parametrize("rate", [1e-3, 1e12])
def test_the_default_does_what_is_quicker(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain, rate: float
) -> None:
    """By a copy rate that is far beside any prefill's."""
    engine = make_engine(llama, num_blocks=11)
    assert engine.config.preemption == "auto"
    engine.runner.swap_space.measure_copy_rate = lambda: rate * BLOCK_BYTES  # type: ignore[method-assign]
    add_pair(engine)
    outputs = drain(engine)
    assert tokens([outputs["a"], outputs["b"]]) == [hf_greedy(llama, prompt, NEW) for prompt in (A, B)]
    stats = engine.stats()
    assert (stats.num_preemptions_swapped, stats.num_preemptions_recomputed) == ((1, 0) if rate > 1 else (0, 1))


# --- failures, interrupts, aborts, new weights ---


@pytest.mark.parametrize("part", ["forward", "swap"])
def test_a_failed_step_ends_what_ran_in_it_and_not_what_was_swapped_out(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain, part: str
) -> None:
    """What was moved before the forward failed stays on the host; what failed to be moved is computed again."""
    engine = make_engine(llama, **TIGHT)
    add_pair(engine)
    target, name = (engine.runner.executor, "run") if part == "forward" else (engine.runner.swap_space, "swap_out")
    original = getattr(target, name)

    def failing(argument: object) -> object:
        result = original(argument) if part == "forward" else None
        if engine.stats().num_preemptions:
            raise RuntimeError("the device is on fire")
        return result

    setattr(target, name, failing)
    run_until_preempted(engine)
    setattr(target, name, original)
    outputs = drain(engine)
    assert outputs["b"].outputs[0].token_ids == hf_greedy(llama, B, NEW)
    stats, is_kept = engine.stats(), part == "forward"
    assert (stats.num_blocks_swapped_in, stats.num_prompt_tokens) == (
        (5, len(A) + len(B)) if is_kept else (0, len(A) + len(B) + 20 + 1)
    )


def test_an_interrupted_step_moves_nothing_twice(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, caching: bool
) -> None:
    """Ctrl-C after the forward, which has written to the blocks that were swapped out just before it."""
    engine = make_engine(llama, **{**TIGHT, "enable_prefix_caching": caching})
    launch, left = engine.runner.launch, ["swap_outs", "swap_ins"]

    def interrupted(schedule: Schedule, seconds: StepSeconds) -> StepInFlight:
        results = launch(schedule, seconds)
        for name in left:
            if getattr(schedule, name):
                left.remove(name)
                raise KeyboardInterrupt
        return results

    engine.runner.launch = interrupted  # type: ignore[method-assign]
    add_pair(engine)
    last: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        try:
            last.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        except KeyboardInterrupt:
            engine.check_integrity()
    assert left == []
    assert last == {"a": hf_greedy(llama, A, NEW), "b": hf_greedy(llama, B, NEW)}
    assert engine.stats().num_blocks_swapped_out == 5


def test_an_abort_gives_the_swap_space_back(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    engine = make_engine(llama, **TIGHT)
    add_pair(engine)
    run_until_preempted(engine)
    assert engine.stats().swap_space_usage > 0
    engine.abort_request("b")
    engine.check_integrity()
    assert engine.stats().swap_space_usage == 0.0
    outputs = drain(engine)
    assert outputs.keys() == {"a"}
    assert tokens([outputs["a"]]) == [hf_greedy(llama, A, NEW)]
    assert engine.stats().num_blocks_swapped_in == 0


def test_what_is_swapped_out_outlives_a_reset_of_the_prefix_cache(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    engine = make_engine(llama, **SWAP)
    engine.add_request(A, GREEDY, request_id="a")
    for _ in range(5):
        engine.step()
    assert engine.reset_prefix_cache() is False
    preempt(engine, "a")
    assert engine.reset_prefix_cache() is True
    assert tokens([drain(engine)["a"]]) == [hf_greedy(llama, A, NEW)]
    assert engine.stats().num_prompt_tokens == len(A)
    assert engine.stats().num_blocks_swapped_in == 5


def test_new_weights_forget_what_is_swapped_out(
    llama: PreTrainedModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    new = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.flip(0))
    engine = make_engine(llama, **TIGHT)
    add_pair(engine)
    run_until_preempted(engine)
    kept = {name: list(live(engine, name).output_token_ids) for name in "ab"}
    engine.load_weights(new.state_dict())
    engine.check_integrity()
    assert engine.stats().swap_space_usage == 0.0
    outputs = drain(engine)
    for name, prompt in (("a", A), ("b", B)):
        rest = hf_greedy(new, prompt + kept[name], NEW - len(kept[name]))
        assert outputs[name].outputs[0].token_ids == kept[name] + rest
