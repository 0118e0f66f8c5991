"""Writes of K and V into the paged cache, as they are or after rope: `write_kv` and `rope_write_kv`.

As the reference says, but for float32, bfloat16 and float16 only, and what is no slot is not found out: nothing of the
device is read on the host.

Legend: T tokens, Hq query heads, Hk kv heads, D and Dv head dims, R dimensions that rope turns. One launch does the
work of a step: a program takes one token and a group of heads, of q first, then of k, then of v. Programs of padding
tokens write the null slot at once, each number of it whole; no other slot is written twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.variants import Variant

TILE = 1024  # elements of a program: 16 for each of its 64 threads, which load 16 bytes of bfloat16 at once
NUM_WARPS = 2  # few, so that a lone token still spreads over several multiprocessors


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ops.reference.write_kv. Asserts that the sizes fit."""
    _check(k, v, k_cache, v_cache, slot_mapping)
    heads, d, dv = k.shape[1], k.shape[2], v.shape[2]
    block = _heads_of_a_program(heads, max(d, dv))
    _write_kv_kernel[(k.shape[0], 2 * triton.cdiv(heads, block))](
        *(k, v, k_cache, v_cache, slot_mapping),
        *(*k.stride(), *v.stride(), slot_mapping.stride(0)),
        HK=heads,
        D=d,
        DV=dv,
        BLOCK_H=block,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK_DV=triton.next_power_of_2(dv),
        num_warps=NUM_WARPS,
    )


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
    """See ops.reference.rope_write_kv. Asserts that the sizes fit."""
    _check(k, v, k_cache, v_cache, slot_mapping)
    (tokens, q_heads, d), (heads, dv), turned = q.shape, v.shape[1:], cos.shape[1]
    assert (tokens, d) == (k.shape[0], k.shape[2]), f"q is {list(q.shape)} and k {list(k.shape)}"
    assert cos.shape == sin.shape == (tokens, turned), f"cos is {list(cos.shape)} and sin {list(sin.shape)}"
    assert turned % 2 == 0, f"cos and sin have {turned} columns, which is odd"
    assert turned <= d, f"cos and sin have {turned} columns, and heads {d} dimensions"
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = _heads_of_a_program(max(q_heads, heads), max(d, dv))
    _rope_write_kv_kernel[(tokens, triton.cdiv(q_heads, block) + 2 * triton.cdiv(heads, block))](
        *(q, k, v, cos, sin, rotated, k_cache, v_cache, slot_mapping),
        *(*q.stride(), *k.stride(), *v.stride(), *cos.stride(), *sin.stride(), slot_mapping.stride(0)),
        HQ=q_heads,
        HK=heads,
        D=d,
        DV=dv,
        R=turned,
        BLOCK_H=block,
        BLOCK_HALF=triton.next_power_of_2(max(1, turned // 2)),
        BLOCK_REST=triton.next_power_of_2(max(1, d - turned)),
        BLOCK_DV=triton.next_power_of_2(dv),
        num_warps=NUM_WARPS,
    )
    return rotated


def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Assert what the kernels cannot notice: they would write into what lies behind."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert cache.is_contiguous(), f"a cache has strides {cache.stride()}"
        assert new.shape[1:] == cache.shape[2:], f"{list(new.shape)} does not go into a cache {list(cache.shape)}"
        assert new.shape[:1] == slot_mapping.shape, f"{list(new.shape)} for {list(slot_mapping.shape)} slots"
    assert k_cache.shape[:2] == v_cache.shape[:2], f"caches are {list(k_cache.shape)} and {list(v_cache.shape)}"


def _heads_of_a_program(heads: int, d: int) -> int:
    return min(triton.next_power_of_2(heads), max(1, TILE // triton.next_power_of_2(d)))


@triton.jit
def _write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    k_token: tl.tensor,  # strides, each named after what it steps over
    k_head: tl.tensor,
    k_dim: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    slots_token: tl.tensor,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + token * slots_token).to(tl.int64)
    k_groups: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    if group < k_groups:
        heads = _heads(group, BLOCK_H)
        _copy(k + token * k_token, k_cache + slot * (HK * D), heads, k_head, k_dim, HK, 0, D, D, BLOCK_D)
    else:
        heads = _heads(group - k_groups, BLOCK_H)
        _copy(v + token * v_token, v_cache + slot * (HK * DV), heads, v_head, v_dim, HK, 0, DV, DV, BLOCK_DV)


@triton.jit
def _rope_write_kv_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotated: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    q_token: tl.tensor,  # strides, each named after what it steps over
    q_head: tl.tensor,
    q_dim: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    k_dim: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    cos_token: tl.tensor,
    cos_dim: tl.tensor,
    sin_token: tl.tensor,
    sin_dim: tl.tensor,
    slots_token: tl.tensor,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cos += token * cos_token
    sin += token * sin_token
    q_groups: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    k_groups: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    if group < q_groups:
        heads = _heads(group, BLOCK_H)
        source, target = q + token * q_token, rotated + token * (HQ * D)
        _rotate(source, target, heads, q_head, q_dim, cos, sin, cos_dim, sin_dim, HQ, D, R, BLOCK_HALF, BLOCK_REST)
    else:
        slot = tl.load(slots + token * slots_token).to(tl.int64)
        if group < q_groups + k_groups:
            heads = _heads(group - q_groups, BLOCK_H)
            source, target = k + token * k_token, k_cache + slot * (HK * D)
            _rotate(source, target, heads, k_head, k_dim, cos, sin, cos_dim, sin_dim, HK, D, R, BLOCK_HALF, BLOCK_REST)
        else:
            heads = _heads(group - q_groups - k_groups, BLOCK_H)
            _copy(v + token * v_token, v_cache + slot * (HK * DV), heads, v_head, v_dim, HK, 0, DV, DV, BLOCK_DV)


@triton.jit
def _heads(group: tl.tensor, BLOCK_H: tl.constexpr) -> tl.tensor:
    # int64, since a stride over heads may be that of a whole [H, T, D] tensor.
    return (group * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]


@triton.jit
def _rotate(
    source: tl.tensor,
    target: tl.tensor,
    heads: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    cos_dim: tl.tensor,
    sin_dim: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Rope on one token's heads [H, D], of any strides, into contiguous ones."""
    if R > 0:
        half: tl.constexpr = R // 2
        cols = tl.arange(0, BLOCK_HALF).to(tl.int64)[None, :]
        mask = (heads < H) & (cols < half)
        # For every head anew, from the nearest cache: a row alone would be loaded 2 bytes a thread and dealt out.
        none = heads * 0
        cos_1 = tl.load(cos + none + cols * cos_dim, mask=mask, other=0).to(tl.float32)
        cos_2 = tl.load(cos + none + (cols + half) * cos_dim, mask=mask, other=0).to(tl.float32)
        sin_1 = tl.load(sin + none + cols * sin_dim, mask=mask, other=0).to(tl.float32)
        sin_2 = tl.load(sin + none + (cols + half) * sin_dim, mask=mask, other=0).to(tl.float32)
        source_1 = source + heads * stride_head + cols * stride_dim
        x_1 = tl.load(source_1, mask=mask, other=0).to(tl.float32)
        x_2 = tl.load(source_1 + half * stride_dim, mask=mask, other=0).to(tl.float32)
        target_1 = target + heads * D + cols
        tl.store(target_1, (x_1 * cos_1 - x_2 * sin_1).to(target.dtype.element_ty), mask=mask)
        tl.store(target_1 + half, (x_2 * cos_2 + x_1 * sin_2).to(target.dtype.element_ty), mask=mask)
    if R < D:
        _copy(source, target, heads, stride_head, stride_dim, H, R, D - R, D, BLOCK_REST)


@triton.jit
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    heads: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    H: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cast dimensions FIRST to FIRST + COUNT of one token's heads [H, D], of any strides, into contiguous ones."""
    cols = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    mask = (heads < H) & (cols < COUNT)
    x = tl.load(source + heads * stride_head + (cols + FIRST) * stride_dim, mask=mask, other=0)
    tl.store(target + heads * D + cols + FIRST, x.to(target.dtype.element_ty), mask=mask)


_POINTERS = ("q", "k", "v", "cos", "sin", "rotated", "k_cache", "v_cache")
_STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "cos_token", "sin_token")


def _variant(hq: int, hk: int, d: int) -> Variant:
    """All of bfloat16, in one packed projection."""
    block = _heads_of_a_program(hq, d)
    ones = dict.fromkeys(("q_dim", "k_dim", "v_dim", "cos_dim", "sin_dim", "slots_token"), 1)
    sizes = {"HQ": hq, "HK": hk, "D": d, "DV": d, "R": d, "BLOCK_H": block, "BLOCK_HALF": d // 2, "BLOCK_REST": 1}
    constexprs = {**ones, **sizes, "BLOCK_DV": d}
    types = dict.fromkeys(_POINTERS, "*bf16") | {"slots": "*i64"} | dict.fromkeys(_STRIDES, "i32")
    signature = {name: types.get(name, "constexpr") for name in _rope_write_kv_kernel.arg_names}
    aligned = frozenset((*_POINTERS, "slots", *_STRIDES))
    name = f"rope_write_kv bf16 D{d} Hq{hq} Hk{hk}"
    return Variant(name, _rope_write_kv_kernel, signature, constexprs, aligned, NUM_WARPS)


def _write_variant(hk: int, d: int) -> Variant:
    pointers, strides = ("k", "v", "k_cache", "v_cache"), ("k_token", "k_head", "v_token", "v_head")
    ones = dict.fromkeys(("k_dim", "v_dim", "slots_token"), 1)
    constexprs = {
        **ones,
        "HK": hk,
        "D": d,
        "DV": d,
        "BLOCK_H": _heads_of_a_program(hk, d),
        "BLOCK_D": d,
        "BLOCK_DV": d,
    }
    types = dict.fromkeys(pointers, "*bf16") | {"slots": "*i64"} | dict.fromkeys(strides, "i32")
    signature = {name: types.get(name, "constexpr") for name in _write_kv_kernel.arg_names}
    aligned = frozenset((*pointers, "slots", *strides))
    return Variant(f"write_kv bf16 D{d} Hk{hk}", _write_kv_kernel, signature, constexprs, aligned, NUM_WARPS)


COMPILED = [_variant(9, 3, 64), _variant(32, 8, 64), _variant(32, 8, 128), _write_variant(8, 128)]
"""What SmolLM2, Llama-3.2-1B and Llama-3-8B launch in bfloat16."""
