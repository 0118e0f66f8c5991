"""How long is the host's part of a decode step, and does it grow with the pool or the context?

python -m bench.host_overhead [--text]

No model: a Scheduler over a KVCacheManager, an InputFiller over an arena on the CPU, and made-up tokens. Text has a
table of its own: outputs of requests that say the README, by the default model's tokenizer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphs.inputs import InputArena
from models.checkpoint import resolve
from runtime.batch import InputFiller
from runtime.completions import Completions
from runtime.memory.block import KVCacheBlock
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request
from runtime.sampling import SamplingParams
from runtime.schedule import Schedule
from runtime.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 49152
TARGET_BATCH, TARGET_US = 256, 500.0
TEXT_TARGET_US = 6.0  # a request and token


class StepSeconds(NamedTuple):
    """Seconds of the phases of one step. `allocate` is the part of `schedule` in `allocate_slots`, 0 if not timed."""

    schedule: float
    inputs: float
    update: float
    allocate: float

    @property
    def total(self) -> float:
        """What the target is about: schedule, allocation within it, and update."""
        return self.schedule + self.update


class _TimedManager(KVCacheManager):
    """Sums the seconds spent in `allocate_slots`, one reading of the clock included in each call."""

    seconds = 0.0

    def allocate_slots(self, *args: Any, **kwargs: Any) -> list[KVCacheBlock] | None:
        """See KVCacheManager."""
        start = time.perf_counter()
        blocks = super().allocate_slots(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return blocks


class DecodeLoop:
    """`batch` sequences that decode made-up tokens over a pool of `num_blocks`, with the seconds of every step.

    Prompts share nothing and have `context` tokens, less 0 to 15 so that one sequence in 16 fills a block in each step.
    All end together after `lifetime` steps and one more, and new ones follow; steps with prompts are not timed.
    The pool starts full of a finished request's blocks: with prefix caching each new block evicts one, as in a server
    that has run for a while. Raises ValueError for a pool that is too small.
    """

    def __init__(
        self,
        batch: int,
        *,
        context: int,
        num_blocks: int,
        lifetime: int,
        enable_prefix_caching: bool = True,
        time_allocate: bool = False,
    ) -> None:
        self.batch, self.context, self.lifetime = batch, context, lifetime
        make_manager = _TimedManager if time_allocate else KVCacheManager
        self.manager = make_manager(num_blocks, BLOCK_SIZE, enable_prefix_caching)
        needed = blocks_needed(batch, context, lifetime)
        if context < 1 or needed > num_blocks:
            raise ValueError(
                f"{batch} sequences of {context} tokens that decode {lifetime} steps need {needed} blocks, not "
                f"{num_blocks}: give larger pools, or fewer sequences, steps or rounds"
            )
        capacity = num_blocks * BLOCK_SIZE
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=batch, max_num_batched_tokens=capacity, max_model_len=capacity
        )
        self.filler = InputFiller(InputArena(torch.device("cpu")), self.manager)
        self.steps: list[StepSeconds] = []
        self.last_steps: list[StepSeconds] = []
        self._arrivals, self._tokens = itertools.count(), itertools.count()
        self._generator = torch.Generator().manual_seed(0)
        self._left = 0
        self._add(self.manager.num_usable_blocks * BLOCK_SIZE - 1, max_tokens=1)
        self._prefill()

    def run(self, steps: int) -> None:
        """Add the seconds of that many steps to `steps`, and those of steps that end everyone to `last_steps`."""
        for _ in range(steps):
            if not self._left:
                self._start()
            self.steps.append(self._step())
            self._left -= 1
            if not self._left:
                self.last_steps.append(self._step())
                assert not self.scheduler.has_unfinished()

    def _start(self) -> None:
        for index in range(self.batch):
            self._add(max(1, self.context - index % BLOCK_SIZE), max_tokens=self.lifetime + 2)
        self._prefill()
        self._left = self.lifetime

    def _add(self, length: int, max_tokens: int) -> None:
        arrival = next(self._arrivals)
        prompt = torch.randint(VOCAB_SIZE, (length,), generator=self._generator).tolist()
        prompt[0] = VOCAB_SIZE + arrival  # no two prompts begin alike, so no block is ever shared
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(
            str(arrival), prompt, params, arrival=arrival, eos_token_ids=frozenset(), max_model_len=sys.maxsize
        )
        self.scheduler.add(request)

    def _prefill(self) -> None:
        schedule = self.scheduler.schedule()
        assert not self.scheduler.num_waiting
        self.scheduler.manager.finish_transfers()
        self.scheduler.update(schedule, self._draw(schedule))

    def _draw(self, schedule: Schedule) -> list[int]:
        return [next(self._tokens) % VOCAB_SIZE for _ in schedule.rows]

    def _step(self) -> StepSeconds:
        allocated = self._allocate_seconds
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        scheduled = time.perf_counter()
        self.filler.fill(schedule)
        filled = time.perf_counter()
        assert len(schedule.rows) == schedule.num_tokens == self.batch
        tokens = self._draw(schedule)
        launched = time.perf_counter()
        self.scheduler.manager.finish_transfers()
        self.scheduler.update(schedule, tokens)
        end = time.perf_counter()
        return StepSeconds(scheduled - start, filled - scheduled, end - launched, self._allocate_seconds - allocated)

    @property
    def _allocate_seconds(self) -> float:
        return self.manager.seconds if isinstance(self.manager, _TimedManager) else 0.0


class TextLoop:
    """`batch` requests that go on saying `script`, each from another place, and have `length` tokens out at first.

    A step takes a token's text and makes the output of each request; `read` reads text and tokens of these, as a user
    would. `steps` holds seconds a request.
    """

    def __init__(self, tokenizer: Any, script: Sequence[int], batch: int, *, length: int, read: bool) -> None:
        self.batch, self.length, self.read = batch, length, read
        self.steps: list[float] = []
        starts = [index * len(script) // batch for index in range(batch)]
        self._says = [itertools.cycle([*script[start:], *script[:start]]) for start in starts]
        params = SamplingParams(max_tokens=sys.maxsize)
        self._requests = [
            Request(str(index), script[:8], params, arrival=index, eos_token_ids=frozenset(), max_model_len=sys.maxsize)
            for index in range(batch)
        ]
        self._completions = [Completions(request, None, tokenizer) for request in self._requests]
        for _ in range(length):
            self._say()
        self.run(1)  # takes all of these
        self.steps.clear()

    def run(self, steps: int) -> None:
        """Add the seconds of that many steps to `steps`."""
        for _ in range(steps):
            self._say()
            start = time.perf_counter()
            for completions in self._completions:
                completions.take(completions.root)
            for completions in self._completions:
                output = completions.output()
                if self.read:
                    assert output.outputs[0].text
                    assert output.outputs[0].token_ids
            self.steps.append((time.perf_counter() - start) / self.batch)

    def _say(self) -> None:
        for request, says in zip(self._requests, self._says, strict=True):
            request.append_token(next(says))


def blocks_needed(batch: int, context: int, lifetime: int) -> int:
    """The size of a pool, the null block included, that holds a DecodeLoop without preemption."""
    return batch * -(-(context + lifetime + 2) // BLOCK_SIZE) + 1


def alternate(loops: Sequence[DecodeLoop | TextLoop], steps: int, rounds: int) -> None:
    """Run the loops in turn, `rounds` times `steps` steps each, after one round that is not kept."""
    for index in range(rounds + 1):
        for loop in loops:
            loop.run(steps)
            if not index:
                loop.steps.clear()


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The median, mean, 90th percentile and maximum, in microseconds."""
    us = sorted(value * 1e6 for value in seconds)
    p90 = us[min(len(us) - 1, len(us) * 9 // 10)]
    return {"median": statistics.median(us), "mean": statistics.fmean(us), "p90": p90, "max": us[-1]}


def measure_phases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The phases of a step, by prefix caching and batch size."""
    rows = []
    lifetime = args.steps * (args.rounds + 1)
    for caching in (True, False):
        pairs = [
            [
                DecodeLoop(
                    batch,
                    context=args.context,
                    num_blocks=args.pool,
                    lifetime=lifetime,
                    enable_prefix_caching=caching,
                    time_allocate=time_allocate,
                )
                for time_allocate in (False, True)
            ]
            for batch in args.batch
        ]
        alternate([loop for pair in pairs for loop in pair], args.steps, args.rounds)
        for plain, timed in pairs:
            row: dict[str, Any] = {"batch": plain.batch, "prefix_caching": caching}
            for phase in ("schedule", "update", "total", "inputs"):
                row[phase] = summary([getattr(step, phase) for step in plain.steps])
            row["allocate"] = summary([step.allocate for step in timed.steps])
            row["last_update"] = summary([step.update for step in plain.last_steps])
            rows.append(row)
    return rows


def measure_flatness(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same steps over pools of several sizes, then with contexts of several lengths; ratios to the first of each.

    Pools of all sizes get the longest context that fits into the smallest, and contexts of all lengths one pool that
    holds the longest, each at the largest batch.
    """
    most, lifetime = max(args.flat_batch), args.steps * (args.rounds + 1)
    short = (min(args.flat_pools) - 1) // most * BLOCK_SIZE - args.steps - 2
    large = blocks_needed(most, max(args.flat_contexts), lifetime)
    pools = [{"context": short, "num_blocks": pool, "lifetime": args.steps} for pool in args.flat_pools]
    contexts = [{"context": context, "num_blocks": large, "lifetime": lifetime} for context in args.flat_contexts]
    rows = []
    for caching, (swept, sizes), batch in itertools.product(
        (True, False), (("num_blocks", pools), ("context", contexts)), args.flat_batch
    ):
        loops = [DecodeLoop(batch, **size, enable_prefix_caching=caching) for size in sizes]
        alternate(loops, args.steps, args.rounds)
        group = []
        for size, loop in zip(sizes, loops, strict=True):
            row: dict[str, Any] = {"swept": swept, "size": size[swept], "batch": batch, "prefix_caching": caching}
            row["total"] = summary([step.total for step in loop.steps])
            row["inputs"] = summary([step.inputs for step in loop.steps])
            group.append(row)
        for row in group:
            row["total_ratio"] = row["total"]["median"] / group[0]["total"]["median"]
            row["total_mean_ratio"] = row["total"]["mean"] / group[0]["total"]["mean"]
            row["inputs_ratio"] = row["inputs"]["median"] / group[0]["inputs"]["median"]
        rows += group
    return rows


def measure_text(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Text and outputs for each request and token, by batch size, tokens so far, and whether the outputs are read."""
    tokenizer = resolve("smollm2").load_tokenizer()
    assert tokenizer is not None
    script = tokenizer.encode((Path(__file__).parent.parent / "README.md").read_text())
    cases = itertools.product(args.text_batch, args.text_lengths, (False, True))
    loops = [TextLoop(tokenizer, script, batch, length=length, read=read) for batch, length, read in cases]
    alternate(loops, args.steps, args.rounds)
    return [
        {"batch": loop.batch, "length": loop.length, "read": loop.read, "request": summary(loop.steps)}
        for loop in loops
    ]


def print_phases(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """One line for each batch size, and the target."""
    print(
        f"host time of a decode step in us, medians: {args.context} tokens of context, {args.pool} blocks of "
        f"{BLOCK_SIZE}, garbage collection on\n"
        "allocate is part of schedule, from runs of its own; inputs are not part of the total; last: the update that "
        "ends everyone"
    )
    head = ("batch", "caching", "schedule", "allocate", "update", "total", "mean", "p90", "max", "inputs", "last")
    print("".join(f"{name:>10}" for name in head))
    for row in rows:
        total = row["total"]
        medians = [row[name]["median"] for name in ("schedule", "allocate", "update")]
        shown = [*medians, *total.values(), row["inputs"]["median"], row["last_update"]["median"]]
        print(f"{row['batch']:>10}{_on_off(row):>10}" + "".join(f"{value:>10.1f}" for value in shown))
        if row["batch"] == TARGET_BATCH:
            verdict = "met" if total["median"] <= TARGET_US else "missed"
            print(f"{'':>10}target: total at batch {TARGET_BATCH} <= {TARGET_US:.0f} us: {verdict}")


def print_flatness(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each size; x is the ratio to the first size."""
    head = ("swept", "size", "batch", "caching", "total", "x", "mean", "x", "inputs", "x")
    print("\n" + "".join(f"{name:>11}" for name in head))
    for row in rows:
        total, inputs = row["total"], row["inputs"]
        print(
            f"{row['swept']:>11}{row['size']:>11}{row['batch']:>11}{_on_off(row):>11}"
            f"{total['median']:>11.1f}{row['total_ratio']:>11.2f}{total['mean']:>11.1f}{row['total_mean_ratio']:>11.2f}"
            f"{inputs['median']:>11.1f}{row['inputs_ratio']:>11.2f}"
        )


def print_text(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each case, and the target."""
    print("\ntext and outputs in us for each request and token; read: the outputs' text and tokens are looked at")
    print("".join(f"{name:>10}" for name in ("batch", "length", "read", "median", "mean", "p90", "max")))
    for row in rows:
        shown = (row["batch"], row["length"], "yes" if row["read"] else "no")
        print("".join(f"{value:>10}" for value in shown) + "".join(f"{us:>10.2f}" for us in row["request"].values()))
    unread = [row["request"]["median"] for row in rows if not row["read"]]
    verdict = "met" if max(unread) <= TEXT_TARGET_US else "missed"
    print(f"{'':>10}target: medians of unread outputs <= {TEXT_TARGET_US:.0f} us: {verdict}")


def _on_off(row: dict[str, Any]) -> str:
    return "on" if row["prefix_caching"] else "off"


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main() -> None:
    """Print the phases, the target, the flatness and, if asked for, the text; then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=_sizes, default="1,64,256", help="batch sizes, separated by commas")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--pool", type=int, default=16384, help="blocks, the null block included")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are kept, after one that is not")
    parser.add_argument("--flat-batch", type=_sizes, default="64,256", help="batch sizes of the flatness table")
    parser.add_argument("--flat-pools", type=_sizes, default="2048,16384,131072", help="blocks of its pools")
    parser.add_argument("--flat-contexts", type=_sizes, default="128,1024,8192", help="its prompt lengths")
    parser.add_argument("--text", action="store_true", help="the text's table too; fetches the default model")
    parser.add_argument("--text-batch", type=_sizes, default="1,64", help="batch sizes of the text's table")
    parser.add_argument("--text-lengths", type=_sizes, default="16,2000", help="its output tokens so far")
    args = parser.parse_args()
    phases = measure_phases(args)
    print_phases(phases, args)
    flatness = measure_flatness(args)
    print_flatness(flatness)
    text = measure_text(args) if args.text else []
    if text:
        print_text(text)
    sys.stdout.flush()
    sizes = {name: value for name, value in vars(args).items() if type(value) is int}
    print(
        json.dumps(
            {
                "bench": "host_overhead",
                "python": platform.python_version(),
                "gc": gc.isenabled(),
                "block_size": BLOCK_SIZE,
                **sizes,
                "target_batch": TARGET_BATCH,
                "target_us": TARGET_US,
                "rows": phases,
                "flatness": flatness,
                "text": text,
            }
        )
    )


if __name__ == "__main__":
    main()
