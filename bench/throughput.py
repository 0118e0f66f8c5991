"""Output tokens/s of many requests of different lengths at once: our engine, and Hugging Face in static batches.

python -m bench.throughput --model smollm2 --requests 32 --hf-batch 8

The same requests with random token ids, in alternated rounds. Hugging Face gets them as most users would give them: in
batches of --hf-batch, padded on the left, each generated to the longest output in it. Only tokens that were asked for
count. Hugging Face gets no more than --limit seconds: what is forecast to take longer runs in fewer rounds, or not at
all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import runtime
from bench.arguments import names, sizes
from bench.contestants import OURS, Contestant, Entrant, Forecast, Prompts, enter, random_prompts
from bench.fragmentation import serve
from bench.models import NAMES, resolve_model
from bench.rounds import affordable, alternate, machine, ratio, timed
from runtime.engine import Engine


class StaticBatch(NamedTuple):
    """Requests that start and end together."""

    prompts: Prompts
    new_tokens: int  # of the longest output


def static_batches(prompts: Prompts, outputs: Sequence[int], size: int) -> list[StaticBatch]:
    """Batches of `size` requests, in the order given; the last may be smaller."""
    starts = range(0, len(prompts), size)
    return [StaticBatch(prompts[start : start + size], max(outputs[start : start + size])) for start in starts]


def padding(batches: Sequence[StaticBatch], outputs: Sequence[int]) -> float:
    """Share of the generated tokens that nobody asked for: those after the end of a shorter output."""
    generated = sum(len(batch.prompts) * batch.new_tokens for batch in batches)
    return 1 - sum(outputs) / generated


def static_seconds(forecast: Forecast, batches: Sequence[StaticBatch]) -> float:
    """The forecast for all batches, one after the other."""
    return sum(
        forecast.generate(len(batch.prompts), max(map(len, batch.prompts)), batch.new_tokens) for batch in batches
    )


def serve_static(contestant: Contestant, batches: Sequence[StaticBatch]) -> None:
    """Generate one batch after the other."""
    for prompts, new_tokens in batches:
        contestant.generate(prompts, new_tokens)


def serve_engine(engine: Engine, prompts: Prompts, outputs: Sequence[int]) -> None:
    """Give everything to the engine at once and run to the end; nothing is cached from an earlier round."""
    engine.reset_prefix_cache()
    serve(engine, prompts, outputs)


def lengths(count: int, bounds: Sequence[int], rng: random.Random) -> list[int]:
    """`count` lengths, drawn evenly from the two bounds and what is between them."""
    low, high = bounds
    return [rng.randint(low, high) for _ in range(count)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everyone in alternation and return the results."""
    folder = resolve_model(args.model)
    rng = random.Random(args.seed)
    inputs, outputs = lengths(args.requests, args.prompt, rng), lengths(args.requests, args.output, rng)
    with runtime.compile(folder, backend=args.backend, dtype=args.dtype, device=args.device) as engine:
        prompts = random_prompts(engine.vocab_size, inputs, args.seed)
        batches = static_batches(prompts, outputs, args.hf_batch)
        longest = max(max(map(len, batch.prompts)) + batch.new_tokens for batch in batches)
        entrants, missing = enter(engine, folder, args.against, longest)
        rounds, runners = plan(engine, entrants, batches, prompts, outputs, args)
        seconds = alternate(runners, rounds)
        stats = engine.stats()
        return {
            "bench": "throughput",
            "machine": machine(),
            "args": vars(args),
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device),
            "prompt_tokens": sum(inputs),
            "output_tokens": sum(outputs),
            "padding": padding(batches, outputs),
            "num_preemptions": stats.num_preemptions,
            "num_recompiles": stats.num_recompiles,
            "missing": missing,
            "entrants": {name: cell(taken, seconds[OURS], sum(outputs)) for name, taken in seconds.items()},
        }


def plan(
    engine: Engine,
    entrants: dict[str, Entrant],
    batches: Sequence[StaticBatch],
    prompts: Prompts,
    outputs: Sequence[int],
    args: argparse.Namespace,
) -> tuple[dict[str, int], dict[str, Callable[[], float]]]:
    """How many rounds everyone takes part in, and what runs in them. Static batches are warmed up for their sizes."""
    rounds = {OURS: args.rounds}
    runners = {OURS: timed(partial(serve_engine, engine, prompts, outputs))}
    batch_sizes = {len(batch.prompts) for batch in batches}
    for name, (contestant, forecast) in entrants.items():
        if name == OURS:
            continue
        rounds[name] = affordable(static_seconds(forecast, batches), args.limit, args.rounds)
        runners[name] = timed(partial(serve_static, contestant, batches))
        if rounds[name]:
            for size in batch_sizes:
                contestant.generate([[0]] * size, 3)
    return rounds, runners


def cell(seconds: Sequence[float], ours: Sequence[float], output_tokens: int) -> dict[str, Any] | None:
    """One contestant's figures from its seconds by round; None without any."""
    if not seconds:
        return None
    return {
        "seconds": statistics.median(seconds),
        "output_tokens_per_s": output_tokens / statistics.median(seconds),
        "output_tokens_per_s_by_round": [output_tokens / each for each in seconds],
        "ours_over": ratio(seconds, ours),
    }


def main(argv: list[str] | None = None) -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=NAMES)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=sizes, default="16,256", help="shortest and longest prompt, in tokens")
    parser.add_argument("--output", type=sizes, default="16,128", help="shortest and longest output, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and token ids")
    parser.add_argument(
        "--against", type=names, default="eager", help="Hugging Face, by its cache: eager, static; or ''"
    )
    parser.add_argument("--hf-batch", type=int, default=8, help="requests in a batch of Hugging Face's")
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one contestant of Hugging Face's")
    parser.add_argument("--backend", default="inductor", help="inductor or eager, of our engine")
    parser.add_argument("--dtype", default="auto", help="of all contestants")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    result = measure(args)
    print(
        f"{args.model}, {result['dtype']}, {result['machine']['threads']} threads: {args.requests} requests, "
        f"{result['prompt_tokens']} prompt and {result['output_tokens']} output tokens; in static batches of "
        f"{args.hf_batch}, {result['padding']:.0%} of the tokens generated are padding"
    )
    for name, reason in result["missing"].items():
        print(f"{name} does not run here: {reason}")
    print(" " * 12 + "".join(f"{heading:>14}" for heading in ("seconds", "tokens/s", "ours is x", "rounds")))
    for name, row in result["entrants"].items():
        if row is None:
            print(f"  {name:10}  left out: forecast to take over {args.limit:g} s")
        else:
            rate, rounds = row["output_tokens_per_s"], len(row["output_tokens_per_s_by_round"])
            print(f"  {name:10}{row['seconds']:>14.2f}{rate:>14.1f}{row['ours_over']:>14.2f}{rounds:>14}")
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
