"""`pagegraph generate`: text to stdout as it comes, from a model or an artifact; where the time went to stderr."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runtime

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.memory_report import MemoryReport

_PICTURES = (".png", ".svg", ".pdf")
_KNOBS = ("backend", "dtype", "device", "optimize", "eager_start", "max_model_len")


def generate(args: argparse.Namespace) -> None:
    """Run the command. `model` and those of `_KNOBS` are attributes of `args` only if they were given.

    Raises ValueError and OSError for a user's error, most of them before anything is loaded or compiled.
    """
    start = time.perf_counter()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("an empty prompt: give some text to continue")
    if args.memory_report is not None:
        _check_report_file(args.memory_report)
    params = runtime.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
    )
    knobs = {name: value for name, value in vars(args).items() if name in _KNOBS}
    with _compile(args, knobs) if args.artifact is None else _load(args, knobs) as engine:
        given = _chat(engine.tokenizer, prompt) if args.chat else prompt
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
        goes_on = engine.keep_compiling()
        if not args.quiet:
            print(_summary(engine, time.perf_counter() - start, first), file=sys.stderr)
            if goes_on:
                print("the compiler goes on in the background, so that the next start finds its graph", file=sys.stderr)


def _compile(args: argparse.Namespace, knobs: dict[str, Any]) -> Engine:
    """The engine of --model, which serves uncompiled at first unless told otherwise.

    A mistake shows before anything is fetched, loaded or compiled.
    """
    import runtime.engine  # with torch: seconds that belong to no phase
    from models.checkpoint import resolve
    from models.default_model import NAME
    from runtime.config import EngineConfig

    config = EngineConfig(**knobs)
    if config.resolve_device().type == "cpu" and config.backend == "inductor":
        knobs = {"eager_start": True, **knobs}
    fetching = time.perf_counter()
    checkpoint = resolve(vars(args).get("model", NAME), progress=not args.quiet)
    fetched = time.perf_counter() - fetching
    tokenizer = checkpoint.load_tokenizer()
    _check_tokenizer(tokenizer, checkpoint.folder, args.chat)
    engine = runtime.compile(checkpoint.folder, tokenizer=tokenizer, progress=not args.quiet, **knobs)
    engine.seconds.fetch += fetched
    return engine


def _load(args: argparse.Namespace, knobs: dict[str, Any]) -> Engine:
    """The engine of --artifact, which refuses knobs that it has settled. --model says where its weights lie now."""
    engine = runtime.load(args.artifact, model=vars(args).get("model"), progress=not args.quiet, **knobs)
    try:
        _check_tokenizer(engine.tokenizer, args.artifact, args.chat)
    except ValueError:
        engine.close()
        raise
    return engine


def _check_tokenizer(tokenizer: Any, folder: Path, chat: bool) -> None:
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: put its files (tokenizer.json, ...) into that folder")
    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat needs a model whose tokenizer has a chat template; this one has none")


def _chat(tokenizer: Any, prompt: str) -> list[int]:
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


def _summary(engine: Engine, total: float, first: float | None) -> str:
    """Tokens a second, and where the seconds since the process began its work went."""
    seconds, stats = engine.seconds, engine.stats()
    waited = ("compile",) if engine.switched_at_step is None else ()  # else it went on beside the steps
    phases = {name: getattr(seconds, name) for name in ("fetch", "load", *waited, "prefill", "decode")}
    if seconds.capture:
        phases["capture"] = seconds.capture
    phases["other"] = total - sum(phases.values())
    decoded = max(0, stats.num_output_tokens - 1)
    rate = f"{decoded / seconds.decode:.1f} tokens/s" if decoded else "one token only"
    lines = [f"{stats.num_output_tokens} tokens, decode {rate}, {stats.num_prompt_tokens} prompt tokens"]
    lines.append(", ".join(f"{name} {value:.1f} s" for name, value in phases.items()))
    if engine.switched_at_step is not None:
        lines.append(f"compiled graph from step {engine.switched_at_step} on, after {seconds.eager:.1f} s")
    if first is not None:
        lines.append(f"first text after {first:.1f} s of {total:.1f} s")
    return "\n".join(lines)
