"""How long are a decode step and a prefill, how near to what the memory allows, and beside Hugging Face `generate`?

python -m bench.decode_latency --model smollm2,qwen3-0.6b --batch 1,8,32 --prefill 512,2048
pagegraph bench decode --plot decode.png

First our own decode steps, uncompiled, compiled and, on a GPU, replayed, by batch size (on a GPU a bucket) and context.
The host's part is by the clock. The device's is the forward pass with sampling: between CUDA events, or on a CPU by the
clock. Sampling is a part of it, and timed again alone. Where the engine runs ahead, the host's part falls into the
device's. Then decode and prefill beside Hugging Face.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runtime
from bench.arguments import at_least, names, sizes
from bench.contestants import OURS, Entrant, Forecast, Prompts, Timing, enter, random_prompts
from bench.fragmentation import new_figure
from bench.models import NAMES, resolve_model
from bench.roofline import Bandwidth, bandwidth_of, bytes_per_step
from bench.rounds import affordable, alternate, machine, ratio
from bench.step_time import HOST, decode_times, executors, no_room
from runtime.config import EngineConfig
from runtime.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMON_COLUMNS = {"tokens_per_s": ("tokens/s", ".1f"), "over_ours": ("x ours", ".2f"), "rounds": ("rounds", "")}
DECODE_COLUMNS = {"ms": ("ms/step", ".1f"), "bandwidth_fraction": ("of bandwidth", ".0%"), **COMMON_COLUMNS}
PREFILL_COLUMNS = {"seconds": ("seconds", ".3f"), **COMMON_COLUMNS}


STEP_COLUMNS = {
    "us": ("us/step", ".0f"),
    "device_us": ("device", ".0f"),
    "host_us": ("host", ".0f"),
    "fraction": ("of bandwidth", ".0%"),
    "device_fraction": ("of it, device", ".0%"),
}


def step_rows(engine: Engine, forecast: Forecast, args: Any, bandwidth: Bandwidth) -> list[dict[str, Any]]:
    """Our decode steps by batch size and context, printed as they come; what is left out says why.

    With graphs there is a row for every bucket too, at the first context.
    """
    named, rows = executors(engine), []
    buckets = [] if engine.runner.graphs is None else engine.runner.graphs.captured
    for batch in sorted({*args.batch, *buckets}):
        for context in args.context if batch in args.batch else args.context[:1]:
            row: dict[str, Any] = {"batch": batch, "context": context}
            turns = len(named) * (args.rounds + 1)
            seconds = forecast.forward(batch * context) + turns * (args.steps + 4) * forecast.forward(batch)
            row["left_out"] = no_room(engine, batch, context, args.steps)
            if row["left_out"] is None and not affordable(seconds, args.limit, 1):
                row["left_out"] = f"forecast to take over {args.limit:g} s"
            if row["left_out"] is None:
                size = {"steps": args.steps, "rounds": args.rounds, "bandwidth": bandwidth}
                row |= decode_times(engine, named, batch, context, **size)
            print_step_row(row)
            rows.append(row)
    return rows


def print_step_row(row: dict[str, Any]) -> None:
    """A table of the executors, and where the host's time goes."""
    title = f"decode step, batch {row['batch']}, context {row['context']}"
    if row["left_out"] is not None:
        print(f"{title}: left out: {row['left_out']}")
        return
    print(
        f"{title}: {row['bytes'] / 1e6:.0f} MB, {row['floor_us']:.0f} us at the bandwidth; sampling alone "
        f"{row['sample_us']:.0f} us"
    )
    columns = STEP_COLUMNS | {name: (name, ".0f") for name in HOST}
    cells = {name: cell | cell["phases_us"] for name, cell in row["executors"].items()}
    print_cells(cells, columns, 0)


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
    entrants: Mapping[str, Entrant], prompts: Prompts, new_tokens: int, args: Any, bandwidth: Bandwidth
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
    engine: Engine, entrants: Mapping[str, Entrant], batch: int, args: Any, bandwidth: Bandwidth
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
    engine: Engine, entrants: Mapping[str, Entrant], tokens: int, args: Any, bandwidth: Bandwidth
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


def measure(model: str, args: argparse.Namespace, bandwidth: Bandwidth) -> dict[str, Any]:
    """Compile a model, run all cases and print them, and return the results."""
    folder = resolve_model(model)
    with runtime.compile(folder, backend=args.backend, dtype=args.dtype, device=args.device) as engine:
        dtype = str(engine.dtype).removeprefix("torch.")
        entrants, missing = enter(engine, folder, args.against, args.prompt + args.steps)
        print(f"\n{model}, {dtype}, {args.backend}: decode after {args.prompt} tokens, {args.steps} steps a round")
        for name, reason in missing.items():
            print(f"{name} does not run here: {reason}")
        steps = step_rows(engine, entrants[OURS].forecast, args, bandwidth)
        decode, prefill = [], []
        for batch in args.batch:
            decode.append(decode_row(engine, entrants, batch, args, bandwidth))
            row = decode[-1]
            print(
                f"batch {batch}: {row['bytes'] / 1e6:.0f} MB a step, {row['floor_ms']:.1f} ms at the bandwidth; "
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
            "capture_s": engine.seconds.capture,
            "steps": steps,
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


def draw(figure: Figure, models: list[dict[str, Any]]) -> None:
    """For each model, microseconds a step over the batch and over the context, by executor, above the floor."""
    figure.set_size_inches(10, 4 * len(models))
    for (over_batch, over_context), model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        rows = [row for row in model["steps"] if row["left_out"] is None]
        if not rows:
            continue
        first, smallest = rows[0]["context"], rows[0]["batch"]
        at_first = [row for row in rows if row["context"] == first]
        at_smallest = [row for row in rows if row["batch"] == smallest]
        for axis, along, shown in ((over_batch, "batch", at_first), (over_context, "context", at_smallest)):
            places = [row[along] for row in shown]
            for name in shown[0]["executors"]:
                axis.plot(places, [row["executors"][name]["us"] for row in shown], marker="o", label=name)
            axis.plot(places, [row["floor_us"] for row in shown], color="gray", linestyle=":", label="floor")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set(xlabel=along, xticks=places, xticklabels=places, ylabel="us a step")
            axis.legend()
        over_batch.set(title=f"{model['model']}, context {first}")
        over_context.set(title=f"{model['model']}, batch {smallest}")


def main(argv: list[str] | None = None) -> None:
    """Print the tables of every model, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=names, default="smollm2", help=f"separated by commas: {NAMES}")
    parser.add_argument("--against", type=names, default="eager,static", help="Hugging Face, by its cache; or ''")
    parser.add_argument("--batch", type=sizes, default="1,8,32", help="batch sizes, separated by commas")
    parser.add_argument("--context", type=sizes, default="128,1024,4096", help="of our own steps; or ''")
    parser.add_argument("--prompt", type=at_least(1), default=64, help="prompt tokens of each sequence before decode")
    parser.add_argument("--steps", type=at_least(1), default=24, help="decode steps a round")
    parser.add_argument("--prefill", type=sizes, default="512,2048", help="prompt lengths, separated by commas; or ''")
    parser.add_argument("--rounds", type=at_least(1), default=4, help="at most")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one contestant in one case")
    parser.add_argument("--backend", default="inductor", help="inductor or eager, of our engine")
    parser.add_argument("--dtype", default="auto", help="of all contestants")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", metavar="FILE", help="draw our own steps (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.plot and not Path(args.plot).resolve().parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no such folder")
    try:
        device = EngineConfig(device=args.device).resolve_device()
    except ValueError as error:
        parser.error(str(error))
    figure = new_figure() if args.plot else None
    bandwidth = bandwidth_of(device)
    results = []
    for model in args.model:
        results.append(measure(model, args, bandwidth))
        gc.collect()  # a model's modules refer to each other
    print(
        f"\nbandwidth ({bandwidth.label}) over {bandwidth.nbytes / 2**30:.2f} GiB: {bandwidth.best / 1e9:.1f} GB/s at "
        f"best, {bandwidth.median / 1e9:.1f} in the median"
    )
    if figure is not None:
        draw(figure, results)
        figure.savefig(args.plot)
    sys.stdout.flush()
    record = {
        "bench": "decode_latency",
        "machine": machine(),
        "args": vars(args),
        "bandwidth": bandwidth.label,
        "gb_s": bandwidth.best / 1e9,
        "gb_s_median": bandwidth.median / 1e9,
        "bandwidth_bytes": bandwidth.nbytes,
        "models": results,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
