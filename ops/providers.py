"""Which implementation of an op an engine uses: a table of providers, and the choice among them.

There is no current provider: `select` is asked per engine and op, and the overload it returns goes into that engine's
graph. A new provider is one `schema.define` and one `register`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ops import reference
from ops.sample import sample
from ops.schema import SCHEMAS, define, overload


@dataclass(frozen=True)
class Provider:
    """What one provider of an op can serve.

    devices: device types ("cpu", "cuda"), None for every one. dtypes: of the activations, None for every one.
    priority: the highest of those that serve a device is chosen; one below 0 only when asked for. prepare: makes the
    overload callable when the provider is first about to be chosen (it may run a compiler), and returns why that cannot
    be, or None.
    """

    devices: frozenset[str] | None
    priority: int
    dtypes: frozenset[torch.dtype] | None = None
    prepare: Callable[[], str | None] | None = None

    def serves(self, device: torch.device, dtype: torch.dtype | None) -> bool:
        """Tell whether it runs on the device, and with the dtype if one is named."""
        on_device = self.devices is None or device.type in self.devices
        return on_device and (dtype is None or self.dtypes is None or dtype in self.dtypes)


@dataclass(frozen=True)
class Choice:
    """The provider chosen for an op, why, and what to call."""

    op: str
    provider: str
    reason: str
    overload: torch._ops.OpOverload


REGISTRY: dict[str, dict[str, Provider]] = {op: {} for op in SCHEMAS}


def register(op: str, name: str, provider: Provider) -> None:
    """Add a provider whose overload is defined. Side effect: REGISTRY, seen by later calls of `select` only."""
    REGISTRY[op][name] = provider


def select(op: str, device: torch.device, override: str | None = None, dtype: torch.dtype | None = None) -> Choice:
    """Choose the provider of `op` for a device: the one named by `override`, else the highest priority that serves it.

    Args:
        dtype: of the activations; None leaves dtype constraints out of the choice.

    Raises ValueError if the op or the override is unknown, or if the override does not serve device and dtype.
    """
    if op not in REGISTRY:
        raise ValueError(f"unknown op {op!r}; the ops are {sorted(REGISTRY)}")
    providers = REGISTRY[op]
    usable = [name for name, provider in providers.items() if provider.serves(device, dtype)]
    choosable = [name for name in usable if providers[name].priority >= 0]
    on = device.type if dtype is None else f"{device.type} with {str(dtype).removeprefix('torch.')}"
    if override is None:
        name, reason = _first_prepared(op, choosable)
        return Choice(op, name, reason or f"highest priority on {on} among {sorted(choosable)}", overload(op, name))
    if override not in providers:
        raise ValueError(f"unknown provider {override!r} of {op}; on {on} there are {sorted(usable)}")
    if override not in usable:
        raise ValueError(f"provider {override!r} of {op} does not serve {on}; these do: {sorted(usable)}")
    prepare = providers[override].prepare
    if prepare is not None and (problem := prepare()) is not None:
        raise ValueError(f"provider {override!r} of {op} cannot be used here: {problem}")
    return Choice(op, override, "asked for", overload(op, override))


def _first_prepared(op: str, names: list[str]) -> tuple[str, str | None]:
    """The provider of highest priority that can be used, and what was wrong with those above it."""
    problems: list[str] = []
    for name in sorted(names, key=lambda name: -REGISTRY[op][name].priority):
        prepare = REGISTRY[op][name].prepare
        problem = prepare() if prepare is not None else None
        if problem is None:
            return name, "; ".join(problems) or None
        problems.append(f"{name} cannot be used here: {problem.splitlines()[0]}")
    raise AssertionError(f"no provider of {op}: the reference serves everything")


def choose(device: torch.device, overrides: Mapping[str, str], dtype: torch.dtype | None = None) -> dict[str, Choice]:
    """Choose a provider for every op; `overrides` names some by op. Raises ValueError as `select` does."""
    if unknown := sorted(set(overrides) - set(REGISTRY)):
        raise ValueError(f"unknown op {unknown[0]!r}; the ops are {sorted(REGISTRY)}")
    return {op: select(op, device, overrides.get(op), dtype) for op in REGISTRY}


_REFERENCE: dict[str, Callable[..., Any]] = {
    "paged_attention": reference.paged_attention,
    "write_kv": reference.write_kv,
    "copy_blocks": reference.copy_blocks,
    "swap_blocks": reference.swap_blocks,
    "sample": sample,
    "linear": reference.linear,
    "grouped_linear": reference.grouped_linear,
    "rms_norm": reference.rms_norm,
    "add_rms_norm": reference.add_rms_norm,
    "silu_and_mul": reference.silu_and_mul,
    "gelu_and_mul": reference.gelu_and_mul,
    "rope_write_kv": reference.rope_write_kv,
}
for _op, _kernel in _REFERENCE.items():
    define(_op, "reference", CompositeExplicitAutograd=_kernel)
    register(_op, "reference", Provider(devices=None, priority=0))
