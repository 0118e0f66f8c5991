"""Compile a Hugging Face language model and serve it over a paged KV cache.

engine = runtime.compile("path/or/hub-id")
engine.add_request("The capital of France is", runtime.SamplingParams(max_tokens=16))
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from runtime.engine import Engine


def _check_siblings() -> None:
    """The names of our packages are common: say so if another `ops`, `models` or `graphs` is found before ours."""
    here = Path(__file__).resolve().parent.parent
    for name in ("ops", "models", "graphs"):
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        found = next((Path(place).resolve() for place in places if place), None)
        if found != here / name / "__init__.py":
            raise ImportError(
                f"pagegraph needs its own package {name!r} in {here}, but Python finds {found}: two packages of one "
                "name cannot be used together, so run from elsewhere or rename that one"
            )


_check_siblings()

from runtime.beam_search import BeamSearchParams  # noqa: E402
from runtime.outputs import CompletionOutput, RequestOutput  # noqa: E402
from runtime.sampling import SamplingParams  # noqa: E402
from runtime.suggest import reject_unknown  # noqa: E402

__all__ = ["BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams", "compile", "load"]


def compile(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    backend: str = "inductor",
    max_model_len: int | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.92,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    long_prefill_token_threshold: int = 0,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    scheduling_policy: str = "fcfs",
    preemption: str = "auto",
    swap_space: float = 4,
    seed: int = 0,
    providers: Mapping[str, str] | None = None,
    rules: Collection[str] | None = None,
    num_threads: int | None = None,
    cuda_graphs: bool | str | None = None,
    cudagraph_capture_sizes: Sequence[int] | None = None,
    async_scheduling: bool | None = None,
    debug: bool = False,
    optimize: str = "startup",
    eager_start: bool = False,
    verify: bool = False,
    progress: bool = True,
    **unknown: Any,
) -> Engine:
    """Adapt a model to a paged KV cache, compile it into one graph, and return an engine that serves it.

    Args:
        model: a folder (config.json and *.safetensors), a Hugging Face hub id, "smollm2" (the default model of the
            command line), or a transformers model in memory, which stays as it is.
        tokenizer: any object with `encode(text)` and `decode(ids, skip_special_tokens=...)`; None: the folder's own.
        dtype: "auto" is the weights' own, or float32 on a CPU without instructions for it.
        device: "auto" is the current GPU if there is one; for a model in memory, where it lies.
        backend: "inductor", or "eager" to run the same module uncompiled.
        max_model_len: longest prompt and output together, in tokens. None: what the model and the pool allow.
        block_size: tokens a block of the KV cache holds.
        num_blocks: size of the pool in blocks, the null block included; or kv_cache_memory_bytes: in bytes. None:
            a GPU's gpu_memory_utilization; on a CPU min(gpu_memory_utilization * usable memory - weights,
            max_num_seqs * max_model_len tokens, 4 GiB).
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: token budget of a step; None is 2048.
        long_prefill_token_threshold: most tokens of one prompt in a step; 0: the budget.
        enable_prefix_caching: let requests reuse the blocks of equal prefixes.
        enable_chunked_prefill: let a prompt run in pieces, mixed with other requests.
        scheduling_policy: "fcfs" (first come, first served), or "priority": requests with a smaller
            `add_request(priority=)` come sooner, and the largest is preempted first.
        preemption: what becomes of the KV blocks of a request that has to make room. "swap": they are copied to the
            host's memory and back; "recompute": they are freed, and computed again; "auto": for each preempted request,
            whichever of copying its blocks out and in, at the measured copy rate, and computing them again, at the
            measured prefill rate, is quicker. Without room on the host they are computed again.
        swap_space: most host memory for blocks that are swapped out, in GiB; taken when a request is first swapped out,
            and at most half of what is free at the start. 0: none.
        seed: of the noise of requests that give none.
        providers: op name -> provider, to override the choice by device, e.g. {"sample": "reference"}.
        rules: names of the rewrite rules that may be applied (`print(engine.report)` lists them); None: all. None is
            needed: without any, the model runs as Hugging Face wrote it, over the paged cache.
        num_threads: CPU threads that compute; None: the physical cores that this process may use, by its affinity mask
            and its cgroup's quota. It is PyTorch's number for the whole process (torch.set_num_threads).
        cuda_graphs: replay decode steps from CUDA graphs. None: on a GPU; "lazy": serve at once and capture each batch
            size between steps, once it has been missed. (On a CPU True imitates them, for tests of what uses them.)
        cudagraph_capture_sizes: the batch sizes that are captured; a batch is padded to the next one, and one beyond
            the last runs uncaptured. None: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, then by 8 to 128, and by 16 to
            max_num_seqs or 512.
        async_scheduling: launch a decode step before the tokens of the one before it are known, so that the host's work
            on the one falls into the device's on the other. Outputs are equal. None: on a GPU.
        debug: each replay of a graph checks that its inputs lie where they lay when it was captured.
        optimize: "startup" compiles equal layers once, and calls what it compiled once a layer; "latency" compiles the
            whole model as one unit, which takes several times as long.
        eager_start: serve at once, uncompiled, while another process compiles; the compiled graph takes over between
            two steps. On a CPU, for what is not in the compile cache yet. Tokens are equal in float32; in 16-bit dtypes
            fused ops round less often, so where two tokens nearly tie the compiled graph may draw the other one.
        verify: run the acceptance test on a small random copy of the architecture first (chunked prefill and decode,
            mixed with other requests, against Hugging Face eager), and refuse the model if it differs.
        progress: bars on stderr.

    Raises ValueError for a model that cannot be served (before its weights are read) or a knob out of range.
    """
    from runtime.config import EngineConfig
    from runtime.engine import Engine
    from runtime.metrics import PhaseSeconds
    from runtime.model_loader import load

    known = [name for name in inspect.signature(compile).parameters if name not in ("model", "unknown")]
    reject_unknown(unknown, known, "runtime.compile")
    config = EngineConfig(
        dtype=dtype,
        device=device,
        backend=backend,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=enable_chunked_prefill,
        scheduling_policy=scheduling_policy,
        preemption=preemption,
        swap_space=swap_space,
        seed=seed,
        providers=providers or {},
        rules=rules,
        num_threads=num_threads,
        cuda_graphs=cuda_graphs,
        cudagraph_capture_sizes=cudagraph_capture_sizes,
        async_scheduling=async_scheduling,
        debug=debug,
        optimize=optimize,
        eager_start=eager_start,
    )
    seconds = PhaseSeconds()
    loaded = load(model, tokenizer, config, seconds, verify=verify, progress=progress)
    return Engine(loaded, config, seconds, progress=progress)


def load(
    path: str | Path,
    *,
    model: str | Path | None = None,
    tokenizer: Any = None,
    progress: bool = True,
    **knobs: Any,
) -> Engine:
    """Serve an artifact that `Engine.export` has made. Nothing is compiled, and the model's code is not imported.

    An artifact is native code, which this runs: load only what you would run as a program. Every byte is compared with
    the manifest's hashes first, which finds damage, but not who made it.

    Args:
        path: the artifact's folder.
        model: where the weights lie now, if not where they lay: as in `compile`, but for models in memory.
        tokenizer: as in `compile`; None: the one in the artifact.
        progress: bars on stderr.
        knobs: those of `compile` that the graph does not follow from, such as num_blocks, max_model_len or
            max_num_seqs; those not given are as the exporting engine had them.

    Raises ValueError, naming the field, what was expected and what is here, for an artifact that is damaged, made for
    another version of torch, another device or instruction set, or for other weights; and for a knob that the compiled
    graph follows from (dtype, block_size, ...).
    """
    from runtime.artifact_loader import load as load_artifact
    from runtime.config import EngineConfig
    from runtime.engine import Engine

    reject_unknown(knobs, [*EngineConfig.__dataclass_fields__], "runtime.load")
    loaded, config, seconds = load_artifact(Path(path), model, tokenizer, knobs, progress=progress)
    return Engine(loaded, config, seconds, progress=progress)
