"""How long are a decode step and a prefill, how near to what the memory allows, and beside Hugging Face `generate`?

python -m bench.decode_latency --model smollm2,qwen3-0.6b --batch 1,8,32 --prefill 512,2048

All contestants and the bandwidth probe take turns in every round. A ratio, and a fraction of the bandwidth, is the
median over the rounds of what the round's medians give. Nobody gets more than --limit seconds for one case: what is
forecast to take longer runs in fewer rounds, or not at all, and the table says so. Compiling comes on top.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import runtime
from bench.arguments import names, sizes
from bench.contestants import OURS, Entrant, Prompts, Timing, enter, random_prompts
from bench.models import NAMES, resolve_model
from bench.roofline import ReadBandwidth, bytes_per_step
from bench.rounds import affordable, alternate, machine, ratio
from runtime.config import EngineConfig
from runtime.engine import Engine

COMMON_COLUMNS = {"tokens_per_s": ("tokens/s", ".1f"), "over_ours": ("x ours", ".2f"), "rounds": ("rounds", "")}
DECODE_COLUMNS = {"ms": ("ms/step", ".1f"), "bandwidth_fraction": ("of bandwidth", ".0%"), **COMMON_COLUMNS}
PREFILL_COLUMNS = {"seconds": ("seconds", ".3f"), **COMMON_COLUMNS}


def turns(entrants: Mapping[str, Entrant], prompts: Prompts, new_tokens: int, args: Any) -> dict[str, int]:
    """The rounds that each entrant can take part in within args.limit seconds; ours in one at least.

    prompts: all of one length.
    """
    seconds = {
        name: entrant.forecast.generate(len(prompts), len(prompts[0]), new_tokens) for name, entrant in entrants.items()
    }
    rounds = {name: affordable(seconds[name], args.limit, args.rounds) for name in entrants}
    return rounds | {OURS: max(1, rounds[OURS])}


def compete(
    entrants: Mapping[str, Entrant], prompts: Prompts, new_tokens: int, args: Any, bandwidth: ReadBandwidth
) -> tuple[dict[str, list[Timing]], list[float]]:
    """Every entrant's timings by round, empty for those left out, and the bandwidth of each round in bytes a second."""
    rounds = turns(entrants, prompts, new_tokens, args)
    runners: dict[str, Callable[[], Any]] = {"read": bandwidth.sample}
    for name, (contestant, _) in entrants.items():
        if rounds[name]:
            contestant.generate([prompt[:1] for prompt in prompts], min(new_tokens, 3))  # compiles for this batch size
        runners[name] = partial(contestant.generate, prompts, new_tokens)
    results = alternate(runners, rounds | {"read": max(rounds.values())})
    read = results.pop("read")
    return results, read


def decode_row(
    engine: Engine, entrants: Mapping[str, Entrant], batch: int, args: Any, bandwidth: ReadBandwidth
) -> dict[str, Any]:
    """Decode steps of `batch` sequences: time, tokens/s and share of the bandwidth, by entrant (None: left out)."""
    prompts = random_prompts(engine.vocab_size, [args.prompt] * batch)
    before = engine.stats()
    results, read = compete(entrants, prompts, args.steps + 1, args, bandwidth)
    after = engine.stats()
    host = (after.step_seconds.host - before.step_seconds.host) / (after.num_steps - before.num_steps)
    needed = bytes_per_step(engine, batch, args.prompt + args.steps // 2)
    floors = [needed / sample for sample in read]
    steps = {name: [statistics.median(timing.steps) for timing in timings] for name, timings in results.items()}

    def cell(seconds: list[float]) -> dict[str, float]:
        return {
            "ms": statistics.median(seconds) * 1e3,
            "tokens_per_s": batch / statistics.median(seconds),
            "bandwidth_fraction": ratio(floors, seconds),
            "over_ours": ratio(seconds, steps[OURS]),
            "rounds": len(seconds),
        }

    cells = {name: cell(seconds) if seconds else None for name, seconds in steps.items()}
    return {
        "batch": batch,
        "bytes": needed,
        "floor_ms": statistics.median(floors) * 1e3,
        "host_us": host * 1e6,  # a step, all steps of ours counted: schedule, inputs, update and outputs
        "entrants": cells,
    }


def prefill_row(
    engine: Engine, entrants: Mapping[str, Entrant], tokens: int, args: Any, bandwidth: ReadBandwidth
) -> dict[str, Any]:
    """Prefill of one prompt of `tokens` tokens, up to the first token it gives, by entrant (None: left out)."""
    results, _ = compete(entrants, random_prompts(engine.vocab_size, [tokens]), 1, args, bandwidth)
    firsts = {name: [timing.first for timing in timings] for name, timings in results.items()}

    def cell(seconds: list[float]) -> dict[str, float]:
        return {
            "seconds": statistics.median(seconds),
            "tokens_per_s": tokens / statistics.median(seconds),
            "over_ours": ratio(seconds, firsts[OURS]),
            "rounds": len(seconds),
        }

    return {
        "tokens": tokens,
        "entrants": {name: cell(seconds) if seconds else None for name, seconds in firsts.items()},
    }


def measure(model: str, args: argparse.Namespace, bandwidth: ReadBandwidth) -> dict[str, Any]:
    """Compile a model, run all cases and print them, and return the results."""
    folder = resolve_model(model)
    with runtime.compile(folder, backend=args.backend, dtype=args.dtype, device=args.device) as engine:
        dtype = str(engine.dtype).removeprefix("torch.")
        entrants, missing = enter(engine, folder, args.against, args.prompt + args.steps)
        print(f"\n{model}, {dtype}, {args.backend}: decode after {args.prompt} tokens, {args.steps} steps a round")
        for name, reason in missing.items():
            print(f"{name} does not run here: {reason}")
        decode, prefill = [], []
        for batch in args.batch:
            decode.append(decode_row(engine, entrants, batch, args, bandwidth))
            row = decode[-1]
            print(
                f"batch {batch}: {row['bytes'] / 1e6:.0f} MB a step, {row['floor_ms']:.1f} ms at the read bandwidth; "
                f"host {row['host_us']:.0f} us a step"
            )
            print_cells(row["entrants"], DECODE_COLUMNS, args.limit)
        for tokens in args.prefill:
            prefill.append(prefill_row(engine, entrants, tokens, args, bandwidth))
            print(f"prefill of {tokens} tokens")
            print_cells(prefill[-1]["entrants"], PREFILL_COLUMNS, args.limit)
        return {
            "model": model,
            "dtype": dtype,
            "device": str(engine.device),
            "num_recompiles": engine.stats().num_recompiles,
            "missing": missing,
            "decode": decode,
            "prefill": prefill,
        }


def print_cells(cells: Mapping[str, Any], columns: Mapping[str, tuple[str, str]], limit: float) -> None:
    """One line for each entrant; columns: by key of a cell, the heading and the format."""
    print(" " * 12 + "".join(f"{heading:>14}" for heading, _ in columns.values()))
    for name, cell in cells.items():
        if cell is None:
            print(f"  {name:10}  left out: forecast to take over {limit:g} s")
        else:
            print(f"  {name:10}" + "".join(f"{cell[key]:>14{spec}}" for key, (_, spec) in columns.items()))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> None:
    """Print the tables of every model, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=names, default="smollm2", help=f"separated by commas: {NAMES}")
    parser.add_argument("--against", type=names, default="eager,static", help="Hugging Face, by its cache; or ''")
    parser.add_argument("--batch", type=sizes, default="1,8,32", help="batch sizes, separated by commas")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each sequence before decode")
    parser.add_argument("--steps", type=int, default=24, help="decode steps a round")
    parser.add_argument("--prefill", type=sizes, default="512,2048", help="prompt lengths, separated by commas; or ''")
    parser.add_argument("--rounds", type=int, default=4, help="at most")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one contestant in one case")
    parser.add_argument("--backend", default="inductor", help="inductor or eager, of our engine")
    parser.add_argument("--dtype", default="auto", help="of all contestants")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    bandwidth = ReadBandwidth(EngineConfig(device=args.device).resolve_device())
    results = []
    for model in args.model:
        results.append(measure(model, args, bandwidth))
        gc.collect()  # a model's modules refer to each other
    print(
        f"\nread bandwidth over {bandwidth.nbytes / 2**30:.2f} GiB: {bandwidth.best / 1e9:.1f} GB/s at best, "
        f"{bandwidth.median / 1e9:.1f} in the median"
    )
    sys.stdout.flush()
    record = {
        "bench": "decode_latency",
        "machine": machine(),
        "args": vars(args),
        "read_gb_s": bandwidth.best / 1e9,
        "read_gb_s_median": bandwidth.median / 1e9,
        "read_buffer_bytes": bandwidth.nbytes,
        "models": results,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
