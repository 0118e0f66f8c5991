"""The tensors of a folder of *.safetensors, sharded or not. Needs no transformers, and no config beside them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SUPPORTED = "a folder of *.safetensors, sharded or not"

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorSpec:
    """What a safetensors header says of one tensor.

    Attributes:
        shape: sizes, outermost first.
        dtype: element type in the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What would be stored of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Safetensors:
    """The tensors that the files of a folder hold. Headers are read at once, tensor data only by `get`.

    Attributes:
        folder: where the files lie.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open `folder`, reading its index, if any, and the header of every shard.

        Raises:
            ValueError: there is no such folder, or a file in it is missing, truncated or unreadable; the message names
                it.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; supported: {SUPPORTED}")
        self._specs: dict[str, TensorSpec] = {}
        self._shard_of: dict[str, Path] = {}
        for shard in _shards(self.folder):
            for name, spec in _read_header(shard).items():
                if name in self._specs:
                    raise ValueError(f"tensor {name!r} is in both {self._shard_of[name]} and {shard}")
                self._specs[name], self._shard_of[name] = spec, shard
        self._open_shard: tuple[Path, Any] | None = None

    def names(self) -> Mapping[str, TensorSpec]:
        """Every tensor's name in the files, with its shape and dtype."""
        return self._specs

    def get(self, name: str) -> Tensor:
        """The tensor `name`, memory-mapped on the CPU (pages are read when they are touched).

        One shard is kept open at a time, so reading in file order opens each shard once.
        """
        shard = self._shard_of[name]
        if self._open_shard is None or self._open_shard[0] != shard:
            self._open_shard = (shard, safe_open(shard, framework="pt", device="cpu"))
        return self._open_shard[1].get_tensor(name)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating dtype that most elements are stored in.

        Raises:
            ValueError: no tensor is of a floating dtype.
        """
        elements: Counter[torch.dtype] = Counter()
        for spec in self._specs.values():
            if spec.dtype.is_floating_point:
                elements[spec.dtype] += math.prod(spec.shape)
        if not elements:
            raise ValueError(f"{self.folder} holds no tensor of a floating dtype")
        return elements.most_common(1)[0][0]

    @property
    def nbytes(self) -> int:
        """Size of all tensor data in bytes."""
        return sum(spec.nbytes for spec in self._specs.values())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names the file, if it holds none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, as its index, if any, lists them."""
    if (folder / _INDEX).is_file():
        shards = [folder / name for name in sorted(set(read_json(folder / _INDEX).get("weight_map", {}).values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ValueError(f"{folder / _INDEX} names shards that are missing: {', '.join(missing)}; download them")
    elif (folder / "model.safetensors").is_file():
        shards = [folder / "model.safetensors"]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".gguf", ".pt", ".pth"))
        found = f" (found {', '.join(others)}, which cannot be loaded: convert to safetensors)" if others else ""
        raise ValueError(f"{folder} holds no *.safetensors{found}; supported: {SUPPORTED}")
    return shards


def _read_header(shard: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes in `shard`; safetensors checks that the file is as long as its header says."""
    try:
        with safe_open(shard, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            stored = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        size = shard.stat().st_size
        raise ValueError(f"{shard} ({size} bytes) is truncated or damaged: {error}; download it again") from error
    for name, (_, dtype) in stored.items():
        if dtype not in _DTYPES:
            raise ValueError(f"{shard}: tensor {name!r} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
    return {name: TensorSpec(tuple(shape), _DTYPES[dtype]) for name, (shape, dtype) in stored.items()}
