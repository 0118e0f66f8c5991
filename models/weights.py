"""From a checkpoint's tensors into preallocated storage, by transformers' own renaming and conversion rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from models.checkpoint import Checkpoint, TensorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

logger = logging.getLogger(__name__)


@dataclass
class _Load:
    """The source tensors of one target, or of several that one converter makes together."""

    targets: list[str]
    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name, the converter's pattern that it matched)


def load_weights(
    source: Checkpoint | Mapping[str, Tensor],
    model: PreTrainedModel,
    destinations: Mapping[str, Tensor],
    *,
    progress: bool = True,
) -> None:
    """Copy `source` into `destinations`, converting names, layouts and dtypes.

    One target is in work at a time, so memory stays at the destinations plus what one target is converted from.

    Args:
        source: a checkpoint in any layout that transformers knows for this model, or a state dict. A state dict that
            has exactly the names and shapes of `destinations`, such as `model.state_dict()`, is copied unconverted.
        model: gives its class, config, conversion rules and lists of names to ignore; its tensors are not touched.
        destinations: every parameter and persistent buffer of the unmodified Hugging Face model by its name. Views
            (slices of merged parameters) are written in place. Tied names share their memory.
        progress: whether a bar of bytes is shown on stderr.

    Raises:
        ValueError: names are missing or shapes differ (checked before the first copy, except where only a conversion
            shows it), or two tied names hold different values.

    Side effects: one warning names tensors that the model has no place for.
    """
    specs, get = _reader(source)
    if not isinstance(source, Checkpoint) and _same_layout(specs, destinations):
        loads = [_Load([name], sources=[(name, name)]) for name in specs]
    else:
        loads, unexpected = _plan(specs, model, destinations)
        _warn_unexpected(unexpected, model)
    _check_missing(loads, model, destinations)
    _check_shapes(loads, specs, destinations)
    total = sum(specs[name].nbytes for load in loads for name, _ in load.sources)
    written: dict[tuple[int, torch.Size], str] = {}
    with (
        tqdm(total=total, desc="load weights", unit="B", unit_scale=True, disable=not progress) as bar,
        torch.no_grad(),
    ):
        for load in loads:
            for target, tensor in _realize(load, get, model).items():
                _copy(target, tensor, destinations, written)
            bar.update(sum(specs[name].nbytes for name, _ in load.sources))


def _reader(source: Checkpoint | Mapping[str, Tensor]) -> tuple[Mapping[str, TensorSpec], Callable[[str], Tensor]]:
    if isinstance(source, Checkpoint):
        return source.names(), source.get
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in source.items()}, source.__getitem__


def _same_layout(specs: Mapping[str, TensorSpec], destinations: Mapping[str, Tensor]) -> bool:
    return specs.keys() == destinations.keys() and all(
        spec.shape == tuple(destinations[name].shape) for name, spec in specs.items()
    )


def _plan(
    specs: Mapping[str, TensorSpec], model: PreTrainedModel, destinations: Mapping[str, Tensor]
) -> tuple[list[_Load], list[str]]:
    """What to load from which names, and the names without a place.

    The order of steps is that of transformers' `convert_and_load_state_dict_in_model`: names in natural order (so
    experts stack in order), all renamings, then at most one converter.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=destinations)

    loads: dict[str, _Load] = {}
    unexpected = []
    for name in sorted(specs, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in destinations and name in destinations:
            target, pattern = rename(name, [], [])
        if target not in destinations:
            unexpected.append(name)
        elif pattern is None:
            if target in loads:
                raise ValueError(f"both {loads[target].sources[0][0]!r} and {name!r} are the model's {target!r}")
            loads[target] = _Load([target], sources=[(name, name)])
        else:
            converter = by_pattern[pattern]
            first, *_ = converter.target_patterns
            targets = [target.replace(first, other) for other in converter.target_patterns]
            loads.setdefault(target, _Load(targets, converter)).sources.append((name, pattern))
    return list(loads.values()), unexpected


def _check_missing(loads: Iterable[_Load], model: PreTrainedModel, destinations: Mapping[str, Tensor]) -> None:
    """A name may be missing if the model says so, or if a tied twin, which shares its memory, is loaded."""
    planned = {target for load in loads for target in load.targets}
    filled = {_memory(destinations[name]) for name in planned & destinations.keys()}
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for name, destination in destinations.items()
        if name not in planned and _memory(destination) not in filled and not _matches(ignored, name)
    ]
    if missing:
        raise ValueError(
            f"the weights lack {len(missing)} of the {len(destinations)} tensors of {type(model).__name__}: "
            f"{_first_few(missing)}; expected is a complete checkpoint of this architecture"
        )


def _check_shapes(loads: Iterable[_Load], specs: Mapping[str, TensorSpec], destinations: Mapping[str, Tensor]) -> None:
    for load in loads:
        if load.converter is None:
            (target,), ((name, _),) = load.targets, load.sources
            _check_shape(target, specs[name].shape, destinations[target])


def _check_shape(target: str, found: Iterable[int], destination: Tensor) -> None:
    if tuple(found) != tuple(destination.shape):
        raise ValueError(
            f"the weights hold {target!r} in shape {tuple(found)}, but the model's config makes it "
            f"{tuple(destination.shape)}: weights and config.json belong to different models"
        )


def _warn_unexpected(names: list[str], model: PreTrainedModel) -> None:
    """Rotary frequencies and position ids were once stored and are now computed: they go unmentioned."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    unexpected = [name for name in names if not _matches(ignored, name)]
    if unexpected:
        logger.warning(
            "%d tensors of the weights have no place in %s and are ignored: %s",
            len(unexpected),
            type(model).__name__,
            _first_few(unexpected),
        )


def _realize(load: _Load, get: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Read a load's sources, and convert them where a converter says so."""
    if load.converter is None:
        return {load.targets[0]: get(load.sources[0][0])}
    converter = deepcopy(load.converter)  # it collects tensors
    for name, pattern in load.sources:
        converter.add_tensor(load.targets[0], name, pattern, partial(get, name))
    try:
        converted = converter.convert(load.targets[0], model=model, config=model.config)
    except (RuntimeError, KeyError) as error:
        names = _first_few([name for name, _ in load.sources])
        raise ValueError(f"cannot make {', '.join(load.targets)} from {names}: {error}") from error
    assert converted.keys() >= set(load.targets), f"conversion made {list(converted)}, not {load.targets}"
    return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}


def _copy(
    target: str, tensor: Tensor, destinations: Mapping[str, Tensor], written: dict[tuple[int, torch.Size], str]
) -> None:
    """Copy one tensor into place; the second of tied names must equal the first. `written` names what lies where."""
    destination = destinations[target]
    _check_shape(target, tensor.shape, destination)
    twin = written.setdefault(_memory(destination), target)
    if twin == target:
        destination.copy_(tensor)
    elif not torch.equal(destination, tensor.to(destination)):
        raise ValueError(
            f"{twin!r} and {target!r} are tied by the model's config but differ in the weights: set "
            "tie_word_embeddings to false in config.json"
        )


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """What tied tensors have in common."""
    return tensor.data_ptr(), tensor.shape


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _first_few(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")
