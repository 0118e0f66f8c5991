"""`StepInputs`: what one forward pass takes, and the graph's ABI.

Sizes: T tokens, B sequences, W block-table columns, L sampled rows, M masked ids, R rows of the previous step, G cache
groups. All but G are dynamic in the compiled graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepInputs(NamedTuple):
    """The tensors of one step, of all its sequences packed one after the other.

    Padding tokens have slot 0; a padding sequence has an all-zero block table row and `seq_lens` 1.
    """

    input_ids: Tensor  # [T] int64
    prev_row: Tensor  # [T] int64: take prev_tokens[prev_row] instead of input_ids; -1: take input_ids
    prev_tokens: Tensor  # [R] int64: the tokens that the previous step sampled
    positions: Tensor  # [T] int64: position of the token in its sequence
    slot_mapping: Tensor  # [G, T] int64: block * block_size + offset at which the token's K and V are written
    block_table: Tensor  # [G, B, W] int32: block ids of each sequence, in order; 0 beyond its end
    seq_lens: Tensor  # [B] int32: tokens of the sequence, this step's included
    query_start_loc: Tensor  # [B + 1] int32: where each sequence's tokens start among the T
    logits_indices: Tensor  # [L] int64: rows of T to compute logits for and to sample; a row may repeat
    temperature: Tensor  # [L] float32: 0 is greedy
    top_k: Tensor  # [L] int32: 0 is off
    top_p: Tensor  # [L] float32
    min_p: Tensor  # [L] float32
    noise_key: Tensor  # [L] int64: key of the request's sampling noise
    noise_position: Tensor  # [L] int64: position of the token to be drawn
    masked_ids: Tensor  # [L, M] int32: ids that may not be drawn, padded with -1


class StepOutputs(NamedTuple):
    """What one forward pass returns."""

    tokens: Tensor  # [L] int64: the drawn token of each row of logits_indices
    logits: Tensor  # [L, V] in the model's dtype, before temperature and masks


# Dtype and dimensions of each field of StepInputs. "B+1" is one more than B; G is static, all others are dynamic.
FIELDS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "input_ids": (torch.int64, ("T",)),
    "prev_row": (torch.int64, ("T",)),
    "prev_tokens": (torch.int64, ("R",)),
    "positions": (torch.int64, ("T",)),
    "slot_mapping": (torch.int64, ("G", "T")),
    "block_table": (torch.int32, ("G", "B", "W")),
    "seq_lens": (torch.int32, ("B",)),
    "query_start_loc": (torch.int32, ("B+1",)),
    "logits_indices": (torch.int64, ("L",)),
    "temperature": (torch.float32, ("L",)),
    "top_k": (torch.int32, ("L",)),
    "top_p": (torch.float32, ("L",)),
    "min_p": (torch.float32, ("L",)),
    "noise_key": (torch.int64, ("L",)),
    "noise_position": (torch.int64, ("L",)),
    "masked_ids": (torch.int32, ("L", "M")),
}
assert tuple(FIELDS) == StepInputs._fields
