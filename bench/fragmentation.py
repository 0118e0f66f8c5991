"""How much of the KV cache holds tokens, under two contiguous allocators and under ours, and what is it worth?

python -m bench.fragmentation
python -m bench.fragmentation --workload conv --throughput

The same requests go through each allocator, first come first served. Time goes in decode steps: a request's prompt is
written in the step that admits it, then one token a step. Every share is of the slots of the pool.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import runtime
from bench.allocators import Allocator, ContiguousAllocator, PagedAllocator, next_power_of_two
from bench.arguments import at_least
from runtime.request import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from runtime.engine import Engine

WORKLOADS = ("conv", "code", "synthetic")
DATA = Path(__file__).parent / "data"
SOURCE = "Azure LLM inference trace 2023 (Azure/AzurePublicDataset, Microsoft), first requests, lengths and times only"
LICENCE = "CC-BY-4.0"
PUBLISHED: dict[str, Any] = {
    "source": "Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, "
    "SOSP 2023",
    "used_contiguous": [0.204, 0.382],
    "used_paged_above": 0.96,
}


class Lengths(NamedTuple):
    """One request of a workload: when it comes, in seconds, and its tokens."""

    arrival_s: float
    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Prompt and output tokens."""
        return self.prompt + self.output


def read_trace(name: str) -> list[Lengths]:
    """All requests of `bench/data/azure_{name}_2023.csv`, in order of arrival."""
    with (DATA / f"azure_{name}_2023.csv").open(newline="") as file:
        return [
            Lengths(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(file)
        ]


def synthetic(seed: int, count: int = 1000) -> list[Lengths]:
    """`count` requests at 5 a second on average (Poisson), prompt and output log-uniform in 16 to 1,024 tokens."""
    rng = random.Random(seed)
    arrival, requests = 0.0, []
    for _ in range(count):
        prompt, output = (int(2 ** rng.uniform(4, 10)) for _ in range(2))
        requests.append(Lengths(arrival, prompt, output))
        arrival += rng.expovariate(5.0)
    return requests


def make_request(name: str, prompt: int, output: int, arrival: int = 0) -> Request:
    """A request of `prompt` tokens that ends after exactly `output` more."""
    return Request(
        name,
        [0] * prompt,
        runtime.SamplingParams(max_tokens=output, ignore_eos=True),
        arrival=arrival,
        eos_token_ids=frozenset(),
        max_model_len=prompt + output,
    )


def final_length(request: Request) -> int:
    """Tokens that are in the cache in the end: all but the last one, which no forward reads."""
    return request.num_prompt_tokens + request.params.max_tokens - 1


class Sample(NamedTuple):
    """The pool in one step. The first five, in slots, add up to the pool."""

    used: int  # written
    reserved: int  # allocated, and written later
    internal: int  # internal fragmentation: allocated, and never written; the null block is in it
    external: int  # external fragmentation: free, in holes too small for the request at the head of the queue
    free: int  # free otherwise
    running: int  # requests
    outstanding: int  # requests that are still to be admitted
    blocked: bool  # the head waits although as many slots as it asks for are free


class Simulation:
    """Requests, in order of `arrival` (a step), through one allocator: the head of the queue blocks those behind it.

    As in pagegraph's scheduler, the request that came last is preempted when the others cannot grow, its tokens are
    computed anew later, and nobody is admitted in such a step. Contiguous allocators never need that.
    """

    def __init__(self, allocator: Allocator, requests: Iterable[Request]) -> None:
        self.samples: list[Sample] = []
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self._allocator = allocator
        self._waiting = deque(requests)
        self._running: list[Request] = []  # in order of arrival, as everything that waits came later

    def run(self) -> None:
        """Run all requests to their end, a sample a step. Raises ValueError if one is too large for the whole pool."""
        while self._waiting or self._running:
            num_preemptions = self.num_preemptions
            self._grow()
            if self.num_preemptions == num_preemptions:
                self._admit()
            self.samples.append(self._sample())
            self._advance()

    def _grow(self) -> None:
        index = 0
        while index < len(self._running):
            if self._allocator.allocate(self._running[index]):
                index += 1
            else:
                self._preempt(self._running.pop())

    def _preempt(self, request: Request) -> None:
        self._allocator.free(request)
        self.num_preemptions += 1
        self.num_recomputed_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0
        self._waiting.appendleft(request)

    def _admit(self) -> None:
        while (head := self._head()) is not None and self._allocator.allocate(head):
            self._running.append(self._waiting.popleft())
        if head is not None and not self._running:
            raise ValueError(
                f"a request asks for {self._allocator.demand(head)} slots, and {self._allocator.free_slots} are in the "
                f"whole pool: raise --slots or lower --max-len"
            )

    def _head(self) -> Request | None:
        """The first request that waits, if it has arrived."""
        arrived = self._waiting and self._waiting[0].arrival <= len(self.samples)
        return self._waiting[0] if arrived else None

    def _sample(self) -> Sample:
        allocator, head = self._allocator, self._head()
        used = sum(request.num_tokens for request in self._running)
        allocated = ((allocator.num_allocated(request), final_length(request)) for request in self._running)
        reserved = sum(min(size, final) for size, final in allocated) - used
        free = allocator.free_slots
        external = 0 if head is None else allocator.fragmented_slots(head)
        return Sample(
            used=used,
            reserved=reserved,
            internal=allocator.slots - free - used - reserved,
            external=external,
            free=free - external,
            running=len(self._running),
            outstanding=len(self._waiting),
            blocked=head is not None and external >= allocator.demand(head),
        )

    def _advance(self) -> None:
        """Write every token that is not yet written, draw the next ones, and let go of the requests that end."""
        for request in self._running:
            request.num_computed_tokens = request.num_tokens
            request.append_token(0)
            if request.is_finished:
                self._allocator.free(request)
        self._running = [request for request in self._running if not request.is_finished]


def summarise(simulation: Simulation) -> dict[str, Any]:
    """Means over the steps in which requests were still to be admitted: later the pool empties whoever manages it."""
    steps = [sample for sample in simulation.samples if sample.outstanding] or simulation.samples
    used, reserved, internal, external, free, running, _, blocked = map(statistics.fmean, zip(*steps, strict=True))
    allocated = used + reserved + internal
    slots = allocated + external + free
    return {
        "used": used / slots,
        "reserved": reserved / slots,
        "internal_fragmentation": internal / slots,
        "external_fragmentation": external / slots,
        "free": free / slots,
        "used_of_allocated": used / allocated,
        "concurrency": running,
        "blocked_by_fragmentation": blocked,
        "num_preemptions": simulation.num_preemptions,
        "num_recomputed_tokens": simulation.num_recomputed_tokens,
        "num_steps": len(simulation.samples),
        "num_steps_measured": len(steps),
    }


def allocators(slots: int, max_len: int, block_size: int) -> dict[str, Allocator]:
    """What is compared, over the same `slots` slots."""
    return {
        "max length": ContiguousAllocator(slots, lambda request: max_len),
        "power of two": ContiguousAllocator(
            slots, lambda request: next_power_of_two(request.num_prompt_tokens + request.params.max_tokens)
        ),
        "paged": PagedAllocator(slots, block_size),
    }


def textbook() -> dict[str, Any]:
    """64 slots, and requests A, B and C that hold 6, 7 and 6 tokens, under both kinds of allocators.

    Contiguous, each reserves 20, and between A and B lay one that reserved 12 and has ended. Paged, blocks hold 4.
    """
    slots, reservation = 64, {"A": 20, "earlier": 12, "B": 20, "C": 20}
    written = {"A": 6, "earlier": 12, "B": 7, "C": 6}
    requests = {name: make_request(name, tokens, 1) for name, tokens in written.items()}
    contiguous = ContiguousAllocator(slots, lambda request: reservation[request.request_id])
    fits = {name: contiguous.allocate(requests[name]) for name in ("A", "earlier", "B")}
    contiguous.free(requests["earlier"])
    fits["C"] = contiguous.allocate(requests["C"])
    paged = PagedAllocator(slots, block_size=4)
    fits_paged = {name: paged.allocate(requests[name]) for name in ("A", "B", "C")}
    sizes = {name: paged.num_allocated(requests[name]) for name in fits_paged}
    return {
        "slots": slots,
        "contiguous": {
            "fits": fits,
            "starts": {name: contiguous.region(requests[name]).start for name in ("A", "B")},
            "unused": sum(contiguous.num_allocated(requests[name]) - written[name] for name in ("A", "B")),
            "holes": [hole.size for hole in contiguous.holes],
            "external_fragmentation": contiguous.fragmented_slots(requests["C"]),
        },
        "paged": {
            "fits": fits_paged,
            "blocks": {name: size // paged.manager.block_size for name, size in sizes.items()},
            "unused": {name: size - written[name] for name, size in sizes.items()},
        },
    }


def load(name: str, args: argparse.Namespace) -> tuple[list[Lengths], int]:
    """The requests of a workload that are no longer than the maximum length, and that length."""
    lengths = (synthetic(args.seed) if name == "synthetic" else read_trace(name))[: args.requests]
    max_len = args.max_len or next_power_of_two(max(request.total for request in lengths))
    kept = [request for request in lengths if request.total <= max_len]
    if not kept:
        raise ValueError(f"--max-len {max_len} is shorter than every request of {name!r}: raise it")
    return kept, max_len


def simulate(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Simulation]]:
    """One workload through each allocator: the figures, and the simulations they are from."""
    lengths, max_len = load(name, args)
    simulations = {}
    for kind, allocator in allocators(args.slots, max_len, args.block_size).items():
        requests = [
            make_request(str(i), request.prompt, request.output, int(request.arrival_s * args.rate))
            for i, request in enumerate(lengths)
        ]
        simulations[kind] = Simulation(allocator, requests)
        simulations[kind].run()
    result = {
        "workload": name,
        "num_requests": len(lengths),
        "mean_prompt": statistics.fmean(request.prompt for request in lengths),
        "mean_output": statistics.fmean(request.output for request in lengths),
        "longest": max(request.total for request in lengths),
        "max_len": max_len,
        "allocators": {kind: summarise(simulation) for kind, simulation in simulations.items()},
    }
    return result, simulations


class Run(NamedTuple):
    """What one pass of an engine over all prompts came to."""

    output_tokens_per_s: float
    concurrency: float  # requests that ran at once, the mean over steps
    num_preemptions: int


def serve(engine: Engine, prompts: Sequence[list[int]], outputs: Sequence[int]) -> Run:
    """Give all prompts to an idle engine at once, greedy, for exactly `outputs` tokens each, and run to the end."""
    before, start = engine.stats(), time.perf_counter()
    for prompt, output in zip(prompts, outputs, strict=True):
        engine.add_request(prompt, runtime.SamplingParams(max_tokens=output, temperature=0, ignore_eos=True))
    running = []
    while engine.has_unfinished_requests():
        finished = sum(output.finished for output in engine.step())
        running.append(engine.stats().num_running + finished)
    seconds = time.perf_counter() - start
    after = engine.stats()
    output_tokens = after.num_output_tokens - before.num_output_tokens
    assert output_tokens == sum(outputs), f"{output_tokens} of {sum(outputs)} tokens came: the log has the reason"
    num_preemptions = after.num_preemptions - before.num_preemptions
    return Run(output_tokens / seconds, statistics.fmean(running), num_preemptions)


def throughput(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A sample of a workload, its lengths divided by --scale, on the default model with one size of KV cache.

    Under "max length" as many requests run at once as reservations of the maximum length fit in those bytes; "paged" is
    the engine as it is. Token ids are random, and rounds alternate.
    """
    lengths, max_len = load(name, args)
    stride = max(1, len(lengths) // args.engine_requests)
    sample = lengths[::stride][: args.engine_requests]
    max_len = math.ceil(max_len / args.scale)
    outputs = [max(1, request.output // args.scale) for request in sample]
    most = args.engine_slots // max_len
    if most == 0:
        raise ValueError(
            f"--engine-slots {args.engine_slots} is below the maximum length, {max_len}: raise it or --scale"
        )
    limits = {"max length": {"max_num_seqs": most}, "paged": {}}
    engines = {
        kind: runtime.compile(
            "smollm2",
            backend=args.backend,
            block_size=args.block_size,
            num_blocks=args.engine_slots // args.block_size,
            max_model_len=max_len,
            enable_prefix_caching=False,  # rounds repeat their prompts
            **limit,
        )
        for kind, limit in limits.items()
    }
    rng = random.Random(args.seed)
    vocab_size = engines["paged"].vocab_size
    prompts = [rng.choices(range(vocab_size), k=max(1, request.prompt // args.scale)) for request in sample]
    runs: dict[str, list[Run]] = {kind: [] for kind in engines}
    for engine in engines.values():
        serve(engine, prompts[:2], [2, 2])
    for _ in range(args.rounds):
        for kind, engine in engines.items():
            runs[kind].append(serve(engine, prompts, outputs))
    return {
        "model": "smollm2",
        "backend": args.backend,
        "workload": name,
        "num_requests": len(sample),
        "scale": args.scale,
        "mean_prompt": statistics.fmean(map(len, prompts)),
        "mean_output": statistics.fmean(outputs),
        "max_len": max_len,
        "slots": args.engine_slots,
        "rounds": args.rounds,
        "allocators": {
            kind: {
                "max_num_seqs": engines[kind].config.max_num_seqs,
                "concurrency": statistics.fmean(run.concurrency for run in done),
                "output_tokens_per_s": statistics.median(run.output_tokens_per_s for run in done),
                "output_tokens_per_s_by_round": [run.output_tokens_per_s for run in done],
                "num_preemptions": max(run.num_preemptions for run in done),
            }
            for kind, done in runs.items()
        },
    }


def new_figure() -> Figure:
    """An empty figure. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    return Figure(layout="constrained")


def draw(figure: Figure, runs: dict[str, dict[str, Simulation]], slots: int) -> None:
    """Plot used share, internal and external fragmentation, and requests at once over the steps, by workload."""
    figure.set_size_inches(5 * len(runs), 11)
    axes = figure.subplots(4, len(runs), squeeze=False, sharex="col")
    shares = ("used", "internal", "external")
    labels = {"used": "share that holds a token", "internal": "internal fragmentation", "external": "external fragm."}
    for column, (name, simulations) in zip(axes.T, runs.items(), strict=True):
        *of_slots, running = column
        for kind, simulation in simulations.items():
            steps = range(0, len(simulation.samples), math.ceil(len(simulation.samples) / 1000))
            for share, axis in zip(shares, of_slots, strict=True):
                axis.plot(steps, [getattr(simulation.samples[step], share) / slots for step in steps], label=kind)
                axis.set(ylabel=labels[share], ylim=(0, 1))
            running.plot(steps, [simulation.samples[step].running for step in steps], label=kind)
        column[0].set(title=name)
        running.set(xlabel="decode steps", ylabel="requests at once", ylim=(0, None))
        column[0].legend()


def print_textbook(result: dict[str, Any]) -> None:
    """Print the small example."""
    contiguous, paged = result["contiguous"], result["paged"]
    starts = " and ".join(f"{name} at {start}" for name, start in contiguous["starts"].items())
    holes, free = " + ".join(map(str, contiguous["holes"])), contiguous["external_fragmentation"]
    blocks = " + ".join(map(str, paged["blocks"].values()))
    unused = " + ".join(map(str, paged["unused"].values()))
    fits, all_fit = contiguous["fits"]["C"], all(paged["fits"].values())
    print(f"\n{result['slots']} slots; A, B and C hold 6, 7 and 6 tokens")
    print(f"  contiguous, 20 slots each: {starts}, {contiguous['unused']} slots allocated and unused")
    print(f"    C {'fits' if fits else 'does not fit'}: {free} slots are free, in holes of {holes}")
    print(f"  paged, blocks of 4: {'all fit' if all_fit else 'not all fit'} in {blocks} blocks")
    print(f"    {sum(paged['unused'].values())} slots allocated and unused: {unused}")


def print_workload(result: dict[str, Any]) -> None:
    """Print one workload's table."""
    print(
        f"\n{result['workload']}: {result['num_requests']:,} requests of {result['mean_prompt']:,.0f} + "
        f"{result['mean_output']:,.0f} tokens on average, the longest {result['longest']:,}; maximum length "
        f"{result['max_len']:,}"
    )
    head = ("used", "reserved", "internal", "external", "free", "of allocated")
    print(f"{'':>14}" + "".join(f"{name:>13}" for name in (*head, "at once", "blocked", "recomputed", "steps")))
    shares = ("used", "reserved", "internal_fragmentation", "external_fragmentation", "free", "used_of_allocated")
    for kind, row in result["allocators"].items():
        print(
            f"{kind:>14}"
            + "".join(f"{row[share]:>13.1%}" for share in shares)
            + f"{row['concurrency']:>13.1f}{row['blocked_by_fragmentation']:>13.1%}{row['num_recomputed_tokens']:>13,}"
            + f"{row['num_steps']:>13,}"
        )


def print_throughput(result: dict[str, Any]) -> None:
    """Print what an engine makes of the memory."""
    print(
        f"\n{result['model']}, {result['backend']}, {result['slots']:,} slots: {result['num_requests']} requests of "
        f"{result['workload']}, lengths / {result['scale']} ({result['mean_prompt']:.0f} + {result['mean_output']:.0f} "
        f"tokens on average), maximum length {result['max_len']}, {result['rounds']} rounds"
    )
    print(f"{'':>14}{'at most':>12}{'at once':>12}{'tokens/s':>12}{'preempted':>12}")
    for kind, row in result["allocators"].items():
        print(
            f"{kind:>14}{row['max_num_seqs']:>12}{row['concurrency']:>12.1f}{row['output_tokens_per_s']:>12.1f}"
            f"{row['num_preemptions']:>12}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    count = at_least(1)
    parser.add_argument("--workload", choices=(*WORKLOADS, "all"), default="all")
    parser.add_argument("--requests", type=count, help="only the first so many requests of a workload")
    parser.add_argument("--slots", type=count, default=65536, help="tokens that the pool holds")
    parser.add_argument("--block-size", type=count, default=16, help="slots a block")
    parser.add_argument(
        "--max-len",
        type=count,
        help="slots that a maximum-length reservation takes; longer requests are left out for all allocators; "
        "None: the smallest power of two that holds the workload's longest request",
    )
    parser.add_argument(
        "--rate",
        type=at_least(0, float),
        default=0.0,
        help="decode steps a second: requests come at the workload's own times; 0: all wait from the start",
    )
    parser.add_argument("--seed", type=int, default=0, help="of synthetic lengths and random token ids")
    parser.add_argument("--plot", metavar="FILE", help="draw used share and requests at once over time")
    parser.add_argument("--throughput", action="store_true", help="also serve smollm2; takes minutes")
    engine = parser.add_argument_group("with --throughput, on the first workload")
    engine.add_argument("--backend", default="eager", help="eager or inductor")
    engine.add_argument("--engine-slots", type=count, default=2048, help="tokens that the engine's KV cache holds")
    engine.add_argument("--engine-requests", type=count, default=32, help="requests, evenly spaced in the workload")
    engine.add_argument("--scale", type=count, default=16, help="divides all lengths")
    engine.add_argument("--rounds", type=count, default=2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the small example, a table for each workload and, if asked for, throughput; then one JSON line."""
    args = parse(argv)
    figure = new_figure() if args.plot else None
    names = WORKLOADS if args.workload == "all" else (args.workload,)
    print(f"requests: {SOURCE}, {LICENCE}; synthetic: seed {args.seed}, 16 to 1,024 tokens each, log-uniform")
    arrivals = f"come at their own times, {args.rate:g} steps a second" if args.rate else "all wait from the start"
    print(f"pool: {args.slots:,} slots, blocks of {args.block_size}; requests {arrivals}")
    low, high = PUBLISHED["used_contiguous"]
    print(
        f"published: {low:.1%} to {high:.1%} of the KV cache used in contiguous systems, over "
        f"{PUBLISHED['used_paged_above']:.0%} paged ({PUBLISHED['source']})"
    )
    print(
        "shares of the pool, means while requests are still to be admitted: used = written; reserved = allocated and "
        "written later;\n  internal = allocated and never written; external = free, in holes too small for the head of "
        "the queue; blocked = share of steps\n  in which the head waits though enough slots are free in all; "
        "recomputed = tokens lost to preemption, in all"
    )
    result: dict[str, Any] = {
        "bench": "fragmentation",
        "source": SOURCE,
        "licence": LICENCE,
        "published": PUBLISHED,
        "slots": args.slots,
        "block_size": args.block_size,
        "steps_per_second": args.rate,
        "seed": args.seed,
        "textbook": textbook(),
        "workloads": [],
    }
    print_textbook(result["textbook"])
    runs = {}
    for name in names:
        workload, runs[name] = simulate(name, args)
        result["workloads"].append(workload)
        print_workload(workload)
        sys.stdout.flush()
    if figure is not None:
        draw(figure, runs, args.slots)
        figure.savefig(args.plot)
    if args.throughput:
        result["throughput"] = throughput(names[0], args)
        print_throughput(result["throughput"])
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
