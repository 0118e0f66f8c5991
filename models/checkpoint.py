"""A checkpoint: a folder with config.json, *.safetensors and perhaps a tokenizer, checked before it is read."""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.asyncio import tqdm_asyncio

from models import default_model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SUPPORTED = (
    f"{default_model.NAME!r} (the default model), a folder with config.json and *.safetensors (sharded or not), "
    "or a Hugging Face hub id such as 'org/name'"
)

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer*.json", "tokenizer*.model", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken")
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.safetensors"]
_HUB_IGNORED = ["*/*", "consolidated*.safetensors", "adapter_*"]  # other layouts of the same weights, and adapters
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

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The files of one model. Headers and config are read at once, tensor data only by `get`.

    Attributes:
        folder: where the files lie.
        config: the transformers configuration.
        generation_config: the content of generation_config.json, or None without that file.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open `folder`, reading its JSON files and the header of every shard.

        Raises:
            ValueError: a file is missing, truncated or unreadable, or the architecture or storage format is not
                supported; the message names it.
        """
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{self.folder} holds no config.json; supported: {SUPPORTED}")
        self._specs: dict[str, TensorSpec] = {}
        self._shard_of: dict[str, Path] = {}
        for shard in _shards(self.folder):
            for name, spec in _read_header(shard).items():
                if name in self._specs:
                    raise ValueError(f"tensor {name!r} is in both {self._shard_of[name]} and {shard}")
                self._specs[name], self._shard_of[name] = spec, shard
        self.config = _load_config(self.folder)
        self.generation_config = _load_generation_config(self.folder)
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

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The folder's tokenizer; None, with a log line, when the folder carries none."""
        if not any(path for pattern in _TOKENIZER_FILES for path in self.folder.glob(pattern)):
            logger.warning("%s carries no tokenizer: prompts must be token ids, and outputs have no text", self.folder)
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)


def resolve(model: str | Path, progress: bool = True) -> Checkpoint:
    """Find `model` and open it: the default model's name, a folder, or a hub id, tried in this order.

    Args:
        model: see `SUPPORTED`.
        progress: whether downloads show a bar on stderr.

    Raises:
        ValueError: nothing by that name can be had, it is no name, or the checkpoint is broken or unsupported.
        RuntimeError: the default model could not be downloaded.

    Side effects: downloads into the cache of the default model or of huggingface_hub.
    """
    if not isinstance(model, str | Path):
        raise ValueError(
            f"{reprlib.repr(model)}, of type {type(model).__name__}, names no checkpoint; supported: {SUPPORTED}. A "
            "model in memory is given to the engine as a transformers PreTrainedModel, new weights as a state dict"
        )
    if model == default_model.NAME:
        return Checkpoint(default_model.fetch(progress))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return Checkpoint(folder)
    if isinstance(model, Path) or folder.is_file():
        raise ValueError(f"{model} is not a folder; supported: {SUPPORTED}")
    return Checkpoint(_download(model, progress))


class _SilentBar(tqdm_asyncio):
    """A tqdm that shows nothing: huggingface_hub takes a class, not a switch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _download(hub_id: str, progress: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    bar = None if progress else _SilentBar
    try:
        return snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, tqdm_class=bar)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"model {hub_id!r} is neither a folder nor a hub id that can be reached from here; supported: {SUPPORTED}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, as its index, if any, lists them."""
    if (folder / _INDEX).is_file():
        shards = [folder / name for name in sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))]
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


def _load_config(folder: Path) -> PretrainedConfig:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder / 'config.json'}: model_type {model_type!r} is unknown to the installed transformers "
            f"{transformers.__version__}; supported: the architectures that it implements (remote code is never run)"
        )
    if quantization := raw.get("quantization_config"):
        raise ValueError(
            f"{folder} is quantized ({quantization.get('quant_method')}); supported: float checkpoints only, "
            "so use the unquantized one"
        )
    return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _load_generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / "generation_config.json").is_file():
        return None
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder)
