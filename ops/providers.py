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
    priority: the highest of those that serve a device is chosen.
    """

    devices: frozenset[str] | None
    priority: int
    dtypes: frozenset[torch.dtype] | None = None

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
    usable = {name: provider for name, provider in providers.items() if provider.serves(device, dtype)}
    on = device.type if dtype is None else f"{device.type} with {dtype}"
    if override is None:
        name = max(usable, key=lambda name: usable[name].priority)
        reason = f"highest priority on {on} among {sorted(usable)}"
    elif override in usable:
        name, reason = override, "asked for"
    elif override in providers:
        raise ValueError(f"provider {override!r} of {op} does not serve {on}; these do: {sorted(usable)}")
    else:
        raise ValueError(f"unknown provider {override!r} of {op}; on {on} there are {sorted(usable)}")
    return Choice(op, name, reason, overload(op, name))


def choose(device: torch.device, overrides: Mapping[str, str]) -> dict[str, Choice]:
    """Choose a provider for every op; `overrides` names some by op. Raises ValueError as `select` does."""
    if unknown := sorted(set(overrides) - set(REGISTRY)):
        raise ValueError(f"unknown op {unknown[0]!r}; the ops are {sorted(REGISTRY)}")
    return {op: select(op, device, overrides.get(op)) for op in REGISTRY}


_REFERENCE: dict[str, Callable[..., Any]] = {
    "paged_attention": reference.paged_attention,
    "write_kv": reference.write_kv,
    "copy_blocks": reference.copy_blocks,
    "swap_blocks": reference.swap_blocks,
    "sample": sample,
    "linear": reference.linear,
}
for _op, _kernel in _REFERENCE.items():
    define(_op, "reference", CompositeExplicitAutograd=_kernel)
    register(_op, "reference", Provider(devices=None, priority=0))
