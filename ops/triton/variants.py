"""What it takes to compile a kernel ahead of time, without a GPU: used by tests that hold registers and spills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel as it is launched in production.

    name: unique, e.g. "decode bf16 D128 G4". kernel: the `@triton.jit` function. signature: argument name -> Triton
    type ("*bf16", "i32", "fp32"; "constexpr" for those in constexprs). aligned: names of the pointers and integers that
    are divisible by 16. num_warps, num_stages: of the launch. archs: of those that the tests compile for,
    the ones it is launched on (80 is compute capability 8.0).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[int, ...] = (80, 90, 100)
    options: Mapping[str, Any] = field(default_factory=dict)
