"""Requests, forks, beams, preemptions and mishaps in any order, over a real model in a tiny pool: every output is what
the same sequence gives alone.

What is free holds NaN all the while, on the device and on the host, so nothing that is read is left over by chance. The
model computes in float64: rounding, which depends on what else is in the batch, then decides between no two tokens.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import LlamaConfig, LlamaForCausalLM

import runtime
from runtime import BeamSearchParams, RequestOutput, SamplingParams
from runtime.engine import Engine
from runtime.metrics import StepSeconds
from runtime.model_runner import ModelRunner, StepInFlight
from runtime.request import Request
from runtime.schedule import Schedule

pytestmark = pytest.mark.filterwarnings("ignore:max_model_len=32 is larger than the KV cache")

MAX_LEN, BLOCK = 32, 4
BLOCK_BYTES = 2 * 2 * 1 * 4 * 8 * BLOCK  # layers, K and V, kv heads, head dim, float64, tokens


@cache
def model() -> LlamaForCausalLM:
    """Two layers, and weights large enough that every position changes what comes next."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=39,
        pad_token_id=None,
    )
    module = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = 0.5 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return module.eval()


def compiled(**knobs: Any) -> Engine:
    return runtime.compile(
        model(), backend="eager", progress=False, dtype="float64", max_model_len=MAX_LEN, block_size=BLOCK, **knobs
    )


@cache
def reference() -> Engine:
    """Room for everything, and nothing is shared."""
    return compiled(num_blocks=200, enable_prefix_caching=False, preemption="recompute")


def finish(engine: Engine) -> RequestOutput:
    """Run the one request of an engine to its end."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    return outputs[-1]


@cache
def solo(tokens: tuple[int, ...], num_prompt_tokens: int, params: SamplingParams, noise_key: int) -> list[int]:
    """The output of a sequence that goes on alone after `tokens`, with the noise of the one it is compared with."""
    engine = reference()
    request = engine.scheduler.get(engine.add_request(list(tokens[:num_prompt_tokens]), replace(params, n=1)))
    assert request is not None
    request.token_ids[:], request.noise_key = tokens, noise_key
    return finish(engine).outputs[0].token_ids


@cache
def solo_search(prompt: tuple[int, ...], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """The completions and scores of a beam search alone."""
    engine = reference()
    engine.add_request(list(prompt), params)
    return [(one.token_ids, one.score or 0.0) for one in finish(engine).outputs]


class Mishap:
    """Raises an error in the next run of a model runner: before anything was moved, or after the forward."""

    def __init__(self, runner: ModelRunner) -> None:
        self._launch = runner.launch
        self.error: BaseException | None = None
        self.is_early = self.has_failed = False

    def launch(self, schedule: Schedule, seconds: StepSeconds) -> StepInFlight:
        error, self.error = self.error, None
        self.has_failed |= isinstance(error, RuntimeError)
        step = StepInFlight(schedule, 0.0) if error is not None and self.is_early else self._launch(schedule, seconds)
        if isinstance(error, Exception):
            step.error = error
        elif error is not None:
            raise error
        return step


@dataclass
class Expected:
    """A request as it was when it came into the engine; `tokens` are those it had then."""

    request: Request
    tokens: tuple[int, ...]
    params: SamplingParams | BeamSearchParams

    def check(self, output: RequestOutput) -> None:
        """Compare the last output of the request with the solo runs of its completions."""
        if isinstance(self.params, BeamSearchParams):
            self._check_beams(output, self.params)
            return
        for completion in output.outputs:
            key = self.request._noise_key(completion.index) if completion.index else self.request.noise_key
            alone = solo(self.tokens, self.request.num_prompt_tokens, self.params, key)
            cut = completion.finish_reason == "error" or completion.stop_reason == "kv_cache_full"
            assert completion.token_ids == (alone[: len(completion.token_ids)] if cut else alone)
        assert len(output.outputs) in ((1, self.params.n) if cut else (self.params.n,))

    def _check_beams(self, output: RequestOutput, params: BeamSearchParams) -> None:
        if self.request.finish_reason == "error":
            assert [one.token_ids for one in output.outputs] == [[]]
            return
        alone = solo_search(self.tokens, params)
        assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in alone]
        assert [one.score for one in output.outputs] == pytest.approx([score for _, score in alone], abs=1e-5)


# The first two have 10 tokens in common: prompts share whole blocks, and parts of one.
TEXTS = [[(7 * i * i + 3 * i + (i > 9) * k) % 38 for i in range(20)] for k in (0, 1)] + [[5] * 20]
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 20))
GREEDY_OR_DRAWN = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 4, 8, 12]),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    seed=st.sampled_from([None, 1, 2]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(6))]),
)
SEARCHES = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 4),
    max_tokens=st.integers(1, 8),
    length_penalty=st.sampled_from([1.0, 0.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    stop_token_ids=st.sampled_from([(), tuple(range(6))]),
)


class AnyOrder(RuleBasedStateMachine):
    """Random requests in a pool of a few blocks, and what may happen to them."""

    @initialize(
        num_blocks=st.integers(8, 14),
        caching=st.booleans(),
        preemption=st.sampled_from(["swap", "swap", "swap", "auto", "recompute"]),
        swap_blocks=st.sampled_from([64, 12, 4]),
        is_copying_quick=st.booleans(),
        budget_and_chunking=st.sampled_from([(3, True), (8, True), (64, True), (16, False)]),
        max_num_seqs=st.sampled_from([2, 4, 16]),
        policy=st.sampled_from(["fcfs", "priority"]),
        ahead=st.booleans(),
        graphs=st.sampled_from([False, False, True]),
        first=st.lists(PROMPTS, min_size=2, max_size=4),
    )
    def start(
        self,
        num_blocks: int,
        caching: bool,
        preemption: str,
        swap_blocks: int,
        is_copying_quick: bool,
        budget_and_chunking: tuple[int, bool],
        max_num_seqs: int,
        policy: str,
        ahead: bool,
        graphs: bool,
        first: list[list[int]],
    ) -> None:
        budget, chunking = budget_and_chunking
        space = {} if preemption == "recompute" else {"swap_space": (swap_blocks + 0.5) * BLOCK_BYTES / 2**30}
        self.engine = compiled(
            num_blocks=num_blocks,
            enable_prefix_caching=caching,
            preemption=preemption,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunking,
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            async_scheduling=ahead,
            cuda_graphs="lazy" if graphs else False,
            debug=True,
            **space,
        )
        rate = 1e12 if is_copying_quick else 1e-3  # "auto" is not to depend on the clock
        self.engine.runner.swap_space.measure_copy_rate = lambda: rate  # type: ignore[method-assign]
        self.mishap = Mishap(self.engine.runner)
        self.engine.runner.launch = self.mishap.launch  # type: ignore[method-assign]
        self.expected: dict[str, Expected] = {}
        self.outputs: dict[str, RequestOutput] = {}
        for prompt in first:
            self.add(prompt, SamplingParams(max_tokens=12, temperature=0), 0)

    @rule(
        prompt=PROMPTS,
        params=GREEDY_OR_DRAWN | SEARCHES,
        priority=st.integers(-1, 1),
    )
    def add(self, prompt: list[int], params: SamplingParams | BeamSearchParams, priority: int) -> None:
        has_priority = self.engine.config.scheduling_policy == "priority"
        try:
            request_id = self.engine.add_request(prompt, params, priority=priority if has_priority else 0)
        except ValueError:  # it could never run
            return
        self._expect(request_id, params)

    @precondition(lambda self: self._live())
    @rule(data=st.data(), params=st.none() | GREEDY_OR_DRAWN, count=st.integers(0, 2))
    def fork_and_step(self, data: st.DataObject, params: SamplingParams | None, count: int) -> None:
        request_id = data.draw(st.sampled_from(self._live()))
        own = self.expected[request_id].params
        params = params or (own.sampling if isinstance(own, BeamSearchParams) else own)
        if self._request(request_id).num_output_tokens < params.max_tokens:
            params = replace(params, n=1)
            self._expect(self.engine.fork(request_id, params), params)
        self.step(count)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.engine.scheduler._running)
    @rule(data=st.data(), count=st.integers(0, 3))
    def preempt_and_step(self, data: st.DataObject, count: int) -> None:
        running = st.sampled_from(list(self.engine.scheduler._running))
        for request_id in data.draw(st.lists(running, min_size=1, unique=True)):
            self.engine.scheduler._preempt(self._request(request_id))
            self.intact()
        self.step(count)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._live()))
        self.engine.abort_request(request_id)
        del self.expected[request_id]
        self.outputs.pop(request_id, None)

    @rule(is_early=st.booleans(), error=st.sampled_from([KeyboardInterrupt, KeyboardInterrupt, RuntimeError]))
    def interrupt_or_fail(self, is_early: bool, error: type[BaseException]) -> None:
        self.mishap.error, self.mishap.is_early = error("a mishap"), is_early
        with suppress(KeyboardInterrupt):
            self._step()
        self.mishap.error = None

    @rule(new_weights=st.booleans())
    def reset(self, new_weights: bool) -> None:
        """Reset the prefix cache, or load the weights that are there already, which preempts all."""
        if new_weights:
            self.engine.load_weights(model().state_dict())
            assert self.engine.stats().swap_space_usage == 0.0
        assert self.engine.reset_prefix_cache() is (self.engine.stats().kv_cache_usage == 0.0)

    @invariant()
    def intact(self) -> None:
        self.engine.check_integrity()
        self._poison()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self._step()
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage, stats.swap_space_usage) == (0, 0, 0.0, 0.0)
        assert stats.num_preemptions == stats.num_preemptions_swapped + stats.num_preemptions_recomputed
        assert self.outputs.keys() == self.expected.keys()
        for request_id, expected in self.expected.items():
            assert self.outputs[request_id].finished
            expected.check(self.outputs[request_id])
        self.engine.close()

    def _step(self) -> None:
        outputs = self.engine.step()
        failed = any(completion.finish_reason == "error" for output in outputs for completion in output.outputs)
        assert self.mishap.has_failed or not failed, "a step failed by itself"
        self.outputs.update({output.request_id: output for output in outputs})
        self.intact()

    def _request(self, request_id: str) -> Request:
        request = self.engine.scheduler.get(request_id)
        assert request is not None
        return request

    def _live(self) -> list[str]:
        return [request_id for request_id, one in self.expected.items() if not one.request.is_finished]

    def _expect(self, request_id: str, params: SamplingParams | BeamSearchParams) -> None:
        request = self._request(request_id)
        self.expected[request_id] = Expected(request, tuple(request.token_ids), params)

    def _poison(self) -> None:
        """Fill with NaN what nobody may read: free blocks that are neither published nor still to be swapped out, and
        the host's free blocks."""
        manager, swap_space = self.engine.scheduler.manager, self.engine.runner.swap_space
        leaving = {block_id for block_id, _ in manager.pending_swap_outs}
        blocks = manager.pool.free_queue.get_all_free_blocks()
        free = [block.block_id for block in blocks if block.content is None and block.block_id not in leaving]
        for tensor in self.engine.runner.cache.tensors:
            tensor[free] = torch.nan
        for tensor in swap_space._host or ():
            tensor[manager.host_pool._free_ids] = torch.nan
            tensor[manager.host_pool._num_made :] = torch.nan


TestAnyOrderOverAModel = AnyOrder.TestCase
TestAnyOrderOverAModel.settings = settings(
    max_examples=45, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
