"""A model with its weights in place, and what the engine has to know beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from graphs.background_compile import Job
from graphs.compiled_graph import CompiledGraph
from models.report import RewriteReport
from runtime.config import EngineConfig

if TYPE_CHECKING:  # what is loaded from an artifact has neither
    from models.adapted import AdaptedModel
    from models.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model, wherever it came from.

    has_position_table: whether positions are learned: beyond max_positions there is nothing to look up.
    """

    report: RewriteReport
    dtype: torch.dtype
    device: torch.device
    tokenizer: Any
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_positions: int
    has_position_table: bool
    weight_bytes: int


class LoadedModel(Protocol):
    """A model that can be run."""

    facts: ModelFacts

    @property
    def module(self) -> AdaptedModel:
        """The adapted module. Raises ValueError if there is none, as in an artifact."""

    @property
    def graph(self) -> CompiledGraph | None:
        """The graph that came with the model."""

    def background_job(self, config: EngineConfig, key: str | None) -> Job | None:
        """What another process needs to compile the graph of that key; None if none is to, or can."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that the compiled graph may use, by name, as they are now."""

    def reload(self, source: Checkpoint | Mapping[str, Tensor], *, progress: bool) -> None:
        """Replace all weights. Raises ValueError before anything has changed."""
