"""The Triton kernels for norms, activations, cache writes, rope and whole blocks, against the reference in float64.

With a GPU they are compiled and run there; without one Triton's interpreter runs them on the CPU.

Budgets bound the roundings that a kernel does in float32, U relative each, and the one to the output's dtype. gamma(n)
bounds n of them (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); approximate instructions of a
GPU are off by up to 2 units in the last place, that is 4 U.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
import triton.runtime.interpreter
from torch._dynamo.testing import CompileCounterWithBackend

from ops import reference
from ops.schema import overload
from ops.triton import blocks, norm
from ops.triton.library import FILES, interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy's, of the interpreter: infinities are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
NAN, INF = float("nan"), float("inf")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ONE_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
BOTH_DTYPES = pytest.mark.parametrize(
    ("dtype", "other"), [(x, y) for x in DTYPES.values() for y in DTYPES.values()], ids=lambda x: str(x)[6:]
)
WIDTHS, TOKENS = (1, 7, 80, 96, 576), (1, 3, 65)
U = torch.finfo(torch.float32).eps / 2
OPS = SimpleNamespace(**{op: overload(op, "triton") for op in FILES})


@pytest.fixture(autouse=True)
def round_to_nearest(monkeypatch):
    """Have the interpreter round to bfloat16 as a GPU does, to nearest even: it cuts off the bits instead."""
    if not interpreting():
        return
    convert = triton.runtime.interpreter._convert_float

    def rounding(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        rounded = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", rounding)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def full(shape, value, dtype):
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def gamma(n):
    return n * U / (1 - n * U)


def assert_within_budget(out, exact, error):
    """The difference is at most `error`, and half a unit in the last place of what the output's dtype can hold."""
    info = torch.finfo(out.dtype)
    rounding = info.eps / 2 * (exact.abs() + error).clamp(min=info.tiny)
    assert out.shape == exact.shape
    assert out.is_contiguous()
    assert ((out.double() - exact).abs() <= error + rounding).all()


def assert_same_bits(first, second):
    assert torch.equal(first.view(BITS[first.dtype]), second.view(BITS[second.dtype]))


def strided_views(x):
    """x [T, H, D] in other layouts: between NaN, permuted, and with columns apart, then with a fourth dimension."""
    tokens, heads, d = x.shape
    merged = x.new_full((1, tokens, (heads + 2) * d), NAN)
    view = merged[..., d:-d].view(1, tokens, heads, d).copy_(x)
    return [
        view[0],
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0],
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        view,
        torch.stack([x, x], 1)[:, :1].transpose(1, 2),
    ]


# Norms.


def norm_error(exact):
    """A thread adds 16 squares, and a tree of at most 13 levels the rest; with the squares, the mean and eps, these
    roundings count half under the root. Then come its reciprocal, offset + weight, and two products."""
    return exact.abs() * gamma((16 + 13 + 3) / 2 + 4 + 3)


@BOTH_DTYPES
def test_rms_norm(dtype, other):
    for d in WIDTHS:
        weight = random(d, dtype=other)
        for tokens in TOKENS if d != 576 else (1, 3):
            x = random(tokens, d, dtype=dtype)
            for eps, offset in ((1e-6, 0.0), (0.1, 1.0)):
                exact = reference.rms_norm(x.double(), weight.double(), eps, offset)
                out = OPS.rms_norm(x, weight, eps, offset)
                assert out.dtype == dtype
                assert_within_budget(out, exact, norm_error(exact))


@BOTH_DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(dtype, other, weight_dtype):
    """The sum is rounded before it is normalised."""
    for d in WIDTHS:
        weight = random(d, dtype=weight_dtype)
        for tokens in TOKENS if d != 576 else (1, 3):
            x, residual = random(tokens, d, dtype=dtype), random(tokens, d).flip(0).to(other)
            normed, total = OPS.add_rms_norm(x, residual, weight, 1e-6, 1.0)
            assert torch.equal(total, (x.float() + residual.float()).to(dtype))
            assert total.is_contiguous()
            assert normed.dtype == dtype
            exact = reference.rms_norm(total.double(), weight.double(), 1e-6, 1.0)
            assert_within_budget(normed, exact, norm_error(exact))


@ONE_DTYPE
@pytest.mark.parametrize("d", [65, 128, 150])
def test_rows_that_are_longer_than_a_tile(monkeypatch, d, dtype):
    monkeypatch.setattr(norm, "MIN_TILE", 32)
    monkeypatch.setattr(norm, "MAX_TILE", 64)
    monkeypatch.setattr(norm, "_sizes", lambda width, sizes=norm._sizes: sizes(width) | {"num_warps": 1})
    x, residual, weight = random(5, d, dtype=dtype), random(5, d).flip(0), random(d)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6, 1.0)
    assert_within_budget(OPS.rms_norm(x, weight, 1e-6, 1.0), exact, norm_error(exact))
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    exact = reference.rms_norm(total.double(), weight.double(), 1e-6, 1.0)
    assert torch.equal(total, (x.float() + residual).to(dtype))
    assert_within_budget(normed, exact, norm_error(exact))


def test_a_norm_is_the_same_alone_and_in_a_batch():
    """Short rows share programs; a NaN stays in its own."""
    x, weight = random(70, 48, dtype=torch.bfloat16), random(48)
    together = OPS.rms_norm(x, weight, 1e-6, 0.0)
    for i in (0, 1, 21, 22, 69):
        assert torch.equal(OPS.rms_norm(x[i], weight, 1e-6, 0.0), together[i])
    x[3] = NAN
    dirty = OPS.rms_norm(x, weight, 1e-6, 0.0)
    assert dirty[3].isnan().all()
    assert torch.equal(dirty[4:], together[4:])
    assert torch.equal(dirty[:3], together[:3])


# Activations.


def tanh_exponent(gate):
    """(1 + tanh(y)) / 2 is the logistic function of 2 y."""
    return 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)


# Each op with the activation in float64, free of cancellation, and a bound on its error, given gate and that. e^x is
# 2^(x log2 e): one rounding of the exponent is |x| of the result. With it, a sum, a quotient and two products there are
# 12 more. The tanh form's exponent is off by the 7 roundings of its polynomial too. Results below 2^-126 may be 0.
FLUSHED = math.exp(-86)
ACTIVATIONS = {
    "silu": (
        OPS.silu_and_mul,
        lambda gate: gate * gate.sigmoid(),
        lambda gate, exact: exact.abs() * gamma(gate.abs().clamp(max=88) + 12) + gate.abs() * FLUSHED,
    ),
    "tanh": (
        lambda x: OPS.gelu_and_mul(x, True),
        lambda gate: gate * tanh_exponent(gate).sigmoid(),
        lambda gate, exact: (
            exact.abs() * gamma(8 * tanh_exponent(gate).abs().clamp(max=88) + 12) + gate.abs() * FLUSHED
        ),
    ),
    "erf": (
        lambda x: OPS.gelu_and_mul(x, False),
        lambda gate: gate * torch.special.erfc(-gate / 2**0.5) / 2,
        lambda gate, exact: gate.abs() * 4 * U + exact.abs() * gamma(2),  # 1 + erf cancels, in torch's own as well
    ),
}
EACH_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)


@ONE_DTYPE
@EACH_ACTIVATION
def test_activations(activation, dtype):
    op, exactly, bound = ACTIVATIONS[activation]
    for n in (*WIDTHS, 1100):
        for tokens in (1, 5):
            gate_up = 3 * random(tokens, 2 * n, dtype=dtype)
            gate, up = gate_up.double().chunk(2, -1)
            exact, out = exactly(gate), op(gate_up)
            assert out.dtype == dtype
            assert_within_budget(out, exact * up, bound(gate, exact) * up.abs())


@EACH_ACTIVATION
def test_activations_on_a_fine_grid(activation):
    """In float32, up to where all of them are 0 or the gate itself."""
    op, exactly, bound = ACTIVATIONS[activation]
    for limit in (1e-3, 1.0, 15.0, 120.0):
        gate = torch.linspace(-limit, limit, 100_001, device=DEVICE)
        exact = exactly(gate.double())
        assert_within_budget(op(torch.cat([gate, torch.ones_like(gate)])), exact, bound(gate.double(), exact))


def test_activations_of_special_values_are_those_of_torch():
    gate = torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1e20, -1e20, -100.0, 0.0, -0.0], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)])
    tiny = torch.finfo(torch.float32).tiny * 100
    for out, expected in (
        (OPS.silu_and_mul(gate_up), F.silu(gate)),
        (OPS.gelu_and_mul(gate_up, True), F.gelu(gate, approximate="tanh")),
        (OPS.gelu_and_mul(gate_up, False), F.gelu(gate)),
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=tiny, equal_nan=True)


@ONE_DTYPE
def test_strides_of_norms_and_activations_are_free(dtype):
    x, residual = random(5, 3, 72, dtype=dtype), random(5, 3, 72, dtype=dtype).flip(0)
    apart = random(144)[::2]
    weight = apart.contiguous()
    expected = OPS.rms_norm(x, weight, 1e-6, 1.0)
    summed = OPS.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    for view, other in zip(strided_views(x), strided_views(residual), strict=True):
        assert not view.is_contiguous()
        out = OPS.rms_norm(view, apart, 1e-6, 1.0)
        assert (out.shape, out.is_contiguous()) == (view.shape, True)
        assert torch.equal(out.view(x.shape), expected)
        assert torch.equal(OPS.silu_and_mul(view).view(5, 3, 36), OPS.silu_and_mul(x))
        assert torch.equal(OPS.gelu_and_mul(view, True).view(5, 3, 36), OPS.gelu_and_mul(x, True))
        for added in (other, residual.view(view.shape)):
            both = OPS.add_rms_norm(view, added, apart, 1e-6, 1.0)
            assert all(torch.equal(a.view(x.shape), b) for a, b in zip(both, summed, strict=True))
    shared = x[:1].expand(4, 3, 72)
    assert torch.equal(OPS.rms_norm(shared, weight, 1e-6, 1.0), expected[:1].expand(4, 3, 72))


def test_a_slice_of_a_merged_projection_is_not_copied():
    *_, view, _ = strided_views(random(5, 3, 72))
    rows = norm.as_rows(view)
    assert (rows.data_ptr(), rows.shape) == (view.data_ptr(), (5, 3, 72))
    assert norm.as_rows(view.transpose(1, 2)).data_ptr() == view.data_ptr()


# Rope and cache writes.


def rope_args(tokens, d, r, *, dtype=torch.float32, cache_dtype=None, rope_dtype=None, dv=13, block_size=4, heads=2):
    """Arguments of rope_write_kv: q, k and v are views into one packed projection with NaN between them, the caches are
    NaN, and the slots scattered."""
    packed = random(tokens, 4 * heads, max(d, dv) + 3).to(dtype)
    packed[..., max(d, dv) :] = NAN
    angles = random(tokens, r)
    num_blocks = tokens // block_size + 3
    slots = torch.randperm((num_blocks - 1) * block_size, generator=torch.Generator().manual_seed(d))[:tokens]
    return [
        packed[:, : 2 * heads, :d],
        packed[:, 2 * heads : 3 * heads, :d],
        packed[:, 3 * heads :, :dv],
        angles.cos().to(rope_dtype or dtype),
        angles.sin().to(rope_dtype or dtype),
        *(full((num_blocks, block_size, heads, width), NAN, cache_dtype or dtype) for width in (d, dv)),
        (slots + block_size).to(DEVICE),
    ]


def rows_of(cache, slots):
    return cache.view(-1, *cache.shape[2:])[slots]


def rope_error(x, cos, sin):
    """Two products and a sum."""
    r = cos.shape[-1]
    x, cos, sin = x.double().abs(), cos.double().abs(), sin.double().abs()
    swapped = x[..., :r].roll(r // 2, -1)
    turned = x[..., :r] * cos[:, None] + swapped * sin[:, None]
    return gamma(2) * torch.cat([turned, torch.zeros_like(x[..., r:])], -1)


@BOTH_DTYPES
@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
def test_rope_write_kv(dtype, other, rope_dtype):
    """Slots that the mapping does not name stay as they were, bit for bit."""
    for d, r, tokens in ((1, 0, 3), (7, 6, 3), (80, 80, 1), (96, 24, 3), (576, 288, 1)):
        args = rope_args(tokens, d, r, dtype=dtype, cache_dtype=other, rope_dtype=rope_dtype)
        q, k, v, cos, sin, k_cache, v_cache, slots = args
        before = [cache.clone() for cache in (k_cache, v_cache)]
        exact_caches = [torch.full_like(cache, NAN, dtype=torch.float64) for cache in (k_cache, v_cache)]
        exact = reference.rope_write_kv(*(x.double() for x in args[:5]), *exact_caches, slots)
        out = OPS.rope_write_kv(*args)
        assert out.dtype == dtype
        assert_within_budget(out, exact, rope_error(q, cos, sin))
        assert_within_budget(rows_of(k_cache, slots), rows_of(exact_caches[0], slots), rope_error(k, cos, sin))
        assert torch.equal(rows_of(v_cache, slots), v.to(other))
        for cache, old in zip((k_cache, v_cache), before, strict=True):
            rows_of(cache, slice(None))[slots] = NAN
            assert_same_bits(cache, old)


@pytest.mark.parametrize(("tokens", "heads"), [(65, 2), (3, 1), (3, 3), (3, 9)])
def test_any_number_of_heads_over_several_programs(tokens, heads):
    args = rope_args(tokens, 256, 64, heads=heads, dv=128)
    caches = [cache.clone() for cache in args[5:7]]
    expected = reference.rope_write_kv(*args[:5], *caches, args[7])
    torch.testing.assert_close(OPS.rope_write_kv(*args), expected)
    torch.testing.assert_close(args[5], caches[0], equal_nan=True)
    torch.testing.assert_close(args[6], caches[1], equal_nan=True)


@BOTH_DTYPES
def test_write_kv(dtype, other):
    """Equal to the reference's, all else bit for bit as before; rope by no angle writes the same."""
    for d, tokens in ((1, 1), (7, 3), (80, 1), (96, 3), (576, 1)):
        q, k, v, cos, sin, *caches, slots = rope_args(tokens, d, d // 2 * 2, dtype=dtype, cache_dtype=other)
        by_rope, expected = ([cache.clone() for cache in caches] for _ in "ab")
        assert OPS.write_kv(k, v, *caches, slots) is None
        reference.write_kv(k, v, *expected, slots)
        assert torch.equal(OPS.rope_write_kv(q, k, v, cos.fill_(1), sin.fill_(0), *by_rope, slots), q)
        for cache, want, rotated in zip(caches, expected, by_rope, strict=True):
            assert_same_bits(cache, want)
            assert torch.equal(rotated.nan_to_num(7), want.nan_to_num(7))


@ONE_DTYPE
def test_strides_of_cache_writes_are_free(dtype):
    q, k, v, cos, sin, *caches, slots = rope_args(9, 40, 36, dtype=dtype, dv=40)
    expected, plain = ([cache.clone() for cache in caches] for _ in "ab")
    rotated = OPS.rope_write_kv(q, k, v, cos, sin, *expected, slots)
    OPS.write_kv(k, v, *plain, slots)
    apart = [torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0] for x in (cos, sin)]
    slots = torch.stack([slots, slots - 1000], -1)[:, 0]
    for views in zip(*(strided_views(x.contiguous())[:4] for x in (q, k, v)), strict=True):
        first, second = ([cache.clone() for cache in caches] for _ in "ab")
        assert torch.equal(OPS.rope_write_kv(*views, *apart, *first, slots.int()), rotated)
        OPS.write_kv(*views[1:], *second, slots)
        for cache, want in zip((*first, *second), (*expected, *plain), strict=True):
            assert_same_bits(cache, want)


@pytest.mark.parametrize("op", ["write_kv", "rope_write_kv"])
def test_padding_tokens_share_the_null_slot(op):
    q, k, v, cos, sin, k_cache, v_cache, slots = rope_args(9, 16, 16)
    slots[-3:] = 0
    if op == "write_kv":
        OPS.write_kv(k, v, k_cache, v_cache, slots)
    else:
        OPS.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots)
    assert torch.isin(v_cache[0, 0], v[-3:]).all()
    assert k_cache[0, 0].isfinite().all()
    assert torch.equal(rows_of(v_cache, slots[:6]), v[:6])
    assert k_cache.isfinite().all(-1).all(-1).sum() == v_cache.isfinite().all(-1).all(-1).sum() == 7


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, random(4, 4, 16)),
        (0, random(5, 4, 18)),
        (1, random(5, 3, 16)),
        (2, random(4, 2, 13)),
        (3, random(5, 14)),
        (3, random(4, 16)),
        (5, random(4, 4, 16, 2).transpose(2, 3)),
        (6, random(3, 4, 2, 13)),
        (7, torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_sizes_that_do_not_fit_are_refused(index, value):
    args = rope_args(5, 16, 16)
    args[index] = value
    with pytest.raises(AssertionError):
        OPS.rope_write_kv(*args)


def test_odd_sizes_and_those_that_differ_are_refused():
    for r in (3, 18):
        with pytest.raises(AssertionError, match=f"cos and sin have {r} columns"):
            OPS.rope_write_kv(*rope_args(5, 16, r))
    with pytest.raises(AssertionError, match="the weight"):
        OPS.rms_norm(random(2, 7), random(8), 1e-6, 0.0)
    with pytest.raises(AssertionError, match="the residual"):
        OPS.add_rms_norm(random(2, 8), random(1, 8), random(8), 1e-6, 0.0)
    with pytest.raises(AssertionError, match="odd"):
        OPS.silu_and_mul(random(2, 7))


def test_no_tokens():
    weight = random(8)
    for shape in ((0, 8), (2, 0, 8)):
        x = torch.empty(shape, device=DEVICE)
        assert OPS.rms_norm(x, weight, 1e-6, 0.0).shape == shape
        assert [out.shape for out in OPS.add_rms_norm(x, x, weight, 1e-6, 0.0)] == [shape, shape]
        assert OPS.silu_and_mul(x).shape == (*shape[:-1], 4)
        assert OPS.gelu_and_mul(x, True).shape == (*shape[:-1], 4)
    assert OPS.silu_and_mul(random(3, 0)).shape == (3, 0)
    q, k, v, cos, sin, k_cache, v_cache, slots = rope_args(0, 16, 8)
    assert OPS.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots).shape == (0, 4, 16)
    OPS.write_kv(k, v, k_cache, v_cache, slots)
    assert k_cache.isnan().all()


def test_rows_and_slots_beyond_int32():
    """Two rows that lie 2^31 elements apart, and caches of more elements, of which only some pages are ever touched."""
    x = torch.empty(2**31 + 100, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 96), (2**31, 1))
    x.copy_(random(2, 96))
    weight, near = random(96), x.contiguous()
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6, 0.0), OPS.rms_norm(near, weight, 1e-6, 0.0))
    assert torch.equal(OPS.silu_and_mul(x), OPS.silu_and_mul(near))
    both = OPS.add_rms_norm(x, x, weight, 1e-6, 0.0), OPS.add_rms_norm(near, near, weight, 1e-6, 0.0)
    assert all(torch.equal(far, close) for far, close in zip(*both, strict=True))
    block_size, heads, d = 16, 2, 48
    num_blocks = 2**31 // (block_size * heads * d) + 4
    caches = [torch.empty(num_blocks, block_size, heads, d, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    assert caches[0].numel() > 2**31
    last = num_blocks - 1
    slots = torch.tensor([last * block_size + 15, last * block_size - 4], device=DEVICE)
    q = x.unflatten(1, (heads, d))
    rotated = OPS.rope_write_kv(q, q, q, random(2, d).cos(), random(2, d).sin(), *caches, slots)
    assert torch.equal(rows_of(caches[0], slots), rotated)
    assert torch.equal(rows_of(caches[1], slots), q)
    OPS.copy_blocks(caches, torch.tensor([[last, 0]], device=DEVICE))
    assert all(torch.equal(cache[0, 15], cache[last, 15]) for cache in caches)
    OPS.write_kv(q, q, *caches, slots)
    assert torch.equal(rows_of(caches[0], slots), q)


# Whole blocks.


def bit_patterns(num_blocks, dtype, dims=(5, 5, 3, 3), device=DEVICE):
    """Caches of random bits, [num_blocks, 4, 2, dim]: NaNs of all kinds are among them, and each holds a -0.0."""
    caches = []
    for dim in dims:
        limits = torch.iinfo(BITS[dtype])
        bits = torch.randint(limits.min, limits.max, (num_blocks, 4, 2, dim), dtype=BITS[dtype])
        bits[:, 0, 0, 0] = limits.min  # -0.0
        caches.append(bits.view(dtype).to(device))
    return caches


def on_host(caches):
    return [cache.cpu().pin_memory() if DEVICE == "cuda" else cache for cache in caches]


@pytest.mark.parametrize("dims", [(8, 8, 16, 16), (5, 5, 3, 3), (1, 2)])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", BITS)
def test_copy_blocks(dtype, ids, dims):
    caches = bit_patterns(8, dtype, dims)
    expected = [cache[[0, 1, 5, 1, 4, 5, 6, 6]].clone() for cache in caches]
    assert OPS.copy_blocks(caches, torch.tensor([[5, 2], [1, 3], [6, 7]], dtype=ids, device=DEVICE)) is None
    for cache, want in zip(caches, expected, strict=True):
        assert_same_bits(cache, want)
    OPS.copy_blocks(caches, torch.empty(0, 2, dtype=ids, device=DEVICE))
    OPS.copy_blocks([], torch.tensor([[5, 2]], dtype=ids, device=DEVICE))
    for cache, want in zip(caches, expected, strict=True):
        assert_same_bits(cache, want)


@pytest.mark.parametrize("align", [2, 4, 8, 16])
def test_blocks_of_several_programs_at_any_alignment(align):
    """Views into a buffer whose addresses and sizes have no larger power of two in common; tails of blocks too."""
    caches = []
    for heads in (9, 1):
        elements = (1 << 13) * heads + align // 2
        buffer = torch.arange(3 * elements + 64, dtype=torch.int16, device=DEVICE)
        start = (align - buffer.data_ptr() % align) % align // 2 + align // 2
        caches.append(buffer[start : start + 3 * elements].view(3, 1, 1, elements).view(torch.bfloat16))
    rows = tuple((cache.data_ptr(), cache.data_ptr(), cache[0].nbytes) for cache in caches)
    assert blocks._table(rows, torch.device(DEVICE))[1] == align
    expected = [cache[[0, 0, 2]].clone() for cache in caches]
    OPS.copy_blocks(caches, torch.tensor([[0, 1]], device=DEVICE))
    for cache, want in zip(caches, expected, strict=True):
        assert_same_bits(cache, want)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("pairs", [[(1, 4), (2, 5), (5, 0), (6, 1), (0, 3)], [(7, 2)], []])
@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
def test_swap_blocks_copies_every_bit_of_its_blocks_and_no_other(out, pairs, dtype):
    src, dst = bit_patterns(8, dtype), bit_patterns(6, dtype)
    src, dst = (src, on_host(dst)) if out else (on_host(src), dst)
    before = [cache.view(BITS[dtype]).clone() for cache in (*src, *dst)]
    assert OPS.swap_blocks(src, dst, torch.tensor(pairs, dtype=torch.int64).view(-1, 2)) is None
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for block, target in pairs:
        for layer in range(4):
            before[4 + layer][target] = before[layer][block]
    for cache, bits in zip((*src, *dst), before, strict=True):
        assert torch.equal(cache.view(BITS[dtype]), bits)


def test_a_swap_takes_the_addresses_of_today():
    """The table of addresses is kept, but only for the same ones."""
    pairs = torch.tensor([[0, 1], [2, 0]])
    for _ in range(3):
        src, dst = bit_patterns(3, torch.float32), on_host(bit_patterns(3, torch.float32))
        OPS.swap_blocks(src, dst, pairs)
        OPS.swap_blocks(src, dst, pairs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for one, other in zip(src, dst, strict=True):
            assert_same_bits(one[[0, 2]].cpu(), other[[1, 0]])


@pytest.mark.parametrize("pairs", [[[4, 0]], [[0, 6]], [[2, 4], [3, 5], [4, 5]], [[-1, 0]], [[0, -1]]])
def test_swap_blocks_refuses_a_block_that_is_not_there(pairs):
    src, dst = bit_patterns(4, torch.float32), on_host(bit_patterns(6, torch.float32))
    with pytest.raises(RuntimeError, match="out of range: a cache has"):
        OPS.swap_blocks(src, dst, torch.tensor(pairs))


def test_memory_that_no_kernel_reaches_is_left_to_the_reference(monkeypatch):
    """A swap between some device, here one without memory, and a host whose memory is not pinned."""
    calls = []
    monkeypatch.setattr(blocks.reference, "swap_blocks", lambda *args: calls.append(args))
    host, elsewhere = [torch.zeros(2, 4, 1, 8)], [torch.zeros(2, 4, 1, 8, device="meta")]
    pairs = torch.tensor([[0, 1]])
    blocks.swap_blocks(host, elsewhere, pairs)
    blocks.swap_blocks(elsewhere, host, pairs)
    assert calls == [(host, elsewhere, pairs), (elsewhere, host, pairs)]


def test_caches_of_other_sizes_are_refused():
    small, large = bit_patterns(4, torch.float32, (5,)), bit_patterns(4, torch.float32, (8,))
    with pytest.raises(AssertionError, match=r"\[4, 4, 2, 5\] to \[4, 4, 2, 8\]"):
        OPS.swap_blocks(small, large, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="zip"):
        OPS.swap_blocks(small, [*small, *small], torch.tensor([[0, 1]]))


# Under torch.


@ONE_DTYPE
@pytest.mark.parametrize("op", [op for op in FILES if op not in ("paged_attention", "sample")])
def test_opcheck(op, dtype):
    x = strided_views(random(3, 2, 24, dtype=dtype))[4]
    rope = rope_args(3, 16, 8, dtype=dtype)
    caches = [cache.nan_to_num(1.0) for cache in rope[5:7]]
    pairs = torch.tensor([[1, 2]])
    args = {
        "rms_norm": (x, random(24), 1e-6, 1.0),
        "add_rms_norm": (x, random(1, 3, 2, 24), random(24), 1e-6, 0.0),
        "silu_and_mul": (x,),
        "gelu_and_mul": (x, True),
        "write_kv": (*rope[1:3], *caches, rope[7]),
        "rope_write_kv": (*rope[:5], *caches, rope[7]),
        "copy_blocks": (caches, pairs.to(DEVICE)),
        "swap_blocks": (caches, on_host([cache.clone() for cache in caches]), pairs),
    }
    results = torch.library.opcheck(getattr(OPS, op), args[op])
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("mark", ["backed", "unbacked"])
def test_one_graph_serves_all_numbers_of_tokens(mark):
    """Unbacked sizes turn any guard on them into an error, so there one token goes through the same graph."""

    def layer(qkv, residual, weight, cos, sin, k_cache, v_cache, slots):
        q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
        OPS.write_kv(k, v, k_cache, v_cache, slots + 1)
        q, k = OPS.rms_norm(q, weight, 1e-6, 1.0), OPS.rms_norm(k, weight, 1e-6, 1.0)
        rotated = OPS.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots)
        normed, total = OPS.add_rms_norm(rotated, residual, weight, 1e-6, 0.0)
        return OPS.silu_and_mul(normed) + OPS.gelu_and_mul(normed, False) + OPS.gelu_and_mul(normed, True), total

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    marker = torch._dynamo.mark_dynamic if mark == "backed" else torch._dynamo.decorators.mark_unbacked
    weight = random(16)
    for tokens in (9, 12, 3) if mark == "backed" else (9, 12, 1, 4):
        caches = [torch.zeros(tokens + 5, 4, 2, 16, device=DEVICE) for _ in "kv"]
        args = [random(tokens, 12, 16), random(tokens, 8, 16).flip(0), weight, random(tokens, 8), random(tokens, 8) + 1]
        args += [*caches, 2 * torch.arange(tokens, device=DEVICE)]
        copies = [x.clone() for x in args]
        expected = layer(*copies)
        for x in args[:2] + args[3:]:
            marker(x, 0)
        out = compiled(*args)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True))
    assert counter.frame_count == 1


@ON_GPU
@pytest.mark.cuda
def test_a_captured_graph_serves_other_values_of_the_same_shapes():
    """What a replay reads is in device memory: other tokens go to other slots."""
    weight = random(64)

    def step(q, k, v, cos, sin, k_cache, v_cache, slots):
        rotated = OPS.rope_write_kv(q, OPS.rms_norm(k, weight, 1e-6, 1.0), v, cos, sin, k_cache, v_cache, slots)
        return OPS.gelu_and_mul(OPS.add_rms_norm(rotated, q, weight, 1e-6, 0.0)[0], True)

    static = rope_args(9, 64, 64, dv=64)
    step(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*static)
    for seed in (1, 2):
        fresh = rope_args(9, 64, 64, dv=64)
        fresh[0] = fresh[0] * seed + 1
        fresh[7] = fresh[7].roll(seed)
        for kept, new in zip(static, fresh, strict=True):
            kept.copy_(new)
        graph.replay()
        assert torch.equal(out, step(*fresh))
        for kept, new in zip(static[5:7], fresh[5:7], strict=True):
            assert_same_bits(kept, new)


@ON_GPU
@pytest.mark.cuda
def test_whole_blocks_are_moved_without_waiting_for_the_device():
    caches, host = bit_patterns(8, torch.bfloat16), on_host(bit_patterns(8, torch.bfloat16))
    copies, pairs = torch.tensor([[1, 2]], device=DEVICE), torch.tensor([[2, 3], [7, 0]])
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        OPS.copy_blocks(caches, copies)
        OPS.swap_blocks(caches, host, pairs)
        OPS.swap_blocks(host, caches, pairs.flip(1))
    finally:
        torch.cuda.set_sync_debug_mode(before)
