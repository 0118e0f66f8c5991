"""Sampling: `sample`. As ops.sample says, but for float32, bfloat16 and float16 only, and on the device alone.

Legend: L rows, V vocabulary, M masked ids a row, C = V / _CHUNK chunks, G = V / _GROUP groups, both rounded up.

Three launches, whatever the rows ask for:

1. One program a row and chunk finds the chunk's best logit, which is all that a greedy row costs, and for rows with
   top_k or top_p the peak of each group.
2. One program a row takes the best of the chunks: the token of a greedy row. For the others it finds the *floor*: the
   lowest logit that may be drawn. All filters come down to one, since scores and probabilities rise with the logits.
3. One program a row and chunk adds the noise to what lies above the floor, and the row's last program to finish has
   the token. Programs of greedy rows, and chunks below the floor, leave at once.

The search for the floor bisects the images of floats as the specification does, by three thresholds a pass, and passes
only over the groups whose peaks say that they matter: of a row of 128k logits few do.

Elements are summed in an order that depends on the row alone, and maxima have none: neighbours change nothing. Draws
differ from the specification's where exp, log and sums round differently: if the two best are within some 1e-6, or the
probabilities add up to top_p up to rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.variants import Variant

_GROUP = tl.constexpr(32)  # ids; their masks are the bits of an int32, and 16 bits each they fill two sectors of memory
_CHUNK = tl.constexpr(2048)  # ids: 16 for each of 128 threads, and 63 programs for a lone row of 128k
_TILE = tl.constexpr(128)  # groups that a pass takes at once, 8 logits for each of 512 threads: of 16, registers spill
_LIST = tl.constexpr(1024)  # groups whose peaks are compared at once when the list of groups is shortened
_CHUNK_WARPS, _SEARCH_WARPS = 4, 16
_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits that are always 0 in the value as float32
_PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seed", "position", "masked_ids"]

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # of splitmix64, as in ops.sample
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOW_31 = tl.constexpr(2**31 - 1)
_LOW_63 = tl.constexpr(2**63 - 1)
_LEAST_KEY = tl.constexpr(-(2**63))
_LEAST_U = tl.constexpr(2.0**-63)
_MOST_U = tl.constexpr(1 - 2.0**-24)


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
    """See ops.sample.sample. Of a row with NaN it returns the first, as a greedy row does there."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()  # groups are loaded as wholes
    temperature, top_k, top_p, min_p = (one.contiguous() for one in (temperature, top_k, top_p, min_p))
    seed, position, masked_ids = seed.contiguous(), position.contiguous(), masked_ids.contiguous()
    chunks, groups = triton.cdiv(vocabulary, _CHUNK.value), triton.cdiv(vocabulary, _GROUP.value)

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens = scratch(rows, dtype=torch.int64)
    keys = scratch(rows, chunks, dtype=torch.int64)
    banned = scratch(rows, groups, dtype=torch.int32)
    group_peaks = scratch(rows, groups, dtype=torch.float32)
    active = scratch(rows, groups, dtype=torch.int32)
    bounds = scratch(rows, 2, dtype=torch.float32)
    best = scratch(rows, dtype=torch.int64)
    unfinished = scratch(rows, dtype=torch.int32)
    source, masks = (logits, logits.stride(0)), (masked_ids, masked_ids.shape[1], banned)
    _peaks_kernel[(rows, chunks)](
        *(*source, temperature, top_k, top_p, *masks, keys, group_peaks), V=vocabulary, num_warps=_CHUNK_WARPS
    )
    _floors_kernel[(rows,)](
        *(*source, temperature, top_k, top_p, min_p, *masks, keys, group_peaks),
        *(active, bounds, best, unfinished, tokens),
        V=vocabulary,
        BLOCK_C=triton.next_power_of_2(chunks),
        SHIFT=_SHIFT[logits.dtype],
        num_warps=_SEARCH_WARPS,
    )
    _draws_kernel[(rows, chunks)](
        *(*source, temperature, seed, position, *masks, keys, bounds, best, unfinished, tokens),
        V=vocabulary,
        num_warps=_CHUNK_WARPS,
    )
    return tokens


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=_PARAMETERS)
def _peaks_kernel(
    logits: tl.tensor,
    logits_row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    masked_ids: tl.tensor,
    M: tl.tensor,
    banned: tl.tensor,
    keys: tl.tensor,
    group_peaks: tl.tensor,
    V: tl.constexpr,
) -> None:
    """Writes [L, C] keys of the chunks' best logits, and the other rows' [L, G] peaks and bits of masked ids."""
    GROUPS: tl.constexpr = (V + _GROUP - 1) // _GROUP
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = chunk * (_CHUNK // _GROUP) + tl.arange(0, _CHUNK // _GROUP)
    ids = _ids_of(groups)
    values = tl.load(logits + row * logits_row + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    if _is_masked(masked_ids + row * M, M):
        words = tl.zeros((_CHUNK // _GROUP,), tl.int32)
        for column in range(M):
            one = tl.load(masked_ids + row * M + column)  # -1 lies in group -1
            words |= tl.where(groups == one >> 5, 1 << (one & 31), 0)
        values = _without(values, words)
        tl.store(banned + row * GROUPS + groups, words, mask=groups < GROUPS)
    key = tl.max(tl.max(_key(values, ids), 1), 0)
    tl.store(keys + row * tl.num_programs(1) + chunk, key)
    if _is_searched(tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), V):
        tl.store(group_peaks + row * GROUPS + groups, tl.max(values, 1), mask=groups < GROUPS)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=_PARAMETERS)
def _floors_kernel(
    logits: tl.tensor,
    logits_row: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    masked_ids: tl.tensor,
    M: tl.tensor,
    banned: tl.tensor,
    keys: tl.tensor,
    group_peaks: tl.tensor,
    active: tl.tensor,
    bounds: tl.tensor,
    best: tl.tensor,
    unfinished: tl.tensor,
    tokens: tl.tensor,
    V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    """Writes greedy rows' tokens, and [L, 2] peaks and floors; a greedy row's peak is inf: nothing is left to do."""
    CHUNKS: tl.constexpr = (V + _CHUNK - 1) // _CHUNK
    GROUPS: tl.constexpr = (V + _GROUP - 1) // _GROUP
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    key = tl.max(tl.load(keys + row * CHUNKS + columns, mask=columns < CHUNKS, other=_LEAST_KEY), 0)
    peak = _logit_of(key >> 32, 0)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    if (heat == 0) | (k == 1) | (peak != peak) | (tl.abs(peak) == float("inf")):
        tl.store(bounds + row * 2, float("inf"))
        tl.store(tokens + row, _id_of(key))
    else:
        low = _image_of(tl.full((), float("-inf"), tl.float32)) >> SHIFT
        top = key >> (32 + SHIFT)
        if _is_searched(heat, k, p, V):
            logits += row * logits_row
            banned += row * GROUPS
            group_peaks += row * GROUPS
            active += row * GROUPS
            is_masked = _is_masked(masked_ids + row * M, M)
            for start in range(0, GROUPS, _LIST):
                slots = start + tl.arange(0, _LIST)
                tl.store(active + slots, slots, mask=slots < GROUPS)
            tl.debug_barrier()
            count = tl.full((), GROUPS, tl.int32)
            if (k > 0) & (k < V):
                # Where k groups have such a peak there are k such logits, so the search goes on from there. The
                # peaks are themselves searched in groups: the list still begins with all of those.
                folds = tl.cdiv(GROUPS, _GROUP)
                bound = _search(
                    low, top, k, group_peaks, banned, False, active, folds, peak, heat, GROUPS, False, SHIFT
                )
                bound = _lowest(low, bound, _score(_logit_of(bound, SHIFT), peak, heat), peak, heat, False, SHIFT)
                count = _compact(active, count, group_peaks, _logit_of(bound, SHIFT))
                bound = _search(bound, top, k, logits, banned, is_masked, active, count, peak, heat, V, False, SHIFT)
                low = _lowest(low, bound, _score(_logit_of(bound, SHIFT), peak, heat), peak, heat, False, SHIFT)
            if p < 1:
                # A first pass for the sum, at likely thresholds: few of the floats below the peak are near it.
                second = tl.minimum(tl.maximum(_image_of(peak - 8 * heat) >> SHIFT, low), top)
                third = tl.minimum(tl.maximum(_image_of(peak - 2 * heat) >> SHIFT, low), top)
                total, at_second, at_third = _measure(
                    low, second, third, logits, banned, is_masked, active, count, peak, heat, V, True, SHIFT
                )
                enough = p * total
                bound, end = _narrow(low, top, low, second, third, True, at_second >= enough, at_third >= enough)
                count = _compact(active, count, group_peaks, _logit_of(bound, SHIFT))
                bound = _search(
                    bound, end, enough, logits, banned, is_masked, active, count, peak, heat, V, True, SHIFT
                )
                low = _lowest(low, bound, _weight(_logit_of(bound, SHIFT), peak, heat), peak, heat, True, SHIFT)
        if least > 0:
            low = _lowest(low, top, least, peak, heat, True, SHIFT)
        tl.store(bounds + row * 2, peak)
        tl.store(bounds + row * 2 + 1, _logit_of(low, SHIFT))
        tl.store(best + row, _LEAST_KEY)
        tl.store(unfinished + row, CHUNKS)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=_PARAMETERS)
def _draws_kernel(
    logits: tl.tensor,
    logits_row: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    masked_ids: tl.tensor,
    M: tl.tensor,
    banned: tl.tensor,
    keys: tl.tensor,
    bounds: tl.tensor,
    best: tl.tensor,
    unfinished: tl.tensor,
    tokens: tl.tensor,
    V: tl.constexpr,
) -> None:
    """Writes the tokens of the rows that are not greedy."""
    GROUPS: tl.constexpr = (V + _GROUP - 1) // _GROUP
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = tl.load(bounds + row * 2)
    if peak < float("inf"):
        floor = tl.load(bounds + row * 2 + 1)
        if _logit_of(tl.load(keys + row * tl.num_programs(1) + chunk) >> 32, 0) >= floor:
            groups = chunk * (_CHUNK // _GROUP) + tl.arange(0, _CHUNK // _GROUP)
            ids = _ids_of(groups)
            values = tl.load(logits + row * logits_row + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            if _is_masked(masked_ids + row * M, M):
                words = tl.load(banned + row * GROUPS + groups, mask=groups < GROUPS, other=0)
                values = _without(values, words)
            noise = _gumbel(tl.load(seed + row), tl.load(position + row), ids)
            drawn = _score(values, peak, tl.load(temperature + row)) + noise
            drawn = tl.where(values >= floor, drawn, float("-inf"))
            tl.atomic_max(best + row, tl.max(tl.max(_key(drawn, ids), 1), 0))
        if tl.atomic_add(unfinished + row, -1) == 1:
            # A maximum with the least is a read that comes after the others' writes.
            tl.store(tokens + row, _id_of(tl.atomic_max(best + row, _LEAST_KEY)))


@triton.jit
def _search(
    low: tl.tensor,
    high: tl.tensor,
    enough: tl.tensor,
    values: tl.tensor,
    banned: tl.tensor,
    is_masked: tl.tensor,
    active: tl.tensor,
    count: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    N: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """The largest image in (low, high] at or above which there is enough, else low. By quarters."""
    while low < high:
        width = high - low  # at least 1, so that no threshold is low itself
        first, second, third = low + (width + 3) // 4, low + (width + 1) // 2, low + (3 * width + 3) // 4
        at_first, at_second, at_third = _measure(
            first, second, third, values, banned, is_masked, active, count, peak, heat, N, BY_WEIGHT, SHIFT
        )
        low, high = _narrow(
            low, high, first, second, third, at_first >= enough, at_second >= enough, at_third >= enough
        )
    return low


@triton.jit
def _narrow(
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    first_holds: tl.tensor,
    second_holds: tl.tensor,
    third_holds: tl.tensor,
) -> tl.tensor:
    """The part of [low, high] from the last threshold that holds to below the one that does not; they ascend."""
    new_low = tl.where(third_holds, third, tl.where(second_holds, second, tl.where(first_holds, first, low)))
    beyond = tl.where(third_holds, high + 1, tl.where(second_holds, third, tl.where(first_holds, second, first)))
    return new_low, beyond - 1


@triton.jit
def _measure(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    values: tl.tensor,
    banned: tl.tensor,
    is_masked: tl.tensor,
    active: tl.tensor,
    count: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    N: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """How many of N values in the active groups are at or above each of three images, or what their weights sum to."""
    SUM: tl.constexpr = tl.float32 if BY_WEIGHT else tl.int32
    first, second, third = _logit_of(first, SHIFT), _logit_of(second, SHIFT), _logit_of(third, SHIFT)
    at_first = tl.zeros((_TILE, _GROUP), SUM)
    at_second = tl.zeros((_TILE, _GROUP), SUM)
    at_third = tl.zeros((_TILE, _GROUP), SUM)
    for start in range(0, count, _TILE):
        slots = start + tl.arange(0, _TILE)
        inside = slots < count
        groups = tl.load(active + slots, mask=inside, other=0)
        ids = _ids_of(groups)
        found = tl.load(values + ids, mask=inside[:, None] & (ids < N), other=float("-inf")).to(tl.float32)
        if is_masked:
            found = _without(found, tl.load(banned + groups, mask=inside, other=0))
        one = _weight(found, peak, heat) if BY_WEIGHT else tl.full((_TILE, _GROUP), 1, SUM)
        at_first += tl.where(found >= first, one, 0)
        at_second += tl.where(found >= second, one, 0)
        at_third += tl.where(found >= third, one, 0)
    return tl.sum(tl.sum(at_first, 1), 0), tl.sum(tl.sum(at_second, 1), 0), tl.sum(tl.sum(at_third, 1), 0)


@triton.jit
def _compact(active: tl.tensor, count: tl.tensor, group_peaks: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Leave only those active groups, in their order, whose peak is at least `floor`. Returns how many they are."""
    kept = tl.full((), 0, tl.int32)
    for start in range(0, count, _LIST):
        slots = start + tl.arange(0, _LIST)
        inside = slots < count
        groups = tl.load(active + slots, mask=inside, other=0)
        alive = inside & (tl.load(group_peaks + groups, mask=inside, other=float("-inf")) >= floor)
        places = kept + tl.cumsum(alive.to(tl.int32), 0) - 1
        tl.debug_barrier()  # all have loaded before any stores
        tl.store(active + places, groups, mask=alive)
        kept += tl.sum(alive.to(tl.int32), 0)
    tl.debug_barrier()
    return kept


@triton.jit
def _lowest(
    low: tl.tensor,
    high: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """The lowest image in [low, high] whose score or weight is at least `least`, which high's is."""
    tried = tl.arange(0, 1024)  # at once, so that four times suffice
    while low < high:
        step = tl.cdiv(high - low, 1024)
        images = tl.minimum(low + tried * step, high)
        logits = _logit_of(images, SHIFT)
        found = _weight(logits, peak, heat) if BY_WEIGHT else _score(logits, peak, heat)
        high = tl.min(tl.where(found >= least, images, high), 0)
        low = tl.maximum(low, high - step + 1)
    return high


@triton.jit
def _score(logits: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """At most 0: a tiny temperature cannot overflow. Rounded as the specification rounds."""
    return tl.div_rn(logits - peak, heat)


@triton.jit
def _weight(logits: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """The probability divided by the largest one."""
    return tl.exp(_score(logits, peak, heat))


@triton.jit
def _is_searched(heat: tl.tensor, k: tl.tensor, p: tl.tensor, V: tl.constexpr) -> tl.tensor:
    """Whether the floor of a row depends on more than its peak."""
    return (heat != 0) & (k != 1) & ((p < 1) | ((k > 0) & (k < V)))


@triton.jit
def _is_masked(masked_ids: tl.tensor, M: tl.tensor) -> tl.tensor:
    """Whether there is an id among a row's M."""
    greatest = tl.full((), -1, tl.int32)
    for start in range(0, M, 128):
        columns = start + tl.arange(0, 128)
        greatest = tl.maximum(greatest, tl.max(tl.load(masked_ids + columns, mask=columns < M, other=-1), 0))
    return greatest >= 0


@triton.jit
def _without(values: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Values [N, _GROUP], -inf where words [N] have a bit."""
    bits = (words[:, None] >> tl.arange(0, _GROUP)[None, :]) & 1
    return tl.where(bits == 0, values, float("-inf"))


@triton.jit
def _ids_of(groups: tl.tensor) -> tl.tensor:
    return groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]


@triton.jit
def _image_of(values: tl.tensor) -> tl.tensor:
    """The int32 image of float32 values, as int64: it preserves order; -0.0 becomes 0.0, and NaN is the largest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    image = tl.where(bits < 0, bits ^ _LOW_31, bits)
    return tl.where(values == values, image, _LOW_31).to(tl.int64)


@triton.jit
def _logit_of(image: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The float32 of an image without its last SHIFT bits: of a negative number they were ones."""
    bits = tl.where(image < 0, ((image + 1) << SHIFT) - 1, image << SHIFT).to(tl.int32)
    return tl.where(bits < 0, bits ^ _LOW_31, bits).to(tl.float32, bitcast=True)


@triton.jit
def _key(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """int64 keys, of which the largest belongs to the largest value, of equal ones to the lowest id."""
    return (_image_of(values) << 32) | (ids ^ _LOW_31)


@triton.jit
def _id_of(key: tl.tensor) -> tl.tensor:
    return (key & _LOW_31) ^ _LOW_31


@triton.jit
def _gumbel(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The specification's noise, with log1p(-u) as log(y) * -u / (y - 1), y = 1 - u: it mends the rounding of y.

    (W. Kahan's formula; Triton's interpreter has no log1p.)
    """
    key = _mix(_mix(seed.to(tl.uint64) + _GAMMA) + position.to(tl.uint64) * _GAMMA)
    bits = _mix(key + (ids.to(tl.uint64) + 1) * _GAMMA) & _LOW_63
    u = tl.minimum(tl.maximum(bits.to(tl.float32) * _LEAST_U, _LEAST_U), _MOST_U)
    y = 1.0 - u
    exponential = tl.where(y == 1.0, u, tl.log(y) * (u / tl.where(y == 1.0, -1.0, y - 1.0)))
    return -tl.log(exponential)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


def _variants(dtype: str, vocabulary: int) -> list[Variant]:
    """What a model of that vocabulary launches, its logits' rows aligned."""
    source = {"logits": f"*{dtype}", "logits_row": "i32"}
    filters = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32"}
    masks = {"masked_ids": "*i32", "M": "i32", "banned": "*i32", "keys": "*i64"}
    search = {"min_p": "*fp32", "group_peaks": "*fp32", "active": "*i32", "bounds": "*fp32"}
    noise = {"temperature": "*fp32", "seed": "*i64", "position": "*i64", "bounds": "*fp32"}
    results = {"best": "*i64", "unfinished": "*i32", "tokens": "*i64"}
    blocks = {
        "BLOCK_C": triton.next_power_of_2(triton.cdiv(vocabulary, _CHUNK.value)),
        "SHIFT": _SHIFT[{"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]],
    }
    launches: list[tuple[str, Any, dict[str, str], dict[str, int], int]] = [
        ("peaks", _peaks_kernel, source | filters | masks | {"group_peaks": "*fp32"}, {}, _CHUNK_WARPS),
        ("floors", _floors_kernel, source | filters | masks | search | results, blocks, _SEARCH_WARPS),
        ("draws", _draws_kernel, source | masks | noise | results, {}, _CHUNK_WARPS),
    ]
    return [
        Variant(
            name=f"sample {step} {dtype} V{vocabulary}",
            kernel=kernel,
            signature=signature | dict.fromkeys(["V", *constants], "constexpr"),
            constexprs={"V": vocabulary, **constants},
            aligned=frozenset(signature) - {*_PARAMETERS, "M"},
            num_warps=num_warps,
        )
        for step, kernel, signature, constants, num_warps in launches
    ]


COMPILED = [*_variants("bf16", 128256), *_variants("fp32", 151936)]
"""Llama 3 with bfloat16 logits, and Qwen 3 with float32 logits."""
