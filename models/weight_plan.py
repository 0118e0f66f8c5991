"""How a checkpoint's tensors become an adapted model's, as data: a process that has it needs no transformers.

`record` runs transformers' conversions once, without data, and notes the ATen calls that they make.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from models.safetensors_files import Safetensors, TensorSpec
from models.weights import Load, Source, copy_all, first_few, memory_of, plan_loading

if TYPE_CHECKING:
    from models.adapted import Adaptation

KindT = TypeVar("KindT")


@dataclass(frozen=True)
class Destination:
    """The tensor `name` of the adapted model, or `length` places of it along `dim` from `start` on."""

    name: str
    dim: int = 0
    start: int = 0
    length: int | None = None  # None: all of it

    def within(self, state: Mapping[str, Tensor]) -> Tensor:
        """That tensor, or a view of its part."""
        whole = state[self.name]
        return whole if self.length is None else whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class AtenCall:
    """One call. Among the arguments {"tensor": i} is the i-th value of the recipe, {"dtype": "float32"} a dtype."""

    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]

    def to_json(self) -> list[Any]:
        """The op's name and the arguments."""
        return [str(self.op), self.args, self.kwargs]


@dataclass(frozen=True)
class Recipe:
    """A recorded step of loading. Its values are the tensors that it reads, then what each call returns."""

    reads: tuple[str, ...]
    calls: tuple[AtenCall, ...]
    makes: dict[str, int]  # names of the unmodified model, and which value each is

    def make(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The unmodified model's tensors, from what `get` gives for each name that is read."""
        values = [get(name) for name in self.reads]
        for call in self.calls:
            kwargs = {name: _decode(argument, values) for name, argument in call.kwargs.items()}
            values += _tensors(call.op(*_decode(call.args, values), **kwargs))
        return {name: values[index] for name, index in self.makes.items()}

    @property
    def computation(self) -> str:
        """What is done, whatever the names of the tensors: equal in all layers that are alike."""
        return json.dumps([[call.to_json() for call in self.calls], list(self.makes.values())])

    def to_json(self) -> dict[str, Any]:
        """Plain lists, names and numbers."""
        return {"reads": self.reads, "calls": [call.to_json() for call in self.calls], "makes": self.makes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """What `to_json` gave. Raises ValueError for a call of anything but a pure ATen op."""
        calls = tuple(AtenCall(_pure_aten_op(op), args, kwargs) for op, args, kwargs in data["calls"])
        return cls(tuple(data["reads"]), calls, data["makes"])


@dataclass(frozen=True)
class WeightPlan:
    """How to load a checkpoint into an adapted model.

    Attributes:
        sources: the checkpoint's tensors that are read.
        targets: the adapted model's tensors that are written, by their first names in it.
        destinations: by names of the unmodified model, of tied ones one.
        recipes: the steps, in order.
    """

    sources: dict[str, TensorSpec]
    targets: dict[str, TensorSpec]
    destinations: dict[str, Destination]
    recipes: tuple[Recipe, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain lists, names and numbers."""
        return {
            "sources": {name: _described(spec) for name, spec in self.sources.items()},
            "targets": {name: _described(spec) for name, spec in self.targets.items()},
            "destinations": {name: asdict(place) for name, place in self.destinations.items()},
            "recipes": [recipe.to_json() for recipe in self.recipes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WeightPlan:
        """What `to_json` gave, perhaps by way of a file. Raises ValueError for a call of anything but an ATen op."""
        return cls(
            {name: _spec(described) for name, described in data["sources"].items()},
            {name: _spec(described) for name, described in data["targets"].items()},
            {name: Destination(**place) for name, place in data["destinations"].items()},
            tuple(Recipe.from_json(recipe) for recipe in data["recipes"]),
        )


@torch.no_grad()
def record(checkpoint: Safetensors, adaptation: Adaptation) -> WeightPlan:
    """Plan how `checkpoint` is loaded into the adapted model, which has storage and keeps what is in it.

    Each computation that a conversion was recorded as is also done once on the checkpoint's data, and compared.

    Raises:
        ValueError: `checkpoint` does not fit the model, as in `load_weights`, or a conversion cannot be recorded.
    """
    state = dict(chain(adaptation.module.named_parameters(), adaptation.module.named_buffers()))
    assert not any(tensor.is_meta for tensor in state.values()), "tied tensors are known by their memory"
    source = Source.of(checkpoint)
    loading = plan_loading(source, adaptation.source, adaptation.destinations())
    recorded = [(load, _recorded(load, source.metas)) for load in loading.loads]
    needed = [(load, recipe) for load, recipe in recorded if not recipe.makes.keys().isdisjoint(loading.copied)]
    converted = [(load, recipe) for load, recipe in needed if load.converter is not None]
    _compare({recipe.computation: (load, recipe) for load, recipe in converted}.values(), source)
    places = _places(adaptation, state)
    destinations = {name: places[name] for name in loading.copied}
    return WeightPlan(
        sources={name: TensorSpec.of(source.metas[name]) for _, recipe in needed for name in recipe.reads},
        targets={place.name: TensorSpec.of(state[place.name]) for place in destinations.values()},
        destinations=destinations,
        recipes=tuple(recipe for _, recipe in needed),
    )


@torch.no_grad()
def replay(
    plan: WeightPlan,
    source: Safetensors | Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    *,
    progress: bool = True,
) -> None:
    """Copy `source` into `state` as recorded: one target at a time, as `load_weights` does.

    Args:
        source: the checkpoint that the plan was made for, or another one with its names, shapes and dtypes.
        state: tensors of the adapted model by their names in it; those that the plan does not mention stay as they are.
        progress: whether a bar of bytes is shown on stderr.

    Raises:
        ValueError: names are missing, or shapes or dtypes are not those recorded. Nothing is copied then.
    """
    weights = Source.of(source)
    _check("the weights", plan.sources, weights.metas)
    _check("the adapted model's tensors", plan.targets, state)
    destinations = {name: place.within(state) for name, place in plan.destinations.items()}
    copy_all(plan.recipes, weights, destinations, progress=progress)


def fingerprint(source: Safetensors) -> str:
    """A sha256 of every tensor's name, dtype, shape and bytes, in however many files they are.

    Threads read and hash them, several tensors at a time.
    """
    specs = source.names()
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_sha256, [source.get(name) for name in specs])  # mapped, not yet read
        entries = [
            [name, *_described(spec), digest] for (name, spec), digest in zip(specs.items(), digests, strict=True)
        ]
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


class _Recorder(TorchDispatchMode):
    """Notes the ATen calls that are made while it is on, beginning with some tensors as the first values."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[AtenCall] = []
        self._values: list[Tensor] = []  # kept, so that no other tensor gets the id of one of them
        self._indices: dict[int, int] = {}
        self._append(values)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [self._encode(argument) for argument in args]
        named = {name: self._encode(argument) for name, argument in (kwargs or {}).items()}
        self.calls.append(AtenCall(_pure_aten_op(str(func)), given, named))
        result = func(*args, **(kwargs or {}))
        self._append(_tensors(result))
        return result

    def index(self, tensor: Tensor) -> int:
        """Which value it is."""
        if id(tensor) not in self._indices:
            raise ValueError("it needs a tensor that does not come from the weights")
        return self._indices[id(tensor)]

    def _append(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._indices[id(tensor)] = len(self._values)
            self._values.append(tensor)

    def _encode(self, argument: Any) -> Any:
        match argument:
            case Tensor():
                return {"tensor": self.index(argument)}
            case torch.dtype():
                return {"dtype": _name(argument)}
            case torch.memory_format():
                return {"memory_format": _name(argument)}
            case list() | tuple():
                return [self._encode(one) for one in argument]
            case None | bool() | int() | float() | str():
                return argument
        raise ValueError(f"an op is given {argument!r}, of type {type(argument).__name__}")


def _decode(argument: Any, values: Sequence[Tensor]) -> Any:
    match argument:
        case {"tensor": index}:
            return values[index]
        case {"dtype": name}:
            return _of_torch(name, torch.dtype)
        case {"memory_format": name}:
            return _of_torch(name, torch.memory_format)
        case list():
            return [_decode(one, values) for one in argument]
    return argument


def _recorded(load: Load, metas: Mapping[str, Tensor]) -> Recipe:
    try:
        with _Recorder([metas[name] for name in load.reads]) as recorder:
            made = load.make(metas.__getitem__)
        makes = {name: recorder.index(tensor) for name, tensor in made.items()}
    except ValueError as error:
        raise ValueError(f"how {load.target} is loaded cannot be recorded: {error}") from error
    return Recipe(tuple(load.reads), tuple(recorder.calls), makes)


def _compare(steps: Iterable[tuple[Load, Recipe]], source: Source) -> None:
    """Raise ValueError where a recipe makes other tensors than the step it was recorded from."""
    for load, recipe in steps:
        expected, found = load.make(source.get), recipe.make(source.get)
        for name in expected:
            if not torch.equal(_bytes(expected[name]), _bytes(found[name])):
                raise ValueError(f"how {name} is loaded cannot be recorded: it depends on the weights' values")


def _places(adaptation: Adaptation, state: dict[str, Tensor]) -> dict[str, Destination]:
    """Where the tensors of the unmodified model go, by names in `adaptation.module`, of tied tensors the first."""
    first = {memory_of(tensor): name for name, tensor in reversed(state.items())}
    inner = adaptation.module.model.state_dict()
    places = adaptation.load_plan.places(adaptation.source.state_dict())
    return {name: replace(place, name=first[memory_of(inner[place.name])]) for name, place in places.items()}


def _check(what: str, expected: Mapping[str, TensorSpec], found: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{what} lack {len(missing)} of {len(expected)} recorded tensors: {first_few(missing)}")
    for name, spec in expected.items():
        other = TensorSpec.of(found[name])
        if other != spec:
            recorded, actual = (f"{_name(one.dtype)} {one.shape}" for one in (spec, other))
            raise ValueError(f"{what} hold {name!r} as {actual}; expected, as recorded: {recorded}")


def _pure_aten_op(name: str) -> OpOverload:
    """`aten.<operator>.<overload>`, if it only computes a result from its arguments."""
    parts = name.split(".")
    found: Any = torch.ops.aten if len(parts) == 3 and parts[0] == "aten" else None
    for part in parts[1:]:
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        raise ValueError(f"{name} is called; only ATen ops that change none of their arguments can be replayed")
    return found


def _of_torch(name: str, kind: type[KindT]) -> KindT:
    """The dtype, or memory format, of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is no {kind.__name__} of torch")
    return found


def _name(value: torch.dtype | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _described(spec: TensorSpec) -> list[Any]:
    return [_name(spec.dtype), list(spec.shape)]


def _spec(described: list[Any]) -> TensorSpec:
    dtype, shape = described
    return TensorSpec(tuple(shape), _of_torch(dtype, torch.dtype))


def _tensors(result: Any) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()
