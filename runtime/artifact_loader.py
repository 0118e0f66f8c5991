"""From an artifact to a model that can be served: no compiler, no Dynamo, no inductor, no model's code."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import locate
from models.safetensors_files import Safetensors
from models.weight_plan import WeightPlan, fingerprint, replay
from ops.cpu import library
from ops.memory import Spec, allocate
from ops.triton import kernel_cache
from runtime.artifact import (
    GRAPH_KNOBS,
    KERNELS,
    OPS,
    TENSORS,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    ArtifactError,
    ArtifactModel,
    read,
    report_from_json,
)
from runtime.config import DTYPES, EngineConfig
from runtime.loaded_model import ModelFacts
from runtime.metrics import PhaseSeconds

logger = logging.getLogger(__name__)


def load(
    path: Path, model: str | Path | None, tokenizer: Any, knobs: Mapping[str, Any], *, progress: bool
) -> tuple[ArtifactModel, EngineConfig, PhaseSeconds]:
    """Load an artifact, and make the config of its engine; see `runtime.load`."""
    start = time.perf_counter()
    artifact = read(path)
    for name in GRAPH_KNOBS:
        if name in knobs:
            has = artifact.graph_knobs[name]
            raise ValueError(
                f"{name} is part of what was compiled ({has!r} in {path}) and cannot be set: export anew with "
                f"{name}={knobs[name]!r}"
            )
    if "eager_start" in knobs:
        raise ValueError(f"eager_start is of no use: nothing is left to compile in {path}")
    # Without the rules: they have done their work, and to check their names takes the model's code.
    graph_knobs = {name: value for name, value in artifact.graph_knobs.items() if name != "rules"}
    # Of a GPU's artifact "auto": where there is none, `check` says so.
    device_knob = {"device": "cpu"} if artifact.requires["device"]["type"] == "cpu" else {}
    sized = {"num_blocks", "kv_cache_memory_bytes"} & knobs.keys()  # either one says how large the pool is
    others = {name: value for name, value in artifact.knobs.items() if name != "num_blocks" or not sized}
    config = EngineConfig(**{**others, **graph_knobs, **device_knob, **knobs})
    device = config.resolve_device()
    artifact.check(path, device)
    with ThreadPoolExecutor(1) as pool:
        # Beside the weights: importing the tokenizers' library takes as long as reading some hundred MB of them.
        reading = pool.submit(_tokenizer, path, tokenizer)
        tensors = _tensors(path, artifact, model, device, progress)
        if (path / OPS).exists():
            library.load(path / OPS)
        if (path / KERNELS).is_dir():
            kernel_cache.restore(path / KERNELS)
        facts = _facts(artifact, device, reading.result())
    seconds = PhaseSeconds(load=time.perf_counter() - start)
    logger.info("load: %s, %.0f MiB of weights in %.1f s", path, facts.weight_bytes / 2**20, seconds.load)
    return ArtifactModel(path, artifact, facts, tensors), config, seconds


def _tensors(
    path: Path, artifact: Artifact, model: str | Path | None, device: torch.device, progress: bool
) -> dict[str, Tensor]:
    """The tensors that the graph uses: those that no checkpoint holds, and the weights."""
    others = load_file(path / TENSORS, device=str(device))
    if artifact.included:
        if model is not None:
            raise ValueError(f"model={str(model)!r} is of no use: {path} includes its weights")
        return {**others, **load_file(path / WEIGHTS, device=str(device))}  # mapped, not read, on a CPU
    specs = {name: Spec(tuple(shape), getattr(torch, dtype)) for name, (dtype, shape) in artifact.tensors.items()}
    weights = dict(zip(specs, allocate(list(specs.values()), device), strict=True))
    _read_weights(path, artifact, model, weights, progress)
    return {**others, **weights}


def _read_weights(
    path: Path, artifact: Artifact, model: str | Path | None, tensors: Mapping[str, Tensor], progress: bool
) -> None:
    """Load the weights of the folder that the artifact was made from, wherever it lies now, if they are the same."""
    assert artifact.plan is not None
    assert artifact.folder is not None
    folder = Path(artifact.folder) if model is None else locate(model, progress)
    if not folder.is_dir():
        raise ValueError(
            f"{path} was made from the weights in {folder}, which is not there: give runtime.load(..., model=FOLDER)"
        )
    weights = Safetensors(folder)
    with ThreadPoolExecutor(1) as pool:  # the one hashes what the other reads
        found = pool.submit(fingerprint, weights)
        try:
            replay(WeightPlan.from_json(artifact.plan), Safetensors(folder), tensors, progress=progress)
        except ValueError as error:
            raise ArtifactError(path, "weights", artifact.folder, f"{folder}, where {error}", "give model=") from error
        if found.result() != artifact.weights:
            raise ArtifactError(path, "weights' fingerprint", artifact.weights, f"{found.result()} in {folder}")


def _tokenizer(path: Path, given: Any) -> Any:
    if given is not None or not (path / TOKENIZER).is_dir():
        return given
    from models.tokenizer import load_tokenizer

    return load_tokenizer(path / TOKENIZER)


def _facts(artifact: Artifact, device: torch.device, tokenizer: Any) -> ModelFacts:
    facts = dict(artifact.facts)
    report = report_from_json(facts.pop("report"), callable_ops=True)
    facts["eos_token_ids"] = frozenset(facts["eos_token_ids"])
    facts["dtype"] = DTYPES[artifact.graph_knobs["dtype"]]
    return ModelFacts(report=report, device=device, tokenizer=tokenizer, **facts)
