"""Models without weights: built from a config, or copied in structure from a module in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

ModelT = TypeVar("ModelT", bound=nn.Module)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are built inside register meta parameters, while their buffers are computed for real.

    A model that is built on the meta device as a whole would lose the values of the buffers that no checkpoint
    holds, such as rope frequencies. The weights that constructors allocate are never touched, so they cost nothing.
    Side effect: replaces `nn.Module.register_parameter` until the block ends; not to be used from two threads.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the causal language model of `config` in `dtype`, with meta parameters and real buffers on the CPU.

    The config is copied, not kept. Raises ValueError if transformers has no causal language model for it.
    """
    with parameters_on_meta(), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    return model.eval()


def share(model: ModelT) -> ModelT:
    """Copy a module's structure around the very same parameters and buffers; `model` itself stays as it is."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()


def without_weights(model: ModelT) -> ModelT:
    """Copy a module with its parameters on the meta device, ties kept, and its buffers as they are."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def on_meta(model: ModelT) -> ModelT:
    """Copy a module's structure with every parameter and buffer on the meta device, ties kept."""
    memo: dict[int, object] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo).eval()
