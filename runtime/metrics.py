"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepSeconds:
    """Where the time of steps went, in seconds, by phase.

    schedule: choosing rows and blocks. transfer: blocks swapped and copied. prepare: filling the inputs. forward: the
    model with sampling, until the tokens are on the host; of a GPU, launching it and waiting for it. update: taking the
    tokens. output: text and RequestOutputs.
    """

    schedule: float = 0.0
    transfer: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    update: float = 0.0
    output: float = 0.0

    @property
    def host(self) -> float:
        """What a step takes beside the model and the movement of blocks."""
        return self.schedule + self.prepare + self.update + self.output


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counters run from the engine's start; prefix cache figures are in tokens.

    A preempted request finds its own blocks again when it resumes: those look-ups are counted apart (`resumed_…`),
    since they say nothing about sharing. `num_blocks_copied` counts copies on write. `kv_cache_usage` is the share of
    usable blocks in use. `num_recompiles` counts graphs that were compiled
    after the first one; `num_graph_replays` the decode steps that a CUDA graph ran, `num_steps_ahead` those that were
    launched before the tokens of the step before were known.

    `num_preemptions` is the sum of those swapped out and those to be recomputed. Blocks that several sequences share
    move, and count, once; what the prefix cache still has is not swapped in. `swap_space_usage` is the share of the
    host's blocks in use, 0 if there are none.
    """

    step_seconds: StepSeconds
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_preemptions_swapped: int
    num_preemptions_recomputed: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int
    num_steps: int
    num_steps_ahead: int
    num_graph_replays: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    resumed_cache_queries: int
    resumed_cache_hits: int
    kv_cache_usage: float
    swap_space_usage: float
    num_recompiles: int


@dataclass
class PhaseSeconds:
    """Where the time of an engine went, in seconds: before the first step, and in its steps.

    A step with any prompt tokens counts as prefill, others as decode. `eager` is how long steps ran uncompiled, beside
    a background compilation, until its graph took over: no phase of its own.
    """

    fetch: float = 0.0
    load: float = 0.0
    compile: float = 0.0
    capture: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    eager: float = 0.0
