"""The step that both attention kernels repeat: one tile of keys joins the running softmax of a tile of queries.

The softmax is taken in powers of two, scores being multiplied by log2(e), since that is what the hardware computes.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ops.triton.library import interpreting

LOG2_E = tl.constexpr(1 / math.log(2))
NO_WINDOW = 2**31 - 1
INTERPRETED = tl.constexpr(
    interpreting()
)  # Triton's interpreter multiplies the bits of bfloat16 as if they were integers

# Keys and values of one step. Two steps are in flight in each of two or three programs of a processor: enough to cover
# the latency of HBM, for 4.8 TB/s times 0.7 µs over an H200's 132 processors is 25 KiB.
TILE_BYTES = 32 * 1024


def padded(size: int) -> int:
    """The width of a tile for `size` rows or columns: a power of two that a tensor core can take."""
    return max(16, int(triton.next_power_of_2(size)))


def keys_of_tile(dk: int, dv: int, itemsize: int) -> int:
    """Keys of one step: a power of two from 16 to 128 with K and V of at most TILE_BYTES, if 16 are."""
    keys = TILE_BYTES // ((padded(dk) + padded(dv)) * itemsize)
    return max(16, min(128, 1 << (keys.bit_length() - 1)))


def sizes_of_heads(block_size: int, heads: int, group: int, dk: int, dv: int) -> dict[str, int]:
    """What both kernels are compiled for, beside their tiles."""
    return {
        "BLOCK_SIZE": block_size,
        "HEADS": heads,
        "GROUP": group,
        "DK": dk,
        "DV": dv,
        "DK_PADDED": padded(dk),
        "DV_PADDED": padded(dv),
    }


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What q . k is multiplied by, and what the squashed result is (unused without softcap), both with log2(e).

    softcap * tanh(scale q . k / softcap) needs e^-2x of x = scale q . k / softcap, so the first has that 2 as well.
    """
    log2_e = 1 / math.log(2)
    return (2 * scale / softcap * log2_e, softcap * log2_e) if softcap else (scale * log2_e, 0.0)


@triton.jit
def attend_tile(
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    slots: tl.tensor,
    loaded: tl.tensor,
    visible: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Add one tile of N keys to the running softmax of M queries (Milakov and Gimelshein, 2018).

    peak, total: [M] the largest score so far and the sum of 2^(score - peak). acc: [M, padded DV] the same sum over
    values. q: [M, padded DK], zero beyond DK. keys: [N] positions. loaded: [N] which of them any query sees; the others
    are never read. visible: [M, N] or [1, N], which query sees which. Both count only if MASKED. k_cache, v_cache: at
    slot 0 of the head. table: the sequence's row. scale, softcap: see `score_factors`.

    Returns: the new peak, total and acc.
    """
    k = _load_rows(k_cache, slots, loaded, HEADS, DK, q.shape[1], MASKED).to(q.dtype)
    scores = _product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * scale
    if HAS_SOFTCAP:  # tanh(x) = 2 / (1 + e^-2x) - 1
        scores = softcap * (2.0 / (1.0 + tl.exp2(-scores)) - 1.0)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet: no -inf - -inf
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    v = _load_rows(v_cache, slots, loaded, HEADS, DV, acc.shape[1], MASKED).to(q.dtype)
    acc = _product(weights.to(q.dtype), v, acc * decay[:, None])
    return new_peak, total, acc


@triton.jit
def find_blocks(table: tl.tensor, keys: tl.tensor, loaded: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """The blocks [N] of a sequence's positions; int64, since the slots of a big pool hold more than 2^31 elements."""
    return tl.load(table + keys // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """acc + a b, exact in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _load_rows(
    cache: tl.tensor,
    slots: tl.tensor,
    loaded: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[N, WIDTH] rows of one head at N slots, zero beyond DIM and where not loaded."""
    dims = tl.arange(0, WIDTH)
    pointers = cache + slots[:, None] * (HEADS * DIM) + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=loaded[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM < WIDTH:
        rows = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def load_queries(
    q: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    valid: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    k_cache: tl.tensor,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """[M, WIDTH] queries of (token, head) pairs, zero beyond DK and where not valid.

    In the cache's dtype if it is theirs, else in float32: a product of two dtypes must not round the wider one.
    """
    dims = tl.arange(0, WIDTH)
    rows = tokens.to(tl.int64) * stride_token + heads * stride_head
    pointers = q + rows[:, None] + dims[None, :] * stride_dim
    queries = tl.load(pointers, mask=valid[:, None] & (dims < DK)[None, :], other=0.0)
    return queries.to(q.dtype.element_ty if q.dtype.element_ty == k_cache.dtype.element_ty else tl.float32)


@triton.jit
def start_softmax(sinks: tl.tensor, heads: tl.tensor, valid: tl.tensor, joins: tl.tensor) -> tl.tuple:
    """Peak and total [M] before the first key: those of the heads' sinks if there are any and they join here."""
    if sinks is None:
        peak = tl.full(heads.shape, float("-inf"), tl.float32)
        total = tl.zeros(heads.shape, tl.float32)
    else:
        peak = tl.load(sinks + heads, mask=valid & joins, other=float("-inf")).to(tl.float32) * LOG2_E
        total = tl.where(valid & joins, 1.0, 0.0)
    return peak, total


@triton.jit
def store_rows(out: tl.tensor, rows: tl.tensor, values: tl.tensor, valid: tl.tensor, DIM: tl.constexpr) -> None:
    """Store the first DIM columns of values [M, .] as rows of the contiguous `out`, in its dtype, where valid."""
    dims = tl.arange(0, values.shape[1])
    pointers = out + rows[:, None] * DIM + dims[None, :]
    tl.store(pointers, values.to(out.dtype.element_ty), mask=valid[:, None] & (dims < DIM)[None, :])
