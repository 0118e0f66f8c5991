"""Whether the executor that serves decode steps agrees with the uncompiled module, batch size by batch size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphs.executor import Executor
from graphs.graph_executor import GraphExecutor
from graphs.inputs import InputArena, StepSizes, fill_padding
from graphs.kv_cache import KVCache
from models.step_inputs import StepInputs

SHORT = 3  # tokens of the short context
_WITHOUT_BUCKETS = (1, 2, 5)  # batch sizes of an executor that has no buckets


@dataclass(frozen=True)
class SelfCheck:
    """One batch size at one context: the largest difference of logits, and the largest of them.

    rows: of the batch, the others being padding. replayed: whether by a graph. same_argmax: whether the likeliest token
    of each row was the same.
    """

    batch: int
    rows: int
    context: int
    replayed: bool
    max_difference: float
    max_logit: float
    same_argmax: bool

    def __str__(self) -> str:
        how = "replayed" if self.replayed else "uncaptured"
        argmax = "equal" if self.same_argmax else "DIFFERENT"
        return (
            f"batch {self.batch} ({self.rows} rows), context {self.context}, {how}: logits up to {self.max_logit:.3g} "
            f"differ by up to {self.max_difference:.2g}, likeliest tokens are {argmax}"
        )


def self_check(
    executor: Executor, eager: Executor, cache: KVCache, arena: InputArena, max_model_len: int, vocab_size: int
) -> list[SelfCheck]:
    """Run the same decode step by `executor` and `eager`: every captured bucket, at a short context and a long one.

    At the short one a row of the bucket is padding, unless it has no other; at the long one none is, unless the pool
    has fewer blocks. All sequences share one random past, and each writes a last block of its own, so that the pool
    bounds the context little. Side effects: blocks of the cache are overwritten, and the arena's inputs.
    """
    graphs = executor if isinstance(executor, GraphExecutor) else None
    usable, found = cache.num_blocks - 1, []
    for batch in _WITHOUT_BUCKETS if graphs is None else graphs.captured:
        most = min(batch, usable)
        longest = min(max_model_len, (usable - most + 1) * cache.block_size)
        for rows, context in ((max(1, most - 1), min(SHORT, longest)), (most, longest)):
            sizes = StepSizes(batch, batch, -(-context // cache.block_size), batch)
            inputs = _inputs(arena, executor.padded(sizes), rows, context, cache, vocab_size)
            expected = eager.run(inputs).logits[:rows].clone()
            before = 0 if graphs is None else graphs.num_replays
            logits = executor.run(inputs).logits[:rows]
            found.append(
                SelfCheck(
                    batch=batch,
                    rows=rows,
                    context=context,
                    replayed=graphs is not None and graphs.num_replays > before,
                    max_difference=(logits - expected).abs().max().item(),
                    max_logit=expected.abs().max().item(),
                    same_argmax=torch.equal(logits.argmax(-1), expected.argmax(-1)),
                )
            )
    return found


def _inputs(
    arena: InputArena, sizes: StepSizes, rows: int, context: int, cache: KVCache, vocab_size: int
) -> StepInputs:
    """A decode step of `rows` sequences of `context` tokens; only the last is a sequence's own, the past is noise."""
    device = cache.k[0].device
    generator = torch.Generator(device).manual_seed(context)
    shared = (context - 1) // cache.block_size
    used = torch.arange(1, shared + rows + 1, device=device)
    for tensor in cache.tensors:
        tensor[used] = torch.randn((len(used), *tensor.shape[1:]), generator=generator, device=device).to(tensor.dtype)
    host = arena.carve(sizes)
    fill_padding(host)
    own = torch.arange(rows) + shared + 1
    host.input_ids[:rows] = torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(context))
    host.positions[:rows] = context - 1
    host.seq_lens[:rows] = context
    host.block_table[0, :rows, :shared] = torch.arange(1, shared + 1)
    host.block_table[0, :rows, shared] = own
    host.slot_mapping[0, :rows] = own * cache.block_size + (context - 1) % cache.block_size
    return arena.upload()
