"""The specification of `sample`: one token a row, each row with its own parameters.

Legend: L rows, V vocabulary, M masked ids a row.

A row's draw is a pure function of (its logits, its parameters, seed, position), to the bit. The float work is done row
by row for that reason: vectorised over the batch, a row's elements would fall into other SIMD lanes, tails and
partial sums as its neighbours change, and log, exp and sums may then round differently. Integers cannot.
"""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

# splitmix64 (Steele, Lea and Flood 2014) as signed 64-bit numbers: the stream's step and the two multipliers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    masked_ids: Tensor,
) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [L, V], any float dtype; -inf is allowed. Work is done in float32.
        temperature: [L] float32; 0: greedy, the largest logit, of several the lowest id.
        top_k: [L] int32; keep the k largest, 0: all, 1: greedy.
        top_p: [L] float32 in (0, 1]; keep the fewest largest whose probabilities, among those top_k kept, reach top_p.
        min_p: [L] float32 in [0, 1]; keep what is at least min_p times as probable as the most probable.
        seed: [L] int64, the noise key of the row's request. Ignored by greedy rows.
        position: [L] int64, position of the token being drawn. Ignored by greedy rows.
        masked_ids: [L, M] int32 padded with -1, ids the row may not draw; M may be 0. At least one id must remain.

    Values equal to the last one kept are kept too. Returns: [L] int64 token ids.

    Reads parameters on the host, so it cannot be captured.
    """
    random = (temperature != 0) & (top_k != 1)
    banned = (masked_ids >= 0).any(1)
    tokens = logits.argmax(-1)  # torch promises the first of equal maxima
    rows: list[int] = (random | banned).nonzero().flatten().tolist()
    if not rows:
        return tokens
    keys = _mix(_mix(seed + _GAMMA) + position * _GAMMA)
    is_random, is_banned = random.tolist(), banned.tolist()
    filters = list(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True))
    for row in rows:
        row_logits = logits[row]
        if is_banned[row]:
            ids = masked_ids[row].to(torch.int64)
            row_logits = row_logits.index_fill(0, ids[ids >= 0], float("-inf"))
        tokens[row] = _draw(row_logits, *filters[row], keys[row]) if is_random[row] else row_logits.argmax()
    return tokens


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, key: Tensor) -> Tensor:
    """Draw one id from logits [V]: filter, then Gumbel-max. Returns a scalar int64 tensor."""
    scores = logits.to(torch.float32)
    peak = scores.max()
    if not bool(peak.isfinite()):  # nothing but -inf, or a certain +inf: no distribution to draw from
        return scores.argmax()
    scores = (scores - peak) / temperature  # <= 0: a tiny temperature cannot overflow
    ids = torch.arange(scores.shape[0], device=scores.device)
    if 0 < top_k < scores.shape[0]:
        kept = scores >= _threshold(scores, lambda top: int(top.count_nonzero()) >= top_k)
        ids, scores = ids[kept], scores[kept]
    if top_p < 1 or min_p > 0:
        kept = _probable(scores, top_p, min_p)
        ids, scores = ids[kept], scores[kept]
    return ids[(scores + _gumbel(key, ids)).argmax()]


def _probable(scores: Tensor, top_p: float, min_p: float) -> Tensor:
    """Return the bool mask of the scores that top_p, then min_p keep."""
    probs = scores.softmax(-1)
    kept = probs >= min_p * probs.max()
    if top_p < 1:
        # Zeros instead of a shorter sum: with the order of additions fixed, rounding is monotone in the set summed.
        kept &= probs >= _threshold(probs, lambda top: bool((probs * top).sum() >= top_p))
    return kept


def _threshold(values: Tensor, enough: Callable[[Tensor], bool]) -> float:
    """Return the largest float32 t for which `enough(values >= t)`, or the minimum of values if there is none.

    `enough` must hold for every superset of a mask it holds for. Bisects the floats between the extremes of `values`
    by their integer images, which finds t exactly in at most 32 halvings, each one pass over `values`: no sort.
    """
    low, high = _to_image(float(values.min())), _to_image(float(values.max()))
    while low < high:
        middle = (low + high + 1) // 2
        if enough(values >= _from_image(middle)):
            low = middle
        else:
            high = middle - 1
    return _from_image(low)


def _to_image(value: float) -> int:
    """Map a float32 value to an int32 so that order is preserved (-0.0 lies just below 0.0)."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def _from_image(image: int) -> float:
    bits = image if image >= 0 else image ^ 0x7FFFFFFF
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def _gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """Return float32 Gumbel noise for token ids (int64) under a row's scalar key.

    The noise is -log(-log(1 - u)), u uniform in (0, 1): large noise decides the draw and comes from small u, where
    float32 is dense. -log(u) would be cut off at 2**-24 of probability.
    """
    bits = _mix(key + (ids + 1) * _GAMMA) & (2**63 - 1)
    u = (bits.to(torch.float32) * 2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap; torch has no logical shift, so sign bits are masked off."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))
