"""The worker of bench.gpu_check: checks and measures on one device, section by section.

python -m bench.gpu_sections --device cuda --file notes.jsonl "op rms_norm" "engine"

Everything is made on the device at random; nothing is fetched. With --tiny all sizes are small, so that a CPU runs
every line too: Triton's interpreter for the kernels, imitated graphs, and a clock in the place of events.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import logging
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import runtime
from bench.contestants import random_prompts
from bench.device_time import Repeated
from bench.op_cases import (
    BLOCK_SIZE,
    HOST_READERS,
    TINY,
    Case,
    Maker,
    Sizes,
    cases,
    copy_of,
    fill,
    judge,
    results,
    tensors,
    written,
)
from bench.roofline import CopyBandwidth
from bench.rounds import alternate, machine, ratio
from bench.sections import Note, work
from bench.step_time import GRAPH, decode_times, executors, greedy_arguments
from graphs.compiled_graph import compiler_missing
from graphs.cuda_graph import CudaGraphs, RecordedGraphs
from ops.providers import REGISTRY, choose, select
from ops.schema import SCHEMAS, overload
from runtime.engine import Engine

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "huggingface_hub", "tqdm", "psutil", "gguf")
DATASHEET = 4.8e12  # bytes a second of an H200: what the targets were reckoned with
TARGETS_MS = {1: 4.2, 64: 6.6}  # a step of the 8B model at context 1024, by batch
ATTENTION_TARGET = 0.8  # of the bandwidth, on long contexts
WIDE_TABLE = 131072  # tokens
MOST_LOGS = 30


@dataclass(frozen=True)
class Setup:
    """Where to check, and how large."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        """Whether there are CUDA graphs, and kernels are compiled."""
        return self.device.type == "cuda"

    @property
    def sizes(self) -> Sizes:
        """Of a model of 8 billion parameters, or small ones."""
        return TINY if self.tiny else Sizes()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """To check the ops in; the first is that of what is timed. Triton's interpreter is slow, and one is enough."""
        return (torch.bfloat16, torch.float16) if self.on_gpu else (torch.float32,)

    @cached_property
    def bandwidth(self) -> CopyBandwidth:
        """Of the device, sampled beside what it is compared with."""
        return CopyBandwidth(self.device, nbytes=1 << (20 if self.tiny else 30))

    def checked(self, op: str) -> str:
        """The provider to check: `triton` where there is one, otherwise the one that serves."""
        return select(op, self.device, "triton").provider if "triton" in REGISTRY[op] else self.serving(op)

    def serving(self, op: str) -> str:
        """The provider that an engine takes."""
        return select(op, self.device, None, self.dtypes[0]).provider


# Ops.


def environment(setup: Setup, note: Note) -> None:
    """What the figures are from."""
    note("date", datetime.now(UTC).isoformat(timespec="seconds"))
    note("machine", machine() | {"python": platform.python_version(), "platform": platform.platform()})
    note("packages", {name: _version(name) for name in PACKAGES})
    note("providers", {op: f"{c.provider} ({c.reason})" for op, c in choose(setup.device, {}, setup.dtypes[0]).items()})
    note("inductor", compiler_missing(setup.device) or "its compiler is here")
    if setup.on_gpu:
        properties = torch.cuda.get_device_properties(setup.device)
        note("gpu", {key: str(getattr(properties, key, None)) for key in ("name", "total_memory", "L2_cache_size")})
        note("cuda", torch.version.cuda)
        note("driver", _driver())
    setup.bandwidth.sample()
    samples = sorted(setup.bandwidth.sample() / 1e9 for _ in range(9))
    note("copy_gb_s", {"median": samples[4], "least": samples[0], "most": samples[-1]})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return "present" if find_spec(package) else None


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.strip()


def check_op(op: str, setup: Setup, note: Note) -> None:
    """All cases of an op beside the specification, and, where a graph may contain it, replayed with other contents.

    Raises RuntimeError at the end if any case did not pass.
    """
    provider, failed = setup.checked(op), []
    note("provider", provider)
    note("replayed", HOST_READERS.get(op, "yes"))
    checks = {"": check_once} if op in HOST_READERS else {"": check_once, "replayed: ": check_replay}
    for case, dtype in itertools.product((case for case in cases(setup.sizes) if case.op == op), setup.dtypes):
        name = f"{case.label or 'plain'}, {str(dtype).removeprefix('torch.')}"
        if dtype != setup.dtypes[0] and not case.in_all_dtypes:
            continue
        for what, check in checks.items():
            try:
                verdict = check(case, provider, dtype, setup)
            except Exception as error:
                _synchronize(setup)  # raises if the device is lost: then nothing more is worth a try
                verdict = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            note(what + name, verdict)
            if not verdict["passed"]:
                failed.append(what + name)
    if failed:
        raise RuntimeError(f"{op} by {provider}: not passed: {'; '.join(failed)}")


def check_once(case: Case, provider: str, dtype: torch.dtype, setup: Setup) -> dict[str, Any]:
    """One call, and its error."""
    arguments = case.make(Maker(setup.device, dtype, 1))
    return judge(case, results(case.op, provider, arguments), arguments)


def check_replay(case: Case, provider: str, dtype: torch.dtype, setup: Setup) -> dict[str, Any]:
    """Captured with other lengths, tables and values than it is replayed with."""
    arguments, others = (case.make(Maker(setup.device, dtype, seed)) for seed in (1, 2))
    static, op = copy_of(arguments), overload(case.op, provider)
    kept: list[Any] = []

    def run() -> None:
        kept[:] = [op(*static)]

    with torch.no_grad():
        graph = (CudaGraphs(setup.device) if setup.on_gpu else RecordedGraphs()).capture(run)
        fill(static, others)
        graph.replay()
        _synchronize(setup)
    return judge(case, [*tensors(kept), *written(case.op, static)], others)


# Speed of ops.


def decode_attention(setup: Setup, note: Note) -> None:
    """Bytes of keys and values a second, by batch and context, beside a copy and torch's own attention.

    One pass over several tables, which no cache holds, is one CUDA graph. `varlen` is the provider of that name, which
    gathers the pages first; `varlen, dense` the same attention over keys and values that lie packed already.
    """
    sizes = setup.sizes
    batches, contexts = ((1, 2), (16, 40)) if setup.tiny else ((1, 8, 64, 256), (1024, 8192, 32768))
    bench = AttentionBench(setup, max(batches) * max(contexts))
    wide = 4 * max(contexts) if setup.tiny else WIDE_TABLE
    rows = [(batch, context, 0) for context in contexts for batch in batches]
    rows += [(batch, contexts[0], wide) for batch in batches[::2]]
    fractions = []
    for batch, context, room in rows:
        row = bench.measure(batch, context, max(context, room))
        note(f"batch {batch}, context {context}" + f", table for {room}" * bool(room), row)
        if context == max(contexts):
            fractions.append(row["fraction"])
    note(
        "long_contexts", {"fractions": fractions, "target": ATTENTION_TARGET, "met": min(fractions) >= ATTENTION_TARGET}
    )
    note("geometry", {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "dim": sizes.dim, "block_size": BLOCK_SIZE})


class AttentionBench:
    """A pool of keys and values, and attention over scattered blocks of it."""

    def __init__(self, setup: Setup, tokens: int) -> None:
        self.setup, sizes = setup, setup.sizes
        self.dtype = setup.dtypes[0]
        self.heads, self.kv_heads, self.dim = sizes.heads, sizes.kv_heads, sizes.dim
        self.num_blocks = -(-tokens // BLOCK_SIZE) + 1 + 64 * 4
        shape = (self.num_blocks, BLOCK_SIZE, self.kv_heads, self.dim)
        self.k, self.v = (torch.empty(shape, dtype=self.dtype, device=setup.device).normal_() for _ in "kv")
        self.order = torch.randperm(self.num_blocks - 1, device=setup.device).to(torch.int32) + 1
        self.bytes_per_token = 2 * self.kv_heads * self.dim * self.dtype.itemsize
        # Between two uses of a table so much else is read that no cache holds it.
        self.flush = 1 << (16 if setup.tiny else 28)
        self.dense_limit = 4 << 30  # bytes of keys and values, for those that copy them

    def measure(self, batch: int, context: int, room: int) -> dict[str, Any]:
        """All contestants in turn. room: tokens that the table has columns for."""
        needed = batch * context * self.bytes_per_token
        blocks = batch * -(-context // BLOCK_SIZE)
        count = max(1, min((self.num_blocks - 1) // blocks, -(-self.flush // needed)))
        tables = [self._table(index * blocks, batch, context, room) for index in range(count)]
        lens = torch.full((batch,), context, dtype=torch.int32, device=self.setup.device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.setup.device)
        q = torch.empty(batch, self.heads, self.dim, dtype=self.dtype, device=self.setup.device).normal_()
        row: dict[str, Any] = {"bytes": needed, "tables": count}
        found: dict[str, Repeated] = {}
        calls: dict[str, Callable[[], list[Callable[[], object]]]] = {
            "ours": lambda: self._paged(self.setup.serving("paged_attention"), q, tables, lens, starts)
        }
        if room == context and needed <= self.dense_limit:
            calls["varlen"] = lambda: self._paged(self._varlen(), q, tables, lens, starts)
            calls["varlen, dense"] = lambda: self._dense(q, tables, starts, context)
        for name, make in calls.items():
            try:
                found[name] = Repeated(make(), self.setup.device)
            except Exception as error:  # the others are measured all the same
                if name == "ours":
                    raise
                _synchronize(self.setup)  # raises if the device is lost
                row[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        runners = {name: each.seconds for name, each in found.items()} | {"copy": self.setup.bandwidth.sample}
        taken = alternate(runners, 7, warm_up=1)
        floors = [needed / sample for sample in taken.pop("copy")]
        for name, seconds in taken.items():
            middle = sorted(seconds)[len(seconds) // 2]
            row[name] = {
                "us": middle * 1e6,
                "gb_s": needed / middle / 1e9,
                "fraction": ratio(floors, seconds),
                "not_captured": found[name].not_captured,
            }
        row["fraction"] = row["ours"]["fraction"]
        return row

    def _table(self, first: int, batch: int, context: int, room: int) -> Tensor:
        width = -(-context // BLOCK_SIZE)
        table = torch.zeros(batch, -(-room // BLOCK_SIZE), dtype=torch.int32, device=self.setup.device)
        table[:, :width] = self.order[first : first + batch * width].view(batch, width)
        return table

    def _paged(
        self, provider: str, q: Tensor, tables: Sequence[Tensor], lens: Tensor, starts: Tensor
    ) -> list[Callable[[], object]]:
        op, scale = overload("paged_attention", provider), self.dim**-0.5
        return [partial(op, q, self.k, self.v, table, lens, starts, scale, 0, 0.0, None) for table in tables]

    def _varlen(self) -> str:
        return select("paged_attention", self.setup.device, "varlen", self.dtype).provider

    def _dense(self, q: Tensor, tables: Sequence[Tensor], starts: Tensor, context: int) -> list[Callable[[], object]]:
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {"scale": self.dim**-0.5}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        k_starts = starts * context
        calls: list[Callable[[], object]] = []
        for table in tables:
            k, v = (self._packed(cache, table, context) for cache in (self.k, self.v))
            calls.append(partial(varlen_attn, q, k, v, starts, k_starts, 1, context, **options))
        return calls

    def _packed(self, cache: Tensor, table: Tensor, context: int) -> Tensor:
        """[B * context, Hk, D]."""
        return cache[table.long()].flatten(1, 2)[:, :context].flatten(0, 1).contiguous()


def prefill_attention(setup: Setup, note: Note) -> None:
    """One whole prompt, beside torch's attention on dense keys and values."""
    sizes, dtype = setup.sizes, setup.dtypes[0]
    op, scale = overload("paged_attention", setup.serving("paged_attention")), sizes.dim**-0.5
    for tokens in (24,) if setup.tiny else (2048, 8192):
        maker = Maker(setup.device, dtype, 1)
        width = -(-tokens // BLOCK_SIZE)
        table = maker.on_device(maker.distinct(width, width + 1).view(1, width))
        caches = [maker.normal(width + 1, BLOCK_SIZE, sizes.kv_heads, sizes.dim) for _ in "kv"]
        q = maker.normal(tokens, sizes.heads, sizes.dim)
        lens, starts = maker.on_device([tokens]), maker.on_device([0, tokens])
        dense = [cache[table.long()].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous() for cache in caches]
        sdpa = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
        runners = {
            "ours": Repeated([partial(op, q, *caches, table, lens, starts, scale, 0, 0.0, None)], setup.device),
            "sdpa": Repeated([partial(sdpa, q.transpose(0, 1)[None], *dense)], setup.device),
        }
        flops = 2 * tokens * (tokens + 1) * sizes.heads * sizes.dim  # two products of the causal half
        taken = alternate({name: each.seconds for name, each in runners.items()}, 7, warm_up=1)
        medians = {name: sorted(seconds)[3] for name, seconds in taken.items()}
        note(f"{tokens} tokens", {n: {"us": s * 1e6, "tflop_s": flops / s / 1e12} for n, s in medians.items()})


def sampling(setup: Setup, note: Note) -> None:
    """Sampling alone, with all rows alike, beside torch's argmax of the same logits."""
    rows, vocab, dtype = (3 if setup.tiny else 64), setup.sizes.vocab, setup.dtypes[0]
    op = overload("sample", setup.serving("sample"))
    kinds = {"greedy": (0.0, 0, 1.0, 0.0), "all ids": (1.0, 0, 1.0, 0.0), "top_k": (1.0, 50, 1.0, 0.0)}
    kinds |= {"top_p": (1.0, 0, 0.9, 0.0), "min_p": (1.0, 0, 1.0, 0.05), "all filters": (0.8, 50, 0.9, 0.05)}
    for name, parameters in kinds.items():
        arguments = greedy_arguments(rows, vocab, dtype, setup.device)
        for tensor, value in zip(arguments[1:5], parameters, strict=True):
            tensor.fill_(value)
        repeated = Repeated([partial(op, *arguments)] * 5, setup.device)
        note(name, {"us": repeated.median() * 1e6, "not_captured": repeated.not_captured})
    argmax = Repeated([partial(torch.argmax, arguments[0], -1)] * 5, setup.device)
    note("argmax", {"us": argmax.median() * 1e6, "rows": rows, "vocab": vocab})


# Engines.


def llama(setup: Setup, dtype: torch.dtype, *, layers: int | None = None) -> PreTrainedModel:
    """Random weights in the sizes of Llama 3.1 8B; with `layers`, a small model of that many."""
    sizes = setup.sizes
    small = setup.tiny or layers is not None
    hidden = 64 if setup.tiny else 1024 if small else sizes.hidden
    heads, kv_heads = (4, 2) if setup.tiny else (8, 2) if small else (sizes.heads, sizes.kv_heads)
    config = LlamaConfig(
        vocab_size=200 if setup.tiny else 32000 if small else sizes.vocab,
        hidden_size=hidden,
        intermediate_size=96 if setup.tiny else 2816 if small else sizes.inter,
        num_hidden_layers=2 if setup.tiny else layers or 32,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with setup.device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def small_engine(backend: str, setup: Setup, note: Note) -> None:
    """A small model: do replayed steps, and steps ahead, give what plain ones give? And how long is a step?"""
    knobs = {"device": setup.device, "backend": backend, "max_model_len": 512, "max_num_seqs": 8, "progress": False}
    params = [runtime.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)]
    params += [
        runtime.SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=s, ignore_eos=True) for s in (1, 2)
    ]
    for dtype in (torch.float32,) if setup.tiny else (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = llama(setup, dtype, layers=4)
        prompts = random_prompts(model.config.vocab_size, [100, 7, 33, 1, 64])
        each = [params[index % len(params)] for index in range(len(prompts))]
        tokens: dict[str, list[list[int]]] = {}
        for kind, graphs, ahead in (("graphs", True, True), ("ahead", False, True), ("plain", False, False)):
            if graphs and backend != "eager" and not setup.on_gpu:
                continue  # an imitated graph sees no compiled code
            start = time.perf_counter()
            with runtime.compile(model, cuda_graphs=graphs, async_scheduling=ahead, debug=graphs, **knobs) as engine:
                note(f"{name}, {kind}: start", _start_seconds(engine, start))
                outputs = engine.generate(prompts, each, progress=False)
                tokens[kind] = [output.outputs[0].token_ids for output in outputs]
                stats = engine.stats()
                note(
                    f"{name}, {kind}: steps",
                    {"all": stats.num_steps, "replayed": stats.num_graph_replays, "ahead": stats.num_steps_ahead},
                )
                engine.check_integrity()
                if graphs:
                    note(f"{name}: self-check", check_engine(engine))
                    note(f"{name}: step at batch 1", step_row(setup, engine, 1, 64))
        for kind in tokens.keys() - {"plain"}:
            pairs = zip(tokens[kind], tokens["plain"], strict=True)
            note(f"{name}, {kind}: requests equal to plain", f"{sum(a == b for a, b in pairs)} of {len(prompts)}")
        if dtype == torch.float32:  # bfloat16 may differ: batches are padded, and sums are then in another order
            assert all(found == tokens["plain"] for found in tokens.values()), "replayed or ahead, other tokens came"


def large_engine(setup: Setup, note: Note) -> None:
    """The model of 8 billion parameters: start, self-check, decode steps at context 1024, memory, swap rate."""
    backend = "inductor" if setup.on_gpu else "eager"
    context, batches = (24, (1, 2)) if setup.tiny else (1024, (1, 8, 64, 256))
    start = time.perf_counter()
    model = llama(setup, torch.float32 if setup.tiny else torch.bfloat16)
    _synchronize(setup)
    note("model", {"seconds": time.perf_counter() - start, "parameters": sum(p.numel() for p in model.parameters())})
    knobs: dict[str, Any] = {"max_model_len": 2 * context, "max_num_seqs": max(batches), "progress": False}
    knobs |= {"cuda_graphs": True, "async_scheduling": True}  # as by default, on a GPU
    start = time.perf_counter()
    with runtime.compile(model, device=setup.device, backend=backend, **knobs) as engine:
        del model  # what no rule has merged is still the engine's
        gc.collect()
        note("start", _start_seconds(engine, start))
        graphs = engine.runner.graphs
        assert graphs is not None
        note("graphs", {"captured": graphs.captured, "mib": graphs.nbytes / 2**20})
        note("kv_cache", {"blocks": engine.runner.cache.num_blocks, "gib": engine.runner.cache.nbytes / 2**30})
        note("rules", str(engine.report))
        if setup.on_gpu:
            free, total = torch.cuda.mem_get_info(setup.device)
            note("memory_gib", {"free": free / 2**30, "total": total / 2**30})
        named = executors(engine)
        for batch in batches:
            # All executors at batch 1; above, what serves.
            shown = named if batch == 1 else {GRAPH: named[GRAPH]}
            row = step_row(setup, engine, batch, context, shown)
            note(f"decode, batch {batch}", row)
            ms = row["executors"][GRAPH]["us"] / 1e3
            verdict = {"ms_per_token": ms / batch, "ms": ms, "floor_ms": row["bytes"] / DATASHEET * 1e3}
            if batch in TARGETS_MS:
                verdict |= {"target_ms": TARGETS_MS[batch], "met": ms <= TARGETS_MS[batch]}
            note(f"batch {batch}", verdict)
        note("self-check", check_engine(engine))
        rate = engine.runner.copy_rate()
        per_block = engine.runner.cache.bytes_per_block
        note("swap", {"blocks_s": rate, "gb_s": rate * per_block / 1e9, "bytes_per_block": per_block})
        stats = engine.stats()
        note("recompiles", stats.num_recompiles)
        note("steps", {"all": stats.num_steps, "replayed": stats.num_graph_replays, "ahead": stats.num_steps_ahead})
        note("memory_report", str(engine.memory_report()).splitlines()[:12])
    if setup.on_gpu:
        note("peak_gib", torch.cuda.max_memory_allocated(setup.device) / 2**30)


def step_row(
    setup: Setup, engine: Engine, batch: int, context: int, named: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Decode steps as bench.decode_latency measures them."""
    size = {"steps": 4, "rounds": 2} if setup.tiny else {"steps": 20, "rounds": 3}
    named = executors(engine) if named is None else named
    return decode_times(engine, named, batch, context, **size, bandwidth=setup.bandwidth)


def check_engine(engine: Engine) -> dict[str, Any]:
    """The self-check in short: relative differences of logits from the uncompiled model's."""
    found = engine.self_check()
    return {
        "checks": len(found),
        "replayed": sum(check.replayed for check in found),
        "same_argmax": sum(check.same_argmax for check in found),
        "worst": max(check.max_difference / check.max_logit for check in found),
        "all": [asdict(check) for check in found],
    }


def _start_seconds(engine: Engine, start: float) -> dict[str, float]:
    seconds = {name: value for name, value in asdict(engine.seconds).items() if name in ("load", "compile", "capture")}
    return seconds | {"all": time.perf_counter() - start}


# The worker.


SECTIONS: dict[str, Callable[[Setup, Note], None]] = {
    "environment": environment,
    **{f"op {op}": partial(check_op, op) for op in SCHEMAS},
    "decode attention": decode_attention,
    "engine, small": partial(small_engine, "eager"),
    "engine": large_engine,
    "prefill attention": prefill_attention,
    "sampling": sampling,
    "engine, small, compiled": partial(small_engine, "inductor"),
}


def run_section(section: Callable[[Setup, Note], None], name: str, setup: Setup, note: Note) -> None:
    """Run one section: what it notes is printed as well, warnings and logged errors are noted."""
    print(f"== {name}", flush=True)

    def tell(key: str, value: Any) -> None:
        note(key, value)
        print(f"{name}: {key}: {value}"[:600], flush=True)

    with _noting_logs(tell):
        try:
            section(setup, tell)
        finally:
            gc.collect()
            if setup.on_gpu:
                torch.cuda.empty_cache()


@contextmanager
def _noting_logs(note: Note) -> Iterator[None]:
    """Note what is logged from warnings upwards; an engine logs what failed in a step, and goes on."""
    handler = logging.Handler(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    numbers = itertools.count(1)

    def emit(record: logging.LogRecord) -> None:
        if (number := next(numbers)) <= MOST_LOGS:
            note(f"log {number}", handler.format(record)[-3000:])

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _synchronize(setup: Setup) -> None:
    if setup.on_gpu:
        torch.cuda.synchronize(setup.device)


def _unfit(setup: Setup) -> str | None:
    try:
        _synchronize(setup)
        if setup.on_gpu and torch.cuda.is_current_stream_capturing():
            return "a capture broke, and torch does not get over it"
    except RuntimeError as error:
        return f"the device is lost to this process: {error}".splitlines()[0]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run sections and note what they find; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--file", type=Path, required=True, help="notes are added here")
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    setup = Setup(device, args.tiny)
    sections = {name: partial(run_section, SECTIONS[name], name, setup) for name in args.sections}
    return work(sections, args.sections, args.file, partial(_unfit, setup))


if __name__ == "__main__":
    sys.exit(main())
