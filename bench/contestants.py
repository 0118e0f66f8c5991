"""Who is compared: our engine, and Hugging Face `generate` with either of its caches. All are greedy and ignore EOS."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, StoppingCriteria

import runtime
from bench.rounds import timed
from runtime.engine import Engine

OURS = "pagegraph"
AGAINST = ("eager", "static")
PROBE_ROWS = 32

Prompts = Sequence[list[int]]


class Timing(NamedTuple):
    """Seconds of one `generate`."""

    first: float  # until every sequence had its first token
    steps: list[float]  # of each decode step after that


class Contestant(Protocol):
    """Generates `new_tokens` tokens for every prompt, as one batch."""

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        """Run to the end, and return the seconds that it took."""


class Pagegraph:
    """An engine, scheduling and outputs included. No prefix is reused from one call to the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        """As `Contestant`. Prompts longer in all than the token budget run in several steps before the first."""
        engine = self._engine
        engine.reset_prefix_cache()
        budget = engine.max_num_batched_tokens
        ahead = 2 * sum(map(len, prompts)) // budget  # decode steps of early prompts while later ones are computed
        params = runtime.SamplingParams(max_tokens=new_tokens + ahead, temperature=0, ignore_eos=True)
        before, start = engine.stats().num_output_tokens, time.perf_counter()
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        first = time.perf_counter() - start
        step = timed(engine.step)
        steps = [step() for _ in range(new_tokens - 1)]
        came = engine.stats().num_output_tokens - before
        for request_id in ids:
            engine.abort_request(request_id)
        assert came >= len(prompts) * new_tokens, f"{came} tokens came for {len(prompts)} x {new_tokens}: see the log"
        return Timing(first, steps)


class HuggingFace:
    """`generate` of transformers: uncompiled with its default cache, or with a static one and compiled decode steps.

    Compiling is what `generate` does by itself where the cache is static: its own `CompileConfig`, one graph for each
    batch size, and prefill left uncompiled. On CPUs it has to be asked to.
    """

    def __init__(self, model: Any, *, static: bool = False, max_cache_len: int | None = None) -> None:
        """max_cache_len: least length of a static cache; calls that fit into it share its graph."""
        self._model = model
        self._config = GenerationConfig(do_sample=False, pad_token_id=0)
        if static:
            on_gpu = model.device.type == "cuda"
            compiling = CompileConfig(dynamic=False, mode="reduce-overhead" if on_gpu else "default")
            compiling._compile_all_devices = True
            self._config.cache_implementation = "static"
            self._config.compile_config = compiling
            self._config.max_cache_len = max_cache_len
            # Dynamo counts the graphs of all models and batch sizes together, and runs the rest uncompiled.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        """As `Contestant`; shorter prompts are padded on the left."""
        config, clock = copy.deepcopy(self._config), _Clock()
        config.max_new_tokens = new_tokens
        ids, mask = left_padded(prompts)
        start = time.perf_counter()
        self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=config,
            stopping_criteria=[clock],
        )
        assert len(clock.times) == new_tokens, f"{len(clock.times)} of {new_tokens} tokens came"
        return Timing(clock.times[0] - start, [after - before for before, after in pairwise(clock.times)])


class _Clock(StoppingCriteria):
    """Notes when each token of a `generate` call was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def left_padded(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Token ids [B, longest prompt], int64, padded with 0 on the left, and the mask of those that are no padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def load_hugging_face(folder: Path, engine: Engine) -> Any:
    """The unmodified model, in the engine's dtype and on its device. Its generation config is the plain default."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.dtype).to(engine.device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no EOS
    return model


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


class Forecast(NamedTuple):
    """How long a contestant will take, from two small measurements. Generous: rows are taken to cost what they do in a
    forward of PROBE_ROWS, which for more of them is too much where the weights' bytes dominate."""

    step: float  # seconds of a forward of one row
    row: float  # seconds a row in one of PROBE_ROWS

    def forward(self, rows: int) -> float:
        """Seconds of a forward pass of that many tokens."""
        return max(self.step, self.row * rows)

    def generate(self, batch: int, prompt: int, new_tokens: int) -> float:
        """Seconds of `Contestant.generate` for `batch` prompts of `prompt` tokens."""
        return self.forward(batch * prompt) + (new_tokens - 1) * self.forward(batch)


def forecast(contestant: Contestant, vocab_size: int) -> Forecast:
    """Measure a small prefill and two decode steps, after warming up with one token; a static cache compiles in that.

    The row is from the better of two prefills, since the first may still have something to set up.
    """
    prompts = random_prompts(vocab_size, [PROBE_ROWS])
    contestant.generate([prompts[0][:1]], 3)
    timings = [contestant.generate(prompts, 3) for _ in range(2)]
    return Forecast(
        step=min(second for timing in timings for second in timing.steps),
        row=min(timing.first for timing in timings) / PROBE_ROWS,
    )


class Entrant(NamedTuple):
    """A contestant, and how long it will take."""

    contestant: Contestant
    forecast: Forecast


def enter(
    engine: Engine, folder: Path, against: Sequence[str], max_cache_len: int
) -> tuple[dict[str, Entrant], dict[str, str]]:
    """Our engine and the contestants named in `against` (of AGAINST), warmed up, ours first.

    max_cache_len: of the static cache. Returns as well why those are missing that cannot run here, by name. Raises
    ValueError for an unknown name.
    """
    if unknown := set(against) - set(AGAINST):
        raise ValueError(f"--against {','.join(sorted(unknown))} is unknown; these are known: {', '.join(AGAINST)}")
    contestants: dict[str, Contestant] = {OURS: Pagegraph(engine)}
    if against:
        model = load_hugging_face(folder, engine)
        for name in against:
            contestants[name] = HuggingFace(model, static=name == "static", max_cache_len=max_cache_len)
    entrants, missing = {}, {}
    for name, contestant in contestants.items():
        try:
            entrants[name] = Entrant(contestant, forecast(contestant, engine.vocab_size))
        except Exception as error:
            if name == OURS:
                raise
            missing[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]  # goes into the table
    return entrants, missing
