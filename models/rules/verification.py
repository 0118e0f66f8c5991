"""What rules compare an original and its rewrite with: random weights, random inputs, and the largest difference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from models.attention import use_attention

VERIFYING = "pagegraph_verifying"
TOLERANCE = 1e-4  # of the largest value, in float32: rounding of another order of additions, and nothing else


def random_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module to `device` with random float32 parameters: the same for every copy of one structure."""
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() else 1.0
        values = torch.empty(parameter.shape).uniform_(-scale, scale, generator=generator)
        memo[id(parameter)] = nn.Parameter(values, False)
    copied = copy.deepcopy(module, memo).float().to(device)
    for child in copied.modules():
        child.__dict__.pop("_pagegraph_recorder", None)
    use_attention(copied, VERIFYING)
    return copied


def materialise(value: Any, generator: torch.Generator, memo: dict[int, Tensor], device: torch.device) -> Any:
    """Replace meta tensors by random ones (integers by zeros) on `device`, the same for the same object."""
    if isinstance(value, Tensor):
        if id(value) not in memo:
            shape, floating = value.shape, value.is_floating_point()
            real = torch.randn(shape, generator=generator) if floating else torch.zeros(shape, dtype=value.dtype)
            memo[id(value)] = real.to(device)
        return memo[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(materialise(item, generator, memo, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(materialise(item, generator, memo, device) for item in value)
    if isinstance(value, dict):
        return {key: materialise(item, generator, memo, device) for key, item in value.items()}
    return value


def difference(expected: Tensor, found: Tensor, tolerance: float = TOLERANCE) -> str | None:
    """Say by how much two results differ, relative to the largest value expected; None if by less than `tolerance`."""
    error = (expected - found).abs().max().item() / max(expected.abs().max().item(), 1e-30)
    return None if error < tolerance else f"verification failed: relative error {error:.1e}"


def _verifying_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(VERIFYING, _verifying_attention)
