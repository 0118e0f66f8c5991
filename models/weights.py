"""From a checkpoint's tensors into preallocated storage, by transformers' own renaming and conversion rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from models.safetensors_files import Safetensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

logger = logging.getLogger(__name__)


class Step(Protocol):
    """A step of loading: one tensor of the model, or several, made from tensors of the weights."""

    @property
    def reads(self) -> Sequence[str]:
        """The names that it reads."""

    def make(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name, from what `get` gives for each name that is read."""


@dataclass
class Load:
    """The step of one target, or of several that one converter of transformers makes together."""

    target: str  # the first of them
    model: PreTrainedModel
    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name, the converter's pattern that it matched)

    @property
    def reads(self) -> list[str]:
        """The names that it reads."""
        return [name for name, _ in self.sources]

    def make(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Read the sources, and convert them where a converter says so. Raises ValueError if they do not fit."""
        if self.converter is None:
            return {self.target: get(self.sources[0][0])}
        converter = deepcopy(self.converter)  # it collects tensors
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(get, name))
        try:
            converted = converter.convert(self.target, model=self.model, config=self.model.config)
        except (RuntimeError, LookupError, ValueError) as error:
            raise ValueError(f"cannot make {self.target} from {first_few(self.reads)}: {error}") from error
        return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}


@dataclass(frozen=True)
class Loading:
    """All that loads some weights into a model: what is missing, misshapen or contradictory has been found before."""

    loads: list[Load]
    copied: list[str]  # names of the model to copy: of tied ones one
    unexpected: list[str]  # names of the weights, and such as a converter makes, that the model has no place for


@dataclass(frozen=True)
class Source:
    """Weights to load from."""

    metas: Mapping[str, Tensor]  # all of them, on the meta device
    get: Callable[[str], Tensor]  # one of them with its data

    @classmethod
    def of(cls, weights: Safetensors | Mapping[str, Tensor]) -> Source:
        """A checkpoint's files, or a state dict. Raises ValueError for a value that is not a tensor."""
        if isinstance(weights, Safetensors):
            specs = weights.names().items()
            return cls({name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in specs}, weights.get)
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.is_meta:
                kind = (
                    "a tensor without data (meta)" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
                )
                raise ValueError(
                    f"the weights hold {name!r}, which is {kind}; supported: a mapping of names to tensors"
                )
        return cls({name: tensor.to("meta") for name, tensor in weights.items()}, weights.__getitem__)


@torch.no_grad()
def load_weights(
    source: Safetensors | Mapping[str, Tensor],
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
    weights = Source.of(source)
    unconverted = not isinstance(source, Safetensors) and _shapes(weights.metas) == _shapes(destinations)
    loading = plan_loading(weights, model, destinations, unconverted=unconverted)
    _warn_unexpected(loading.unexpected, model)
    copy_all(loading.loads, weights, {name: destinations[name] for name in loading.copied}, progress=progress)


def plan_loading(
    source: Source, model: PreTrainedModel, destinations: Mapping[str, Tensor], *, unconverted: bool = False
) -> Loading:
    """Find out and check what `load_weights` does with these arguments; `unconverted`: every name stays as it is."""
    unexpected: list[str] = []
    if unconverted:
        loads = [Load(name, model, sources=[(name, name)]) for name in source.metas]
    else:
        loads, unexpected = _plan(source.metas, model, destinations)
    # Conversions run twice, first without data: what does not fit shows before anything is overwritten.
    made = {name: (load, meta) for load in loads for name, meta in load.make(source.metas.__getitem__).items()}
    unexpected += [name for name in made if name not in destinations]
    made = {name: made[name] for name in made if name in destinations}
    _check_missing(made, model, destinations)
    _check_shapes(made, destinations)
    return Loading(loads, _check_tied(made, source, destinations), unexpected)


def copy_all(steps: Sequence[Step], source: Source, destinations: Mapping[str, Tensor], *, progress: bool) -> None:
    """Take the steps one by one, copying what each makes into `destinations`; what has none is dropped."""
    total = sum(source.metas[name].nbytes for step in steps for name in step.reads)
    with tqdm(total=total, desc="load weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for step in steps:
            for name, tensor in step.make(source.get).items():
                if name in destinations:
                    destinations[name].copy_(tensor)
            bar.update(sum(source.metas[name].nbytes for name in step.reads))


def first_few(names: list[str], limit: int = 5) -> str:
    """Some names, to be part of a message."""
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")


def memory_of(tensor: Tensor) -> tuple[int, torch.Size]:
    """What tied tensors have in common."""
    return tensor.data_ptr(), tensor.shape


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plan(
    names: Iterable[str], model: PreTrainedModel, destinations: Mapping[str, Tensor]
) -> tuple[list[Load], list[str]]:
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

    loads: dict[str, Load] = {}
    unexpected = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in destinations and name in destinations:
            target, pattern = rename(name, [], [])
        if target not in destinations:
            unexpected.append(name)
            continue
        converter = by_pattern[pattern] if pattern else None
        load = loads.setdefault(target, Load(target, model, converter))
        if load.sources and (converter is None or converter is not load.converter):
            raise ValueError(f"both {load.sources[0][0]!r} and {name!r} are the model's {target!r}")
        load.sources.append((name, pattern or name))
    return list(loads.values()), unexpected


def _check_missing(made: Collection[str], model: PreTrainedModel, destinations: Mapping[str, Tensor]) -> None:
    """A name may be missing if the model says so, or if a tied twin, which shares its memory, is loaded."""
    filled = {memory_of(destination) for name, destination in destinations.items() if name in made}
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for name, destination in destinations.items()
        if memory_of(destination) not in filled and not _matches(ignored, name)
    ]
    if missing:
        raise ValueError(
            f"the weights lack {len(missing)} of the {len(destinations)} tensors of {type(model).__name__}: "
            f"{first_few(missing)}; expected is a complete checkpoint of this architecture"
        )


def _check_shapes(made: Mapping[str, tuple[Load, Tensor]], destinations: Mapping[str, Tensor]) -> None:
    for target, (_, tensor) in made.items():
        if tensor.shape != destinations[target].shape:
            raise ValueError(
                f"the weights hold {target!r} in shape {tuple(tensor.shape)}, but the model's config makes it "
                f"{tuple(destinations[target].shape)}: weights and config.json belong to different models"
            )


def _check_tied(
    made: Mapping[str, tuple[Load, Tensor]], source: Source, destinations: Mapping[str, Tensor]
) -> list[str]:
    """Compare the values of tied names where more than one is given; returns the names to copy, one of each tie."""
    firsts: dict[tuple[int, torch.Size], str] = {}
    for target, (load, _) in made.items():
        first = firsts.setdefault(memory_of(destinations[target]), target)
        if first != target:
            one, other = made[first][0].make(source.get)[first], load.make(source.get)[target]
            if not torch.equal(one, other.to(one)):
                raise ValueError(
                    f"{first!r} and {target!r} are tied by the model's config but differ in the weights: set "
                    "tie_word_embeddings to false in config.json"
                )
    return list(firsts.values())


def _warn_unexpected(names: list[str], model: PreTrainedModel) -> None:
    """Rotary frequencies and position ids were once stored and are now computed: they go unmentioned."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    unexpected = [name for name in names if not _matches(ignored, name)]
    if unexpected:
        logger.warning(
            "%d tensors of the weights have no place in %s and are ignored: %s",
            len(unexpected),
            type(model).__name__,
            first_few(unexpected),
        )


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
