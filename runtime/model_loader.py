"""From what the user calls a model to an adapted one with its weights in place."""

from __future__ import annotations

import logging
import pickle
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphs.acceptance import TOLERANCE, acceptance_error
from graphs.background_compile import Job
from graphs.compiled_graph import CompiledGraph
from graphs.kv_cache import usable_memory
from models import skeleton
from models.adapted import Adaptation, AdaptedModel, adapt, named_tensors
from models.checkpoint import Checkpoint, resolve
from models.probe import max_positions
from models.report import UnsupportedModelError, Verdict
from models.weights import load_weights
from ops.memory import huge_page_bytes
from runtime.config import EngineConfig
from runtime.loaded_model import ModelFacts
from runtime.metrics import PhaseSeconds

logger = logging.getLogger(__name__)


@dataclass
class AdaptedLoad:
    """A model that was adapted in this process; see LoadedModel.

    shared: whether some parameters are those of a module in the user's hands. skeleton: the model before it was
    adapted, without weights, pickled, and `cast` what its weights were cast to; for a compilation in another process.
    """

    facts: ModelFacts
    adaptation: Adaptation
    shared: bool
    source: Checkpoint | None
    skeleton: bytes | None
    cast: torch.dtype | None = None
    graph: CompiledGraph | None = None

    @property
    def module(self) -> AdaptedModel:
        """See LoadedModel."""
        return self.adaptation.module

    def background_job(self, config: EngineConfig, key: str | None) -> Job | None:
        """See LoadedModel."""
        if self.skeleton is None or key is None:
            return None
        return Job(
            skeleton=self.skeleton,
            dtype=self.cast,
            key=key,
            device=self.facts.device,
            providers=config.providers,
            rules=config.rules,
            block_size=config.block_size,
            optimize=config.optimize,
        )

    def tensors(self) -> dict[str, Tensor]:
        """See LoadedModel."""
        return dict(named_tensors(self.module))

    def reload(self, source: Checkpoint | Mapping[str, Tensor], *, progress: bool) -> None:
        """See LoadedModel. A user's module keeps its own weights."""
        if self.shared:
            old = self.adaptation.module.state_dict()
            self.adaptation.materialise(self.facts.device, own=True)
            self.adaptation.module.load_state_dict(old)
            self.shared = False
        load_weights(source, self.adaptation.source, self.adaptation.destinations(), progress=progress)
        self.source = source if isinstance(source, Checkpoint) else None


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any,
    config: EngineConfig,
    seconds: PhaseSeconds,
    *,
    verify: bool,
    progress: bool,
) -> AdaptedLoad:
    """Fetch, adapt and load. Times go into `seconds`; raises ValueError for what cannot be served."""
    if isinstance(model, PreTrainedModel):
        return _share(model, tokenizer, config, seconds, verify=verify)
    device = config.resolve_device()  # before anything is fetched
    start = time.perf_counter()
    checkpoint = resolve(model, progress=progress)
    seconds.fetch = time.perf_counter() - start
    logger.info("fetch: %s in %.1f s", checkpoint.folder, seconds.fetch)
    start = time.perf_counter()
    dtype = config.resolve_dtype(checkpoint.dtype, device, checkpoint.nbytes, usable_memory(device))
    built = skeleton.build(checkpoint.config, dtype)
    pickled = _pickled(built, config, device)
    adaptation = adapt(built, device, config.providers, rules=config.rules)
    _judge(adaptation, verify=verify)
    adaptation.materialise(device, own=False)
    load_weights(checkpoint, adaptation.source, adaptation.destinations(), progress=progress)
    tokenizer = checkpoint.load_tokenizer() if tokenizer is None else tokenizer
    generation = checkpoint.generation_config or adaptation.source.generation_config
    facts = _describe(adaptation, dtype, device, tokenizer, generation)
    seconds.load = time.perf_counter() - start
    logger.info("load: %.0f MiB as %s in %.1f s", facts.weight_bytes / 2**20, _name(dtype), seconds.load)
    huge = huge_page_bytes(list(adaptation.module.parameters()))
    if device.type == "cpu" and huge is not None:
        logger.info("load: %.0f MiB of them on huge pages", min(huge, facts.weight_bytes) / 2**20)
    if dtype != checkpoint.dtype and config.dtype == "auto":
        logger.info("this CPU has no %s instructions: running in %s", _name(checkpoint.dtype), _name(dtype))
    return AdaptedLoad(facts, adaptation, False, checkpoint, pickled)


def _share(
    model: PreTrainedModel, tokenizer: Any, config: EngineConfig, seconds: PhaseSeconds, *, verify: bool
) -> AdaptedLoad:
    """Adapt a copy of a module in memory that shares its parameters, but for those that a rule merged."""
    start = time.perf_counter()
    device = model.device if config.device == "auto" else config.resolve_device()
    dtype = model.dtype if config.dtype == "auto" else config.resolve_dtype(model.dtype, device, 0, 0)
    pickled = _pickled(model, config, device)
    adaptation = adapt(skeleton.share(model), device, config.providers, dtype, config.rules)
    _judge(adaptation, verify=verify)
    shared = device == model.device and dtype == model.dtype
    adaptation.materialise(device, own=not shared, dtype=dtype)
    adaptation.copy_from(model.state_dict())
    facts = _describe(adaptation, dtype, device, tokenizer, model.generation_config)
    seconds.load = time.perf_counter() - start
    return AdaptedLoad(facts, adaptation, shared, None, pickled, None if shared else dtype)


def _pickled(model: PreTrainedModel, config: EngineConfig, device: torch.device) -> bytes | None:
    """The model without weights, if a background compilation may want it; None too if it cannot be pickled."""
    if not config.eager_start:
        return None
    if not config.starts_eagerly(device):
        why = (
            "backend='eager' compiles nothing" if config.backend == "eager" else f"on {device.type} steps are captured"
        )
        warnings.warn(f"eager_start is ignored: {why}", stacklevel=6)
        return None
    try:
        return pickle.dumps(skeleton.without_weights(model))
    except Exception as error:  # a class that no other process can import, a lock, a lambda: whatever it holds
        warnings.warn(f"eager_start is ignored: the model cannot be handed to another process ({error})", stacklevel=6)
        return None


def _judge(adaptation: Adaptation, *, verify: bool) -> None:
    """Report what adapting did; test the architecture if asked to, else warn of one that nobody has tested."""
    report = adaptation.report
    logger.info("%s", report)
    if verify:
        try:
            error = acceptance_error(adaptation.source.config, adaptation.device)
        except UnsupportedModelError:
            raise
        except Exception as failure:  # transformers' own: a config that cannot be shrunk, a forward that cannot run
            reason = f"it cannot run on a small copy ({failure})"
            raise UnsupportedModelError(report.architecture, "acceptance test", reason) from failure
        if not error < TOLERANCE:
            reason = f"a small random copy differs from Hugging Face by {error:.1e} of the largest logit"
            raise UnsupportedModelError(report.architecture, "acceptance test", f"{reason}; allowed is {TOLERANCE:.0e}")
        logger.info("%s passes the acceptance test: error %.1e", report.architecture, error)
    elif report.verdict is Verdict.UNPROVEN:
        warnings.warn(
            f"{report.architecture} is not among the tested architectures; runtime.compile(..., verify=True) tests a "
            "small random copy of it against Hugging Face first",
            stacklevel=6,
        )


def _describe(
    adaptation: Adaptation, dtype: torch.dtype, device: torch.device, tokenizer: Any, generation: Any
) -> ModelFacts:
    config = adaptation.source.config.get_text_config()
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    eos = getattr(tokenizer, "eos_token_id", None) if eos is None else eos
    eos_ids = eos if isinstance(eos, Iterable) else () if eos is None else (eos,)
    return ModelFacts(
        report=adaptation.report,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        # Some configs name an EOS beyond their vocabulary: it is never drawn, and cannot be masked.
        eos_token_ids=frozenset(token for token in eos_ids if 0 <= token < config.vocab_size),
        vocab_size=config.vocab_size,
        max_positions=max_positions(config),
        has_position_table=_has_position_table(adaptation.source, max_positions(config)),
        weight_bytes=sum(parameter.nbytes for parameter in adaptation.module.parameters()),
    )


def _has_position_table(model: PreTrainedModel, max_positions: int) -> bool:
    """Whether an embedding other than that of the tokens has a row for each position (and perhaps a few more)."""
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    tokens = model.get_input_embeddings()
    return any(max_positions <= table.num_embeddings < max_positions + 16 for table in tables if table is not tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
