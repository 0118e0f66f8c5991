"""The limits that follow from the model, the memory and the knobs: pool size, longest request, token budget."""

from __future__ import annotations

import logging
import warnings

from graphs.kv_cache import num_blocks_for_memory
from graphs.swap_space import num_swap_blocks
from runtime.config import EngineConfig
from runtime.loaded_model import ModelFacts

logger = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = 2048


def pool_is_automatic(config: EngineConfig) -> bool:
    """Whether the pool's size follows from the memory that there is."""
    return config.num_blocks is None and config.kv_cache_memory_bytes is None


def size_pool(facts: ModelFacts, config: EngineConfig, needed: int = 0) -> tuple[int, int]:
    """Decide (num_blocks, max_model_len); says so where a limit is not the one asked for.

    needed: bytes of a GPU's memory that steps and graphs are going to take beside weights and caches.
    """
    plan = facts.report.plan
    wanted = config.max_model_len or facts.max_positions
    if config.num_blocks is not None:
        if config.kv_cache_memory_bytes is not None:
            warnings.warn("kv_cache_memory_bytes is ignored: num_blocks was given", stacklevel=5)
        num_blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        bytes_per_block = plan.bytes_per_token(facts.dtype.itemsize) * config.block_size
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
        if num_blocks < 2:
            raise ValueError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes} holds {num_blocks} blocks of {bytes_per_block} "
                f"bytes; at least 2 are needed: raise it to {2 * bytes_per_block}, or lower block_size"
            )
    else:
        num_blocks = num_blocks_for_memory(
            plan,
            block_size=config.block_size,
            dtype=facts.dtype,
            device=facts.device,
            utilization=config.gpu_memory_utilization,
            weight_bytes=facts.weight_bytes,
            needed=needed,
            max_tokens=config.max_num_seqs * wanted,
        )
    return num_blocks, _model_len(config, facts, (num_blocks - 1) * config.block_size)


def _model_len(config: EngineConfig, facts: ModelFacts, pool_tokens: int) -> int:
    max_positions = facts.max_positions
    if config.max_model_len is None:
        if pool_tokens < max_positions:
            logger.info("max_model_len is %d, what the KV cache holds; the model allows %d", pool_tokens, max_positions)
        if (length := min(max_positions, pool_tokens)) < 2:
            raise ValueError(f"a pool of {pool_tokens} tokens is too small for a prompt and output: raise num_blocks")
        return length
    if config.max_model_len > max_positions and facts.has_position_table:
        raise ValueError(
            f"max_model_len={config.max_model_len} is beyond the model's table of {max_positions} learned positions: "
            f"at most {max_positions} is supported"
        )
    if config.max_model_len > max_positions:
        warnings.warn(
            f"max_model_len={config.max_model_len} is beyond the {max_positions} positions that the model was made for",
            stacklevel=6,
        )
    if config.max_model_len > pool_tokens:
        warnings.warn(
            f"max_model_len={config.max_model_len} is larger than the KV cache, which holds {pool_tokens} tokens: "
            "longer requests are refused or end early; raise num_blocks or kv_cache_memory_bytes",
            stacklevel=6,
        )
    return config.max_model_len


def size_swap_space(facts: ModelFacts, config: EngineConfig, num_blocks: int, max_model_len: int) -> int:
    """Decide how many blocks the host may hold: swap_space, what is free, and what max_num_seqs requests can fill.

    num_blocks: of the KV cache. Warns if there is no room for preemption="swap".
    """
    if config.preemption == "recompute":
        return 0
    bytes_per_block = facts.report.plan.bytes_per_token(facts.dtype.itemsize) * config.block_size
    requested = int(config.swap_space * 2**30)
    blocks = num_swap_blocks(requested, bytes_per_block, facts.device, num_blocks * bytes_per_block)
    if config.preemption == "swap" and blocks == 0:
        warnings.warn(
            f"preemption='swap' is ignored: swap_space={config.swap_space} GiB and the host's free memory leave no "
            f"room for a block of {bytes_per_block} bytes, so preempted requests are recomputed",
            stacklevel=5,
        )
    return min(blocks, config.max_num_seqs * -(-max_model_len // config.block_size))


def batched_tokens(config: EngineConfig, max_model_len: int) -> int:
    """The token budget of a step."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    # Without chunking every prompt has to fit into one step.
    return DEFAULT_BATCHED_TOKENS if config.enable_chunked_prefill else max(DEFAULT_BATCHED_TOKENS, max_model_len)
