"""What does each rewrite rule save? An engine with all rules beside one with all rules but one, in alternation.

python -m bench.rules --model smollm2,qwen3-0.6b --rules merge_qkv,merge_gate_up

Savings are paired: the difference within a round, then the median over the rounds, with its quartiles. A rule's
saving includes that of the rules which build on what it puts in. Rules that apply nowhere in a model are skipped. An
engine is compiled for each of the others, which takes most of the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import runtime
from bench.arguments import at_least, names, sizes
from bench.contestants import Pagegraph, random_prompts
from bench.models import NAMES, resolve_model
from bench.rounds import alternate, machine
from graphs.rules import GRAPH_RULES
from models.rules import RULES
from runtime.engine import Engine

ALL = "all rules"
KNOWN = (*RULES, *GRAPH_RULES)


def saving(with_rule: Sequence[float], without: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of what the rule saves, from the times of the same rounds, in their unit."""
    differences = [without_it - with_it for with_it, without_it in zip(with_rule, without, strict=True)]
    low, median, high = statistics.quantiles(differences, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "of_time": median / statistics.median(without)}


def decode_ms_per_token(engine: Engine, batch: int, args: argparse.Namespace) -> float:
    """Milliseconds a token, the median of a round of decode steps."""
    prompts = random_prompts(engine.vocab_size, [args.prompt] * batch)
    return statistics.median(Pagegraph(engine).generate(prompts, args.steps + 1).steps) * 1e3 / batch


def prefill_ms(engine: Engine, tokens: int) -> float:
    """Milliseconds of one prompt's prefill."""
    return Pagegraph(engine).generate(random_prompts(engine.vocab_size, [tokens]), 1).first * 1e3


def compare(whole: Engine, reduced: Engine, rule: str, args: argparse.Namespace) -> dict[str, Any]:
    """What `rule` saves, which `reduced` lacks, in every case."""
    engines = {ALL: whole, rule: reduced}

    def saved(measure: Callable[[Engine], float]) -> dict[str, float]:
        results = alternate(
            {name: partial(measure, engine) for name, engine in engines.items()}, args.rounds, warm_up=1
        )
        return saving(results[ALL], results[rule])

    return {
        "rule": rule,
        "modules": whole.report.applied(rule),
        "decode": {batch: saved(partial(decode_ms_per_token, batch=batch, args=args)) for batch in args.batch},
        "prefill": saved(partial(prefill_ms, tokens=args.prefill)),
    }


def measure_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare all rules of `args.rules` on one model, printing each as it is known."""
    folder = resolve_model(model)
    rows = []
    with compiled(folder, KNOWN, args) as whole:
        dtype = str(whole.dtype).removeprefix("torch.")
        print(f"\n{model}, {dtype}, {args.backend}; saved by a rule: median [quartiles] of {args.rounds} rounds")
        heads = [*(f"batch {batch}, ms/token" for batch in args.batch), f"prefill of {args.prefill}, ms"]
        print(f"{'':24}{'modules':>8}" + "".join(f"{head:>36}" for head in heads))
        for rule in args.rules or KNOWN:
            if not whole.report.applied(rule):
                print(f"{rule:24}{0:>8}")
                rows.append({"rule": rule, "modules": 0})
                continue
            with compiled(folder, [name for name in KNOWN if name != rule], args) as reduced:
                rows.append(compare(whole, reduced, rule, args))
            print_row(rows[-1])
            gc.collect()  # a model's modules refer to each other
    return {"model": model, "dtype": dtype, "rules": rows}


def compiled(folder: Path, rules: Collection[str], args: argparse.Namespace) -> Engine:
    """An engine with some of the rules."""
    return runtime.compile(folder, rules=rules, backend=args.backend, dtype=args.dtype, device=args.device)


def print_row(row: dict[str, Any]) -> None:
    """One line for a rule."""
    cells = [*row["decode"].values(), row["prefill"]]
    shown = [f"{cell['median']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}] = {cell['of_time']:.1%}" for cell in cells]
    print(f"{row['rule']:24}{row['modules']:>8}" + "".join(f"{text:>36}" for text in shown))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> None:
    """Print a table for each model, then one JSON line. Raises ValueError for an unknown rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=names, default="smollm2,qwen3-0.6b", help=f"separated by commas: {NAMES}")
    parser.add_argument("--rules", type=names, help=f"separated by commas, of {', '.join(KNOWN)}; None: all")
    parser.add_argument("--batch", type=sizes, default="1", help="batch sizes, separated by commas")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each sequence before decode")
    parser.add_argument("--steps", type=int, default=24, help="decode steps a round")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt whose prefill is measured")
    parser.add_argument("--rounds", type=at_least(2), default=8, help="rounds that are kept, after one that is not")
    parser.add_argument("--backend", default="inductor", help="inductor or eager")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    if unknown := set(args.rules or ()) - set(KNOWN):
        raise ValueError(f"--rules {','.join(sorted(unknown))} is unknown; these are known: {', '.join(KNOWN)}")
    results = [measure_model(model, args) for model in args.model]
    print(json.dumps({"bench": "rules", "machine": machine(), "args": vars(args), "models": results}))


if __name__ == "__main__":
    main()
