"""What does it cost and save to compile equal layers once? optimize="startup" beside optimize="latency".

python -m bench.layer_sharing --model smollm2

Each is compiled in turn (in this process, into an empty compile cache unless --keep) and exported.
Steps are those of the two artifacts' engines in alternation, as a ratio within each round; greedy tokens must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import runtime
from bench.arguments import at_least, names, sizes
from bench.contestants import Pagegraph, random_prompts
from bench.models import NAMES, resolve_model
from bench.rounds import alternate, machine, ratio
from runtime.config import OPTIMIZE
from runtime.engine import Engine


def exported(folder: Path, optimize: str, target: Path, dtype: str) -> dict[str, Any]:
    """Compile a model and export it; what that took, and what it made."""
    with runtime.compile(folder, optimize=optimize, dtype=dtype, progress=False) as engine:
        engine.export(target)
        compiled = engine.runner.compiled
        assert compiled is not None
        return {
            "compile_s": engine.seconds.compile,
            "units": compiled.runner.program.num_units,
            "calls": len(compiled.runner.program.calls),
            "graph_bytes": sum(file.stat().st_size for file in target.glob("unit-*.pt2")),
            "artifact_bytes": sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        }


def decode_ms(engine: Engine, batch: int, args: argparse.Namespace) -> float:
    """Milliseconds a decode step, the median of a round."""
    prompts = random_prompts(engine.vocab_size, [args.prompt] * batch)
    return statistics.median(Pagegraph(engine).generate(prompts, args.steps + 1).steps) * 1e3


def prefill_ms(engine: Engine, tokens: int) -> float:
    """Milliseconds of one prompt's prefill."""
    return Pagegraph(engine).generate(random_prompts(engine.vocab_size, [tokens]), 1).first * 1e3


def greedy(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    """Tokens of some prompts, cut and mixed."""
    params = runtime.SamplingParams(max_tokens=args.steps, temperature=0.0, ignore_eos=True)
    prompts = random_prompts(engine.vocab_size, [3, args.prompt, 2 * args.prompt])
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, progress=False)]


def measure_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the two on one model."""
    folder = resolve_model(model)
    with tempfile.TemporaryDirectory(prefix="pagegraph-") as scratch:
        if not args.keep:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{scratch}/inductor"
            os.environ["PAGEGRAPH_CACHE_DIR"] = scratch
        artifacts = {optimize: Path(scratch) / optimize for optimize in OPTIMIZE}
        made = {optimize: exported(folder, optimize, target, args.dtype) for optimize, target in artifacts.items()}
        engines = {optimize: runtime.load(target, progress=False) for optimize, target in artifacts.items()}
        tokens = {optimize: greedy(engine, args) for optimize, engine in engines.items()}

        def compared(measure: Callable[[Engine], float]) -> dict[str, float]:
            runs = {optimize: partial(measure, engine) for optimize, engine in engines.items()}
            found = alternate(runs, args.rounds, warm_up=1)
            medians = {f"{optimize}_ms": statistics.median(found[optimize]) for optimize in OPTIMIZE}
            return {**medians, "ratio": ratio(found["startup"], found["latency"])}

        cases = {f"decode, batch {batch}": partial(decode_ms, batch=batch, args=args) for batch in args.batch}
        cases[f"prefill of {args.prefill}"] = partial(prefill_ms, tokens=args.prefill)
        times = {name: compared(measure) for name, measure in cases.items()}
        for engine in engines.values():
            engine.close()
    return {"model": model, "made": made, "equal_tokens": tokens["startup"] == tokens["latency"], "times": times}


def print_model(result: dict[str, Any]) -> None:
    """A table: what was made, and the times."""
    print(f"\n{result['model']}; greedy tokens are {'equal' if result['equal_tokens'] else 'DIFFERENT'}")
    print(f"{'optimize':12}{'compile, s':>12}{'units':>8}{'calls':>8}{'graph, MiB':>12}{'artifact, MiB':>15}")
    for optimize, made in result["made"].items():
        graph, artifact = made["graph_bytes"] / 2**20, made["artifact_bytes"] / 2**20
        counts = f"{made['units']:>8}{made['calls']:>8}"
        print(f"{optimize:12}{made['compile_s']:>12.1f}{counts}{graph:>12.1f}{artifact:>15.1f}")
    print(f"{'':24}{'startup, ms':>14}{'latency, ms':>14}{'ratio':>8}")
    for name, row in result["times"].items():
        print(f"{name:24}{row['startup_ms']:>14.2f}{row['latency_ms']:>14.2f}{row['ratio']:>8.3f}")


def main(argv: list[str] | None = None) -> None:
    """Print tables for each model, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=names, default="smollm2", help=f"separated by commas: {NAMES}")
    parser.add_argument("--batch", type=sizes, default="1,8", help="batch sizes, separated by commas")
    parser.add_argument("--prompt", type=at_least(1), default=64, help="prompt tokens of each sequence before decode")
    parser.add_argument("--steps", type=at_least(2), default=24, help="decode steps a round")
    parser.add_argument(
        "--prefill", type=at_least(1), default=128, help="tokens of the prompt whose prefill is measured"
    )
    parser.add_argument("--rounds", type=at_least(1), default=8, help="rounds that are kept, after one that is not")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--keep", action="store_true", help="use the compile cache, so that compile_s may be of a hit")
    args = parser.parse_args(argv)
    results = [measure_model(model, args) for model in args.model]
    for result in results:
        print_model(result)
    print(json.dumps({"bench": "layer_sharing", "machine": machine(), "args": vars(args), "models": results}))


if __name__ == "__main__":
    main()
