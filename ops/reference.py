"""The specification of all ops but `sample` in plain PyTorch, for any device.

Legend: T tokens, B sequences, W block-table width, N blocks, Hq query heads, Hk kv heads, G = Hq / Hk, S keys read,
Dk and Dv head dims. Position p of a sequence is slot `block_table[p // block_size] * block_size + p % block_size`.
Block 0 is the null block: padding reads and writes its slot 0 and nothing else.

Slots that a query may not see can hold anything, NaN included, and masking the scores alone would not do: 0 * NaN is
NaN in the product with V. So the functions below never load such a slot at all.
"""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

QUERY_TILE = 256  # queries attended at once: bounds the scores to Hq * QUERY_TILE * S floats


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of packed queries over a paged KV cache.

    Args:
        q: [T, Hq, Dk], any strides. Rows from query_start_loc[-1] on are padding: their output is zero.
        k_cache, v_cache: [N, block_size, Hk, Dk] and [N, block_size, Hk, Dv], contiguous, only read.
        block_table: [B, W] int32 or int64. A padding row is all 0, with seq_len 1.
        seq_lens: [B] integer >= 1, tokens of each sequence, this step's included (their K and V are in the cache).
        query_start_loc: [B + 1] integer; sequence b owns queries query_start_loc[b] to query_start_loc[b + 1] - 1,
            at its last positions. T == B promises one query a sequence.
        scale: multiplies q . k.
        window: a query sees that many last positions, its own included; 0: all.
        softcap: scores become softcap * tanh(scores / softcap); 0: none.
        sinks: [Hq] logits that join the softmax's denominator, or None.

    Returns: [T, Hq, Dv] in q's dtype, contiguous. Accumulates in float32, float64 inputs in float64.

    T == B is decode: one batched computation, which reads nothing on the host unless the lengths are there (CPU), and
    can be captured. Otherwise the lengths are read on the host once, so that path cannot be captured.
    """
    if q.shape[0] == block_table.shape[0]:
        return _decode(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap, sinks)
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])
    starts: list[int] = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        table, end = block_table[row : row + 1], starts[row + 1]
        for start in range(starts[row], end, QUERY_TILE):
            stop = min(start + QUERY_TILE, end)
            queries = torch.arange(length - (end - start), length - (end - stop), device=q.device)
            oldest = max(0, length - (end - start) - window + 1) if window else 0
            keys = torch.arange(oldest, length - (end - stop), device=q.device)
            visible = keys <= queries[:, None]
            if window:
                visible &= keys > queries[:, None] - window
            k, v = _read(k_cache, v_cache, table, keys[None], q.dtype)
            out[start:stop] = _attend(q[None, start:stop], k, v, visible[None], scale, softcap, sinks)[0]
    return out


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's K and V in its slot.

    Args:
        k, v: [T, Hk, Dk] and [T, Hk, Dv], any strides.
        k_cache, v_cache: [N, block_size, Hk, Dk] and [N, block_size, Hk, Dv], contiguous; written in place.
        slot_mapping: [T] int64, block * block_size + offset; 0 (the null slot) for padding tokens, as often as needed.
    """
    for source, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, source.to(cache.dtype))


def copy_blocks(caches: list[Tensor], src_dst: Tensor) -> None:
    """Copy whole blocks inside each cache.

    Args:
        caches: tensors [N, block_size, Hk, D], written in place.
        src_dst: [pairs, 2] integer block ids. No block is destination twice; all sources are read before a write.
    """
    src, dst = src_dst.to(torch.int64).unbind(1)
    for cache in caches:
        cache.index_copy_(0, dst, cache.index_select(0, src))


def swap_blocks(src: list[Tensor], dst: list[Tensor], src_dst: Tensor) -> None:
    """Copy whole blocks from one set of caches to another, bit for bit, usually between a device and its host.

    Args:
        src, dst: as many tensors each, pairwise [N, block_size, Hk, D] of one dtype, contiguous; only their N may
            differ. All of src are on one device and all of dst on one; dst is written in place and shares no memory
            with src.
        src_dst: [pairs, 2] int64 on the CPU, (block of src, block of dst), in any order. No block of dst comes twice.

    It runs outside the graph, so it may read src_dst on the host. Between a GPU and pinned memory the copies are
    queued on the current stream: the host must wait for the stream before it reads dst or writes src.

    Raises RuntimeError for a block that is not there.
    """
    for first, target, count in _runs(src_dst.tolist()):
        for source, destination in zip(src, dst, strict=True):
            # narrow, unlike a slice, does not cut off what is out of range.
            destination.narrow(0, target, count).copy_(source.narrow(0, first, count), non_blocking=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias.

    Args:
        x: [..., K], any strides.
        weight: [N, K]. Its dtype may differ from that of x (float32 activations, bfloat16 weights): then the product is
            taken in the wider of the two.
        bias: [N] or None.

    Returns: [..., N] in x's dtype.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    added = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), added).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: [..., D], any strides.
        weight: [D], of any dtype.
        offset: 0, or 1 where weights are stored as their difference to 1 (Gemma).

    Returns: x's shape and dtype, contiguous. Computes in float32, float64 inputs in float64, and rounds once.
    """
    dtype = _accumulator(x.dtype)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.to(dtype))).to(x.dtype).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """rms_norm of x + residual, and that sum, which is rounded to x's dtype before it is normalised.

    Args:
        x: [..., D], any strides.
        residual: of x's shape, any strides and dtype.
        weight, eps, offset: see rms_norm.

    Returns: the norm and the sum, both of x's shape and dtype, contiguous.
    """
    dtype = _accumulator(x.dtype)
    total = (x.to(dtype) + residual.to(dtype)).to(x.dtype).contiguous()
    return rms_norm(total, weight, eps, offset), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(x) = x / (1 + e^-x) (SwiGLU of Shazeer, 2020).

    Args:
        gate_up: [..., 2 N], any strides: N columns of gate, then N of up.

    Returns: [..., N] in gate_up's dtype, contiguous. Computes in float32, float64 inputs in float64, and rounds once.
    """
    gate, up = _halves(gate_up)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype).contiguous()


def gelu_and_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """gelu(gate) * up, with gelu(x) = x (1 + erf(x / sqrt(2))) / 2 (GEGLU of Shazeer, 2020).

    Args:
        gate_up: [..., 2 N], any strides: N columns of gate, then N of up.
        tanh: takes x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 instead (Hendrycks and Gimpel, 2016).

    Returns: as silu_and_mul.
    """
    gate, up = _halves(gate_up)
    activated = torch.nn.functional.gelu(gate, approximate="tanh" if tanh else "none")
    return (activated * up).to(gate_up.dtype).contiguous()


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotate each token's queries and keys by its position; store its K and V in its slot.

    The first R dimensions are turned, where x1 is the first half of them and x2 the second: x1 cos - x2 sin, and
    x2 cos + x1 sin (Su et al., 2021, in the layout of GPT-NeoX). The others pass.

    Args:
        q, k: [T, Hq, D] and [T, Hk, D], any strides.
        v: [T, Hk, Dv], any strides.
        cos, sin: [T, R], any strides and dtype; R is even and at most D. Each half has its own columns.
        k_cache, v_cache, slot_mapping: see write_kv.

    Returns: the rotated q in its dtype, contiguous. Computes in float32, float64 inputs in float64, and rounds once: to
    q's dtype and to the cache's.
    """
    write_kv(_rotate(k, cos, sin), v, k_cache, v_cache, slot_mapping)
    return _rotate(q, cos, sin).to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on [T, H, D] in the accumulation dtype; contiguous, and no view of x."""
    dtype = _accumulator(x.dtype)
    turned, rest = x.to(dtype).tensor_split([cos.shape[-1]], -1)
    first, second = turned.unflatten(-1, (2, -1)).unbind(-2)
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves of the last dimension, which must be even, in the accumulation dtype."""
    gate, up = gate_up.to(_accumulator(gate_up.dtype)).unflatten(-1, (2, -1)).unbind(-2)
    return gate, up


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x weight[e]^T for the rows of each expert e.

    Args:
        x: [S, K], sorted by expert.
        weight: [E, N, K], of x's dtype or another.
        offsets: [E] int32 or int64, rising: where each expert's rows end. Rows from the last one on are zero.

    Returns: [S, N] in x's dtype. Reads the offsets on the host, so it cannot be captured.
    """
    out = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            out[start:end] = linear(x[start:end], weight[expert], None)
        start = end
    return out


def _runs(pairs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Merge (src, dst) pairs into runs (first src, first dst, length) in which both ids go up by one."""
    for _, run in groupby(enumerate(sorted(pairs)), lambda item: [block - item[0] for block in item[1]]):
        (_, (src, dst)), *rest = run
        yield src, dst, 1 + len(rest)


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """paged_attention for one query a sequence, [B, Hq, Dk] -> [B, Hq, Dv], the whole batch at once."""
    lengths = seq_lens.to(torch.int64)[:, None]
    on_host = seq_lens.device.type == "cpu"
    span = int(seq_lens.max()) if on_host else block_table.shape[1] * k_cache.shape[1]
    span = min(span, window) if window else span
    keys = (lengths - span).clamp_(min=0) + torch.arange(span, device=q.device)
    visible = keys < lengths
    # Shorter sequences re-read their own last position, which is always valid, where the longest has keys left.
    k, v = _read(k_cache, v_cache, block_table, torch.minimum(keys, lengths - 1), q.dtype)
    return _attend(q[:, None], k, v, visible[:, None], scale, softcap, sinks)[:, 0]


def _read(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather positions [B, S] of both caches as [B, Hk, S, D] in the accumulation dtype.

    A (slot, head) is one row of the flat cache: taken in head-major order, one gather yields what a batched matmul
    takes without another copy.
    """
    block_size, heads = k_cache.shape[1:3]
    blocks = block_table.gather(1, positions // block_size).to(torch.int64)  # int64: slots of a big pool pass 2**31
    slots = blocks * block_size + positions % block_size
    rows = slots[:, None] * heads + torch.arange(heads, device=slots.device)[:, None]

    def read(cache: Tensor) -> Tensor:
        gathered = cache.view(-1, cache.shape[3]).index_select(0, rows.flatten())
        return gathered.view(*rows.shape, cache.shape[3]).to(_accumulator(dtype))

    return read(k_cache), read(v_cache)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Dense attention: q [B, t, Hq, Dk], k and v [B, Hk, S, D], visible [B, t, S] -> [B, t, Hq, Dv] in q's dtype.

    The G query heads of a kv head are rows of one matmul, so K and V are not repeated.
    """
    batch, queries, q_heads, _ = q.shape
    heads, span = k.shape[1:3]
    grouped = q.to(k.dtype).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    scores = (grouped * scale).flatten(2, 3) @ k.transpose(2, 3)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(batch, heads, -1, queries, span)
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    out = scores.softmax(-1).flatten(2, 3) @ v
    out = out.unflatten(2, (-1, queries))
    if sinks is not None:
        # e^s / (sum e^s + e^sink) = softmax(s) * sigmoid(logsumexp(s) - sink): a sink only scales the output.
        logits = sinks.to(k.dtype).view(heads, -1, 1, 1)
        out = out * (scores.logsumexp(-1, keepdim=True) - logits).sigmoid()
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, q_heads, -1).to(q.dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
