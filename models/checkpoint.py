"""A checkpoint: a folder with config.json, *.safetensors and perhaps a tokenizer, checked before it is read."""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.asyncio import tqdm_asyncio

from models import default_model
from models.safetensors_files import Safetensors, read_json
from models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SUPPORTED = (
    f"{default_model.NAME!r} (the default model), a folder with config.json and *.safetensors (sharded or not), "
    "or a Hugging Face hub id such as 'org/name'"
)

_HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.safetensors"]
_HUB_IGNORED = ["*/*", "consolidated*.safetensors", "adapter_*"]  # other layouts of the same weights, and adapters


class Checkpoint(Safetensors):
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
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json; supported: {SUPPORTED}")
        super().__init__(folder)
        self.config = _load_config(self.folder)
        self.generation_config = _load_generation_config(self.folder)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The folder's tokenizer; None, with a log line, when the folder carries none."""
        return load_tokenizer(self.folder)


def resolve(model: str | Path, progress: bool = True) -> Checkpoint:
    """Find `model`, as `locate` does, and open it.

    Raises, beside what `locate` does:
        ValueError: the checkpoint is broken or unsupported.
    """
    return Checkpoint(locate(model, progress))


def locate(model: str | Path, progress: bool = True) -> Path:
    """The folder of `model`: the default model's name, a folder, or a hub id, tried in this order.

    Args:
        model: see `SUPPORTED`.
        progress: whether downloads show a bar on stderr.

    Raises:
        ValueError: nothing by that name can be had, or it is no name.
        RuntimeError: the default model could not be downloaded.

    Side effects: downloads into the cache of the default model or of huggingface_hub.
    """
    if not isinstance(model, str | Path):
        raise ValueError(
            f"{reprlib.repr(model)}, of type {type(model).__name__}, names no checkpoint; supported: {SUPPORTED}. A "
            "model in memory is given to the engine as a transformers PreTrainedModel, new weights as a state dict"
        )
    if model == default_model.NAME:
        return default_model.fetch(progress)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(model, Path) or folder.is_file():
        raise ValueError(f"{model} is not a folder; supported: {SUPPORTED}")
    return Path(_download(model, progress))


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


def _load_config(folder: Path) -> PretrainedConfig:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(folder / "config.json")
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
