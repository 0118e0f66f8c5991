"""What a decode step takes, part by part, by each executor that an engine has: uncompiled, compiled, replayed.

The executors take turns on one engine, over the same weights, blocks and requests. Each turn begins with the prompts,
whose blocks the prefix cache has from the turn before, so that all of them decode at the same context.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

import runtime
from bench.contestants import Prompts, random_prompts
from bench.device_time import Repeated, Stopwatch
from bench.roofline import Bandwidth, bytes_per_step
from bench.rounds import alternate, ratio, timed
from graphs.executor import CompiledExecutor, EagerExecutor, Executor
from graphs.graph_executor import MASKED, GraphExecutor
from models.step_inputs import StepInputs, StepOutputs
from runtime.batch import InputFiller
from runtime.engine import Engine

EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
WARM_UP = 3  # steps of a turn that do not count: the first may still be another executor's
HOST = ("schedule", "prepare", "update", "output")  # phases of a step in which the host works beside launching


class Turn(NamedTuple):
    """Decode steps of one executor in a row. Seconds."""

    steps: list[float]  # by the clock, from the end of one to the end of the next
    device: list[float]  # of the forward pass with sampling: between CUDA events, or on a CPU by the clock
    phases: dict[str, float]  # of `StepSeconds`, a step
    replays: int  # of graphs


def executors(engine: Engine) -> dict[str, Executor]:
    """The executors that can run the engine's steps, by EAGER, COMPILED and GRAPH; those that it has."""
    runner = engine.runner
    found: dict[str, Executor] = {EAGER: EagerExecutor(runner._loaded.module, runner.cache)}
    executor = runner.executor
    inner = executor.inner if isinstance(executor, GraphExecutor) else executor
    if isinstance(inner, CompiledExecutor):
        found[COMPILED] = inner
    if isinstance(executor, GraphExecutor):
        found[GRAPH] = executor
    return found


@contextmanager
def running(engine: Engine, executor: Executor) -> Iterator[None]:
    """Have the engine's steps run by another of its `executors`."""
    runner = engine.runner
    before = runner.executor, runner._filler
    runner.executor = executor
    runner._filler = InputFiller(runner._arena, engine.scheduler.manager, executor.padded)
    try:
        yield
    finally:
        runner.executor, runner._filler = before
        runner._filler.forget()


@contextmanager
def watching(executor: Executor, device: torch.device) -> Iterator[list[Stopwatch]]:
    """The spans of all runs of an executor, as they come."""
    run, spans = executor.run, []

    def watched(inputs: StepInputs) -> StepOutputs:
        spans.append(Stopwatch(device))
        spans[-1].start()
        outputs = run(inputs)
        spans[-1].stop()
        return outputs

    executor.run = watched  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        del executor.run


def decode_turn(engine: Engine, executor: Executor, prompts: Prompts, steps: int) -> Turn:
    """Decode `steps` steps of all prompts, greedily. Raises RuntimeError if that is not what came of it."""
    params = runtime.SamplingParams(max_tokens=engine.max_model_len, temperature=0, ignore_eos=True)
    with running(engine, executor):
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        waiting = set(ids)
        while waiting and engine.has_unfinished_requests():
            waiting -= {output.request_id for output in engine.step()}
        for _ in range(WARM_UP):
            engine.step()
        step, before = timed(engine.step), engine.stats()
        with watching(executor, engine.device) as spans:
            seconds = [step() for _ in range(steps)]
        after = engine.stats()
        for request_id in ids:
            engine.abort_request(request_id)
    came = after.num_output_tokens - before.num_output_tokens
    if came != steps * len(prompts) or after.num_preemptions != before.num_preemptions:
        raise RuntimeError(f"{came} tokens came of {steps} steps of {len(prompts)}: see the log")
    phases = {
        name: (value - asdict(before.step_seconds)[name]) / steps for name, value in asdict(after.step_seconds).items()
    }
    replays = after.num_graph_replays - before.num_graph_replays
    return Turn(seconds, [span.seconds() for span in spans], phases, replays)


def decode_times(
    engine: Engine,
    named: Mapping[str, Executor],
    batch: int,
    context: int,
    *,
    steps: int,
    rounds: int,
    bandwidth: Bandwidth,
) -> dict[str, Any]:
    """A decode step of `batch` sequences of `context` tokens in the middle of a turn, by executor, in microseconds.

    The fraction is that of the bandwidth that the step reaches by what it must read: the floor over the time, the
    median of the rounds' ratios. Raises ValueError if the engine has no room.
    """
    if why := no_room(engine, batch, context, steps):
        raise ValueError(why)
    length = prompt_length(context, steps)
    prompts = random_prompts(engine.vocab_size, [length] * batch)
    runners: dict[str, Callable[[], Any]] = {"read": bandwidth.sample}
    runners |= {name: partial(decode_turn, engine, executor, prompts, steps) for name, executor in named.items()}
    results = alternate(runners, rounds, warm_up=1)
    needed = bytes_per_step(engine, batch, context)
    floors = [needed / sample for sample in results.pop("read")]
    return {
        "batch": batch,
        "context": context,
        "bytes": needed,
        "floor_us": statistics.median(floors) * 1e6,
        "sample_us": sample_seconds(engine, batch) * 1e6,
        "executors": {name: _cell(turns, floors) for name, turns in results.items()},
    }


def prompt_length(context: int, steps: int) -> int:
    """Tokens of a prompt whose sequence has `context` tokens in the middle of a turn."""
    return max(1, context - WARM_UP - steps // 2)


def no_room(engine: Engine, batch: int, context: int, steps: int) -> str | None:
    """Why the engine cannot hold such a turn without preemption, or None."""
    manager = engine.scheduler.manager
    # Sequences of several prefill steps run ahead of the last one, for which there may be a step each.
    ahead = 2 * batch * context // engine.max_num_batched_tokens + 2
    tokens = context + WARM_UP + steps + ahead
    if batch > engine.config.max_num_seqs:
        return f"max_num_seqs is {engine.config.max_num_seqs}"
    if tokens > engine.max_model_len:
        return f"max_model_len is {engine.max_model_len}, and up to {tokens} tokens come"
    if (blocks := batch * manager.num_blocks_for(tokens)) > manager.num_usable_blocks:
        return f"the KV cache has {manager.num_usable_blocks} blocks, and {blocks} are needed"
    return None


def sample_seconds(engine: Engine, batch: int) -> float:
    """Seconds that the op `sample` takes alone for `batch` greedy rows, as in the turns.

    In a step it lies inside the compiled graph, where it cannot be told apart.
    """
    op = engine.report.providers["sample"].overload
    arguments = greedy_arguments(batch, engine.vocab_size, engine.dtype, engine.device)
    return Repeated([partial(op, *arguments)] * 5, engine.device).median()


def greedy_arguments(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """What `sample` takes for random logits [rows, vocab_size] and rows that are greedy."""

    def per_row(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return [
        torch.randn(rows, vocab_size, device=device, dtype=torch.float32).to(dtype),
        per_row(0, torch.float32),
        per_row(0, torch.int32),
        per_row(1, torch.float32),
        per_row(0, torch.float32),
        per_row(0, torch.int64),
        per_row(0, torch.int64),
        torch.full((rows, MASKED), -1, dtype=torch.int32, device=device),
    ]


def _cell(turns: Sequence[Turn], floors: Sequence[float]) -> dict[str, Any]:
    """One executor's figures."""
    steps = [statistics.median(turn.steps) for turn in turns]
    device = [statistics.median(turn.device) for turn in turns]
    phases = {name: statistics.median(turn.phases[name] for turn in turns) for name in turns[0].phases}
    return {
        "us": statistics.median(steps) * 1e6,
        "device_us": statistics.median(device) * 1e6,
        "host_us": sum(phases[name] for name in HOST) * 1e6,
        "phases_us": {name: value * 1e6 for name, value in phases.items()},
        "fraction": ratio(floors, steps),
        "device_fraction": ratio(floors, device),
        "replayed": all(turn.replays == len(turn.steps) for turn in turns),
        "rounds": len(turns),
    }
