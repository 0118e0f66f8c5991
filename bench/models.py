"""The models that benchmarks run on, beside any folder or hub id: random weights in the sizes of public models.

How fast a dense model is does not depend on what its weights are.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from models.checkpoint import resolve
from ops.cache_folder import cache_folder

logger = logging.getLogger(__name__)


def _llama() -> LlamaConfig:
    """The sizes of Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def _qwen3() -> Qwen3Config:
    """The sizes of Qwen3 0.6B."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


RANDOM: dict[str, Callable[[], PretrainedConfig]] = {"llama-3.2-1b": _llama, "qwen3-0.6b": _qwen3}
"""Models with random weights, by the name on the command line."""

NAMES = f"smollm2, a folder, a hub id, or with random weights: {', '.join(RANDOM)}"


def resolve_model(name: str) -> Path:
    """The folder of a model: one of `RANDOM`, built first if the cache lacks it, or what `models.checkpoint` resolves.

    A built folder holds bfloat16 weights and no tokenizer: prompts are token ids. Raises as `resolve` does.
    """
    return _built(name, RANDOM[name]()) if name in RANDOM else resolve(name).folder


def _built(name: str, config: PretrainedConfig) -> Path:
    """The cached folder of a random model; it appears by one rename, so it is whole or absent."""
    folder = cache_folder() / "bench-models" / name
    if folder.is_dir():
        return folder
    logger.warning("building %s with random weights in %s, once", name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch, torch.random.fork_rng([]):
        torch.manual_seed(0)
        built = Path(scratch) / "built"
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
    return folder
