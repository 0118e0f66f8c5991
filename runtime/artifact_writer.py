"""From a running engine's model to an artifact."""

from __future__ import annotations

import logging
import platform
import shutil
import time
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphs.compiled_graph import CompiledGraph
from graphs.sealed_folder import publish, seal
from models.tokenizer import save_tokenizer
from models.weight_plan import WeightPlan, fingerprint, record
from ops.cpu import library
from ops.triton import kernel_cache
from runtime.artifact import (
    GRAPH_KNOBS,
    KERNELS,
    OPS,
    TENSORS,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    report_to_json,
    requirements,
)
from runtime.config import EngineConfig
from runtime.model_loader import AdaptedLoad

logger = logging.getLogger(__name__)


def export(
    path: Path, loaded: AdaptedLoad, graph: CompiledGraph, config: EngineConfig, *, include_weights: bool
) -> None:
    """Write an artifact; see `Engine.export`."""
    start = time.perf_counter()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already: remove it, or give another folder")
    if loaded.source is None and not include_weights:
        raise ValueError("the weights came from memory, where no other process finds them: give include_weights=True")
    plan = None if loaded.source is None else record(loaded.source, loaded.adaptation)
    weights, tensors = _tensors(loaded, graph, plan)
    with publish(path) as folder:
        for file in graph.files:
            shutil.copy(file, folder)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / TENSORS)
        if include_weights:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
        if any(choice.provider == "cpu" for choice in loaded.facts.report.providers.values()):
            shutil.copy(library.library_file(), folder / OPS)
        if any(choice.provider == "triton" for choice in loaded.facts.report.providers.values()):
            logger.info("export: %d compiled kernels of Triton", kernel_cache.save(folder / KERNELS))
        _save_tokenizer(loaded, folder / TOKENIZER)
        artifact = Artifact(
            requires=requirements(loaded.facts.device),
            made_by=_versions(),
            graph_knobs=_graph_knobs(config, loaded),
            knobs=_other_knobs(config),
            facts=_facts(loaded),
            plan=None if plan is None else plan.to_json(),
            folder=None if loaded.source is None else str(loaded.source.folder.resolve()),
            weights=None if loaded.source is None else fingerprint(loaded.source),
            included=include_weights,
            tensors={name: [_name(tensor.dtype), list(tensor.shape)] for name, tensor in weights.items()},
            graph=graph.to_json(),
        )
        seal(folder, asdict(artifact))
    logger.info("export: %s in %.1f s", path, time.perf_counter() - start)


def _tensors(
    loaded: AdaptedLoad, graph: CompiledGraph, plan: WeightPlan | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a checkpoint holds; and the others that the graph uses (rope frequencies, ...), which are few and small."""
    tensors = {name: tensor.detach() for name, tensor in loaded.tensors().items()}
    used = {name: tensors[name] for name in graph.program.state}
    held = plan.targets if plan is not None else dict(loaded.module.named_parameters()).keys() & used.keys()
    return {name: tensors[name] for name in held}, {name: tensor for name, tensor in used.items() if name not in held}


def _graph_knobs(config: EngineConfig, loaded: AdaptedLoad) -> dict[str, Any]:
    knobs: dict[str, Any] = {name: getattr(config, name) for name in GRAPH_KNOBS}
    rules = None if config.rules is None else list(config.rules)
    return {**knobs, "dtype": _name(loaded.facts.dtype), "providers": dict(config.providers), "rules": rules}


def _other_knobs(config: EngineConfig) -> dict[str, Any]:
    names = [field.name for field in fields(config) if field.name not in (*GRAPH_KNOBS, "device", "eager_start")]
    knobs = {name: getattr(config, name) for name in names}
    sizes = knobs["cudagraph_capture_sizes"]
    return {**knobs, "cudagraph_capture_sizes": None if sizes is None else list(sizes)}


def _facts(loaded: AdaptedLoad) -> dict[str, Any]:
    facts = loaded.facts
    return {
        "report": report_to_json(facts.report),
        "eos_token_ids": sorted(facts.eos_token_ids),
        "vocab_size": facts.vocab_size,
        "max_positions": facts.max_positions,
        "has_position_table": facts.has_position_table,
        "weight_bytes": facts.weight_bytes,
    }


def _save_tokenizer(loaded: AdaptedLoad, folder: Path) -> None:
    """The folder's own files; or what a tokenizer of transformers writes. Others must be given to `runtime.load`."""
    tokenizer = loaded.facts.tokenizer
    if tokenizer is None:
        return
    if hasattr(tokenizer, "save_pretrained"):
        save_tokenizer(tokenizer, folder)
    else:
        logger.warning("the tokenizer, a %s, is not in the artifact: give it to runtime.load", type(tokenizer).__name__)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("pagegraph", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[name] = "unknown"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
