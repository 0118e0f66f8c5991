"""Which requests could never run, however long they waited."""

from __future__ import annotations

from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request


def check_admissible(
    request: Request,
    manager: KVCacheManager,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    enable_chunked_prefill: bool,
) -> None:
    """Raise ValueError, with the number that would do, for a request that can never be scheduled whole."""
    name, length = f"request {request.request_id!r}", request.num_prompt_tokens
    needed = manager.num_blocks_for(length + 1)
    if length >= max_model_len:
        raise ValueError(
            f"{name}: a prompt of {length} tokens leaves no room for output within max_model_len={max_model_len}: at "
            f"most {max_model_len - 1} are supported; raise max_model_len"
        )
    if needed > manager.num_usable_blocks:
        raise ValueError(
            f"{name} can never fit: a prompt of {length} tokens and one more take {needed} blocks of "
            f"{manager.block_size}, the pool offers {manager.num_usable_blocks}: raise num_blocks to at least "
            f"{needed + 1} or give the KV cache more memory"
        )
    if request.params.n > max_num_seqs:
        raise ValueError(
            f"{name}: n={request.params.n} completions are more than max_num_seqs={max_num_seqs} requests that may run "
            "at once: lower n or raise max_num_seqs"
        )
    if not enable_chunked_prefill and length > max_num_batched_tokens:
        raise ValueError(
            f"{name}: a prompt of {length} tokens exceeds max_num_batched_tokens={max_num_batched_tokens} and chunked "
            "prefill is off: raise max_num_batched_tokens or set enable_chunked_prefill=True"
        )
