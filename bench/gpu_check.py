"""Does everything run on this GPU, is it right, and how fast is it? One command, one JSON line last.

python -m bench.gpu_check                      # from the root of a checkout; nothing is installed or fetched
python -m bench.gpu_check --device cpu --tiny  # the same lines at tiny sizes, without a GPU

Every op beside its specification in float64, alone and replayed from a CUDA graph with other contents; decode attention
beside a copy and torch's own; engines with and without graphs; a random model in the sizes of Llama 3.1 8B, captured,
checked and timed. What each section finds is noted at once, in a file beside the JSON; see bench/sections.py for what
becomes of one that fails, hangs or crashes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.sections import Results, supervise

NEEDED = ("torch", "triton", "transformers", "numpy", "safetensors", "huggingface_hub", "tqdm", "psutil")
OPS = (
    "paged_attention",
    "write_kv",
    "rope_write_kv",
    "sample",
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "gelu_and_mul",
    "copy_blocks",
    "swap_blocks",
    "linear",
    "grouped_linear",
)
# Seconds that a section may take. The most important come first: the whole check may run out of time.
BUDGETS: dict[str, float] = {
    "environment": 40,
    **{f"op {op}": 100 if op == "paged_attention" else 45 for op in OPS},
    "decode attention": 75,
    "engine, small": 75,
    "engine": 270,
    "prefill attention": 30,
    "sampling": 30,
    "engine, small, compiled": 100,
}


def problems(results: Results) -> dict[str, str]:
    """What did not go well, in a line each, by section."""
    found = {}
    for name, noted in results.items():
        if "error" in noted:
            found[name] = str(noted["error"]).strip().splitlines()[-1]
        elif "skipped" in noted:
            found[name] = f"skipped: {noted['skipped']}"
    return found


def check(args: argparse.Namespace, notes: Path) -> dict[str, Any]:
    """Run the sections and return the record."""
    start = time.monotonic()
    budgets = {name: seconds for name, seconds in BUDGETS.items() if not args.only or name in args.only}
    command = [sys.executable, "-m", "bench.gpu_sections", "--device", args.device, "--file", str(notes)]
    command += ["--tiny"] * args.tiny + ["--"]
    results = supervise(lambda left: [*command, *left], budgets, notes, start + args.deadline, _tell)
    return {
        "bench": "gpu_check",
        "args": {key: value for key, value in vars(args).items() if key != "json"},
        "seconds": round(time.monotonic() - start, 1),
        "problems": problems(results),
        "sections": results,
    }


def _tell(text: str) -> None:
    print(f"** {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print progress, a summary and one JSON line, which also goes to `$OUT/gpu_check.json` and to --json.

    Returns 0, or 1 if a section failed or was skipped.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a try without a GPU")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds after which what is left is skipped")
    parser.add_argument("--only", action="append", choices=list(BUDGETS), metavar="SECTION", help=", ".join(BUDGETS))
    parser.add_argument("--json", type=Path, help="write the record to this file too")
    args = parser.parse_args(argv)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"these packages are not installed, and needed: {', '.join(missing)}", file=sys.stderr)
        return 1
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # for the workers
    out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    with tempfile.TemporaryDirectory() as scratch:
        notes = (out or Path(scratch)) / "gpu_check.jsonl"
        notes.unlink(missing_ok=True)
        record = check(args, notes)
    line = json.dumps(record)
    for file in filter(None, (out and out / "gpu_check.json", args.json)):
        file.write_text(line + "\n", encoding="utf-8")
    for name, problem in record["problems"].items():
        print(f"problem: {name}: {problem}")
    print(f"{len(record['sections']) - len(record['problems'])} of {len(record['sections'])} sections went well")
    print(line, flush=True)
    return 1 if record["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
