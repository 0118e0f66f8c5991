"""From a checkpoint's tensors into preallocated storage, by transformers' own renaming and conversion rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

logger = logging.getLogger(__name__)


@dataclass
class _Load:
    """The source tensors of one target, or of several that one converter makes together."""

    target: str  # the first of them
    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name, the converter's pattern that it matched)


@torch.no_grad()
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
        ValueError: names are missing, shapes differ, a value is not a tensor, or two tied names hold different values.
            All of it is found before the first copy, so `destinations` are then as they were.

    Side effects: one warning names tensors that the model has no place for.
    """
    metas, get = _reader(source)
    unexpected: list[str] = []
    if not isinstance(source, Checkpoint) and _shapes(metas) == _shapes(destinations):
        loads = [_Load(name, sources=[(name, name)]) for name in metas]
    else:
        loads, unexpected = _plan(metas, model, destinations)
    # Conversions run twice, first without data: what does not fit shows before anything is overwritten.
    made = {name: (load, meta) for load in loads for name, meta in _realize(load, metas.__getitem__, model).items()}
    unexpected += [name for name in made if name not in destinations]
    made = {name: made[name] for name in made if name in destinations}
    _check_missing(made, model, destinations)
    _check_shapes(made, destinations)
    _warn_unexpected(unexpected, model)
    to_copy = _check_tied(made, partial(_realize, get=get, model=model), destinations)
    total = sum(metas[name].nbytes for load in loads for name, _ in load.sources)
    with tqdm(total=total, desc="load weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for load in loads:
            for name, tensor in _realize(load, get, model).items():
                if name in to_copy:
                    destinations[name].copy_(tensor)
            bar.update(sum(metas[name].nbytes for name, _ in load.sources))


def _reader(source: Checkpoint | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Every tensor on the meta device, and what reads one with its data."""
    if isinstance(source, Checkpoint):
        specs = source.names().items()
        return {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in specs}, source.get
    for name, value in source.items():
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "a tensor without data (meta)" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise ValueError(f"the weights hold {name!r}, which is {kind}; supported: a mapping of names to tensors")
    return {name: tensor.to("meta") for name, tensor in source.items()}, source.__getitem__


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plan(
    names: Iterable[str], model: PreTrainedModel, destinations: Mapping[str, Tensor]
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
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in destinations and name in destinations:
            target, pattern = rename(name, [], [])
        if target not in destinations:
            unexpected.append(name)
            continue
        converter = by_pattern[pattern] if pattern else None
        load = loads.setdefault(target, _Load(target, converter))
        if load.sources and (converter is None or converter is not load.converter):
            raise ValueError(f"both {load.sources[0][0]!r} and {name!r} are the model's {target!r}")
        load.sources.append((name, pattern or name))
    return list(loads.values()), unexpected


def _check_missing(made: Collection[str], model: PreTrainedModel, destinations: Mapping[str, Tensor]) -> None:
    """A name may be missing if the model says so, or if a tied twin, which shares its memory, is loaded."""
    filled = {_memory(destination) for name, destination in destinations.items() if name in made}
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for name, destination in destinations.items()
        if _memory(destination) not in filled and not _matches(ignored, name)
    ]
    if missing:
        raise ValueError(
            f"the weights lack {len(missing)} of the {len(destinations)} tensors of {type(model).__name__}: "
            f"{_first_few(missing)}; expected is a complete checkpoint of this architecture"
        )


def _check_shapes(made: Mapping[str, tuple[_Load, Tensor]], destinations: Mapping[str, Tensor]) -> None:
    for target, (_, tensor) in made.items():
        if tensor.shape != destinations[target].shape:
            raise ValueError(
                f"the weights hold {target!r} in shape {tuple(tensor.shape)}, but the model's config makes it "
                f"{tuple(destinations[target].shape)}: weights and config.json belong to different models"
            )


def _check_tied(
    made: Mapping[str, tuple[_Load, Tensor]],
    realize: Callable[[_Load], dict[str, Tensor]],
    destinations: Mapping[str, Tensor],
) -> set[str]:
    """Compare the values of tied names where more than one is given; returns the names to copy, one of each tie."""
    firsts: dict[tuple[int, torch.Size], str] = {}
    for target, (load, _) in made.items():
        first = firsts.setdefault(_memory(destinations[target]), target)
        if first != target:
            one, other = realize(made[first][0])[first], realize(load)[target]
            if not torch.equal(one, other.to(one)):
                raise ValueError(
                    f"{first!r} and {target!r} are tied by the model's config but differ in the weights: set "
                    "tie_word_embeddings to false in config.json"
                )
    return set(firsts.values())


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
        return {load.target: get(load.sources[0][0])}
    converter = deepcopy(load.converter)  # it collects tensors
    for name, pattern in load.sources:
        converter.add_tensor(load.target, name, pattern, partial(get, name))
    try:
        converted = converter.convert(load.target, model=model, config=model.config)
    except (RuntimeError, LookupError, ValueError) as error:
        names = _first_few([name for name, _ in load.sources])
        raise ValueError(f"cannot make {load.target} from {names}: {error}") from error
    return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """What tied tensors have in common."""
    return tensor.data_ptr(), tensor.shape


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _first_few(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")
