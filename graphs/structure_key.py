"""The key of a model's compiled graph: a hash of all that the graph follows from, but of no weight's value."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from graphs.device import describe
from graphs.kv_cache import KVCache
from models.adapted import AdaptedModel, named_tensors
from models.report import RewriteReport

_OURS = ("ops", "models", "graphs")
# Of the environment: they change what inductor makes.
_SETTINGS = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "TORCH_COMPILE_")
_IGNORED = ("TORCHINDUCTOR_CACHE_DIR",)
# Of a config, and not of the code. Saving a model sets its config's dtype; that of its tensors counts.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype")
# Of a module: what transformers notes of how it was made and loaded, and no forward pass reads.
_NOT_OF_THE_CODE = ("name_or_path", "_is_hf_initialized", "_weight_conversions", "_use_kernels", "generation_config")
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def structure_key(
    module: AdaptedModel,
    report: RewriteReport,
    cache: KVCache,
    device: torch.device,
    rules: Sequence[str],
    optimize: str,
) -> str | None:
    """Hash what the compiled graph of an adapted model follows from; None if that cannot be told.

    It is the tree of modules with their settings, the sources of their classes and of our own packages, names, shapes,
    strides and ties of their tensors, the cache plan, the providers of ops, the rules, versions, the device or
    instruction set, and the environment's settings for inductor. It is not the values of weights, nor the number of
    blocks. A module with hooks, or of a class without a source file (as in a notebook), has no key. Code that a model's
    class calls in files other than its own and outside of transformers is not seen.
    """
    tree, sources = list(_tree(module)), _class_sources(module)
    if sources is None or any(part is None for part in tree):
        return None
    parts = {
        "tree": tree,
        "sources": sorted(sources),
        "tensors": list(_tensors(module)),
        "plan": repr(report.plan),
        "providers": {op: choice.provider for op, choice in report.providers.items()},
        "caches": [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in cache.tensors],
        "rules": list(rules),
        "optimize": optimize,
        "ours": _our_sources(),
        "versions": [torch.__version__, transformers.__version__, platform.python_version()],
        "device": describe(device),
        "environment": sorted(
            (name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS) and name not in _IGNORED
        ),
        "compiler": os.environ.get("CXX", "g++"),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())[:32]


def _tree(module: nn.Module) -> Iterator[list[Any] | None]:
    """Of each module its path, class and settings; None for one with hooks."""
    known: dict[int, Any] = {id(tensor): name for name, tensor in named_tensors(module)}
    known |= {id(part): path for path, part in module.named_modules()}
    for path, part in module.named_modules():
        settings = vars(part)
        if any(settings[name] for name in settings if name.startswith("_forward") and "hooks" in name):
            yield None
        described = {
            name: _described(value, known) for name, value in settings.items() if not _is_structure(name, value)
        }
        yield [path, f"{type(part).__module__}.{type(part).__qualname__}", described]


def _is_structure(name: str, value: object) -> bool:
    """What modules keep for torch, or what is told of elsewhere: tensors by their shape, ours by the plan."""
    kept = ("_parameters", "_buffers", "_modules", "_pagegraph_step", "_step", "plan", *_NOT_OF_THE_CODE)
    return name in kept or isinstance(value, Tensor)


def _described(value: Any, known: dict[int, Any]) -> Any:
    """A setting as JSON: of a function its code and what it holds, of an unknown object its class and attributes.

    A tensor that the model has no name for becomes a constant of the graph, so its values count.
    known: what stands for objects that have been described already, by their ids.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Mapping):
        return {str(key): _described(one, known) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_described(one, known) for one in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, Tensor):
        values = None if value.is_meta else _hash(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return [str(value.dtype), list(value.shape), values]
    if isinstance(value, types.MethodType):
        return _described(value.__func__, known)
    if isinstance(value, functools.partial):
        return [_described(one, known) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, types.FunctionType):
        known[id(value)] = value.__qualname__  # for it may hold itself
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # not empty ones
        held = [cells, value.__defaults__, value.__kwdefaults__]
        known[id(value)] = [value.__qualname__, _code(value.__code__), _described(held, known)]
        return known[id(value)]
    if isinstance(value, transformers.PretrainedConfig):
        fields = {name: one for name, one in value.to_dict().items() if name not in _NOT_OF_THE_MODEL}
        known[id(value)] = _described(fields, known)
        return known[id(value)]
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    known[id(value)] = kind = f"{type(value).__module__}.{type(value).__qualname__}"  # for it may hold itself
    known[id(value)] = [kind, {name: _described(one, known) for name, one in getattr(value, "__dict__", {}).items()}]
    return known[id(value)]


def _code(code: types.CodeType) -> str:
    return _hash(repr((code.co_code, code.co_names, _constant(code.co_consts))).encode())


def _constant(value: Any) -> Any:
    """A constant of a function as something whose repr is the same in every process."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return [_constant(one) for one in value]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _tensors(module: nn.Module) -> Iterator[list[Any]]:
    first: dict[int, str] = {}
    for path, part in module.named_modules():  # not named_parameters: it leaves out the second of tied ones
        members = [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]
        for name, tensor in members:
            if isinstance(tensor, Tensor):
                full = f"{path}.{name}"
                spec = [tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)]
                yield [full, first.setdefault(id(tensor), full), *spec]


def _class_sources(module: nn.Module) -> set[str] | None:
    """Hashes of the files that define the modules' classes, and of their functions as they were loaded.

    A file may have been edited since. None if a class has no file.
    """
    kinds = {kind for part in module.modules() for kind in type(part).__mro__[:-1]}
    theirs = [kind for kind in kinds if kind is not nn.Module]  # to which transformers adds when it first makes a model
    codes = {one.__code__ for kind in theirs for one in vars(kind).values() if isinstance(one, types.FunctionType)}
    files = {Path(code.co_filename) for code in codes} | {_source_file(kind) for kind in kinds}
    if not all(file.is_file() for file in files):
        return None
    return {_hash(file.read_bytes()) for file in files} | set(map(_code, codes))


def _source_file(kind: type) -> Path:
    """The file that a class is defined in; one that does not exist if it is in none."""
    try:
        return Path(inspect.getsourcefile(kind) or "<unknown>")
    except (OSError, TypeError):
        return Path("<unknown>")


@functools.cache
def _our_sources() -> str:
    root = Path(__file__).resolve().parent.parent
    files = sorted(file for package in _OURS for file in (root / package).rglob("*.py"))
    return _hash("".join(f"{file.relative_to(root)}:{_hash(file.read_bytes())}" for file in files).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
