"""Norms, gated activations and rope with the cache write: the reference against formulas, C++ against float64.

Budgets of C++ results are bounds on the roundings that it does in float32, U relative each, and the one to the output's
dtype. gamma(n) bounds n of them (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ops import reference
from ops.cpu import library as loading
from ops.cpu.build import BFLOAT16_ISAS, ISA_FLAGS, BuildError
from ops.schema import overload

NAN, INF = float("nan"), float("inf")
FUSED = ("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "rope_write_kv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KERNELS = [isa for isa in ISA_FLAGS if isa not in BFLOAT16_ISAS]
BOTH_DTYPES = pytest.mark.parametrize(
    ("dtype", "other"), [(x, y) for x in DTYPES.values() for y in DTYPES.values()], ids=lambda x: str(x)[6:]
)
ONE_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
WIDTHS, TOKENS = (1, 7, 80, 96, 576), (1, 3, 65)
U = torch.finfo(torch.float32).eps / 2


def provider(name):
    return SimpleNamespace(**{op: overload(op, name) for op in FUSED})


@pytest.fixture(params=KERNELS)
def cpu(request):
    """The C++ ops with every instruction set of the machine in turn, by name."""
    try:
        library = loading.load()
    except BuildError as error:
        pytest.skip(str(error))
    if request.param not in library.isas:
        pytest.skip(f"this machine has no {request.param}")
    before = library.isa
    library.use(request.param)
    yield provider("cpu")
    library.use(before)


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    """The ops of one provider, by name."""
    if request.param == "cpu":
        try:
            loading.load()
        except BuildError as error:
            pytest.skip(str(error))
    return provider(request.param)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rope_args(tokens, d, r, *, dtype=torch.float32, cache_dtype=None, rope_dtype=None, dv=13, block_size=4):
    """Arguments of rope_write_kv: q, k and v are views into one packed projection with NaN between them, the caches are
    NaN, and the slots scattered."""
    packed = random(tokens, 8, max(d, dv) + 3).to(dtype)
    packed[..., max(d, dv) :] = NAN
    angles = random(tokens, r)
    num_blocks = tokens // block_size + 3
    slots = torch.randperm((num_blocks - 1) * block_size, generator=torch.Generator().manual_seed(d))[:tokens]
    return [
        packed[:, :4, :d],
        packed[:, 4:6, :d],
        packed[:, 6:, :dv],
        angles.cos().to(rope_dtype or dtype),
        angles.sin().to(rope_dtype or dtype),
        *(torch.full((num_blocks, block_size, 2, width), NAN, dtype=cache_dtype or dtype) for width in (d, dv)),
        slots + block_size,
    ]


def rotate_formula(x, cos, sin):
    """Rope of [T, H, D] as transformers writes it, dimensions past cos's passing."""
    r = cos.shape[-1]
    turned, _ = apply_rotary_pos_emb(x[None, ..., :r], x[None, ..., :r], cos[None], sin[None], unsqueeze_dim=2)
    return torch.cat([turned[0], x[..., r:]], -1)


def rows_of(cache, slots):
    return cache.view(-1, *cache.shape[2:])[slots]


# The reference.


@pytest.mark.parametrize("d", WIDTHS)
def test_reference_norm_is_that_of_llama(d):
    norm = LlamaRMSNorm(d, 1e-5)
    norm.weight.data = random(d)
    x = random(3, 5, d)
    assert torch.equal(reference.rms_norm(x, norm.weight.data, 1e-5, 0.0), norm(x))


@ONE_DTYPE
def test_reference_norm_with_offset_is_that_of_gemma(dtype):
    norm = Gemma3RMSNorm(80, 1e-6)
    norm.weight.data = random(80, dtype=dtype)
    x = random(3, 5, 80, dtype=dtype)
    assert torch.equal(reference.rms_norm(x, norm.weight.data, 1e-6, 1.0), norm(x))


@ONE_DTYPE
def test_reference_adds_in_the_inputs_precision_before_it_normalises(dtype):
    x, residual, weight = random(4, 33, dtype=dtype), random(4, 33, dtype=dtype).flip(0), random(33)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-6, 0.0)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-6, 0.0))


@ONE_DTYPE
def test_reference_activations_are_those_of_torch_rounded_once(dtype):
    gate_up = random(3, 2, 70, dtype=dtype)
    gate, up = gate_up.float().chunk(2, -1)
    assert torch.equal(reference.silu_and_mul(gate_up), (F.silu(gate) * up).to(dtype))
    assert torch.equal(reference.gelu_and_mul(gate_up, False), (F.gelu(gate) * up).to(dtype))
    assert torch.equal(reference.gelu_and_mul(gate_up, True), (F.gelu(gate, approximate="tanh") * up).to(dtype))


def test_reference_activations_are_their_formulas():
    gate_up = random(5, 40).double()
    gate, up = gate_up.chunk(2, -1)
    cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(reference.silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(reference.gelu_and_mul(gate_up, False), gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up)
    torch.testing.assert_close(reference.gelu_and_mul(gate_up, True), gate * (1 + torch.tanh(cubic)) / 2 * up)


@pytest.mark.parametrize("r", [0, 2, 48, 80])
@ONE_DTYPE
def test_reference_rope_is_that_of_transformers_and_its_write_that_of_write_kv(dtype, r):
    q, k, v, cos, sin, *caches, slots = rope_args(9, 80, r, dtype=dtype, cache_dtype=torch.bfloat16)
    expected = [cache.clone() for cache in caches]
    rotated = [rotate_formula(x.float(), cos.float(), sin.float()) for x in (q, k)]
    assert torch.equal(reference.rope_write_kv(q, k, v, cos, sin, *caches, slots), rotated[0].to(dtype))
    reference.write_kv(rotated[1], v, *expected, slots)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache.nan_to_num(7), other.nan_to_num(7))


def test_reference_refuses_an_odd_number_of_columns():
    with pytest.raises(RuntimeError, match="unflatten"):
        reference.silu_and_mul(random(2, 7))
    with pytest.raises(RuntimeError, match="unflatten"):
        reference.rope_write_kv(*rope_args(2, 8, 3))


# C++.


def gamma(n):
    return n * U / (1 - n * U)


def assert_within_budget(out, exact, error):
    """The difference is at most `error`, and half a unit in the last place of what the output's dtype can hold."""
    info = torch.finfo(out.dtype)
    rounding = info.eps / 2 * (exact.abs() + error).clamp(min=info.tiny)
    assert out.shape == exact.shape
    assert out.is_contiguous()
    assert ((out.double() - exact).abs() <= error + rounding).all()


def norm_error(exact):
    """4 lanes or more sum up D / 4 squares each and 4 in turn at the end; with the squares, the mean and eps, these
    roundings count half under the root. Then come the root, its reciprocal, offset + weight, and two products."""
    return exact.abs() * gamma((exact.shape[-1] / 4 + 4 + 3) / 2 + 5)


@BOTH_DTYPES
def test_rms_norm(cpu, dtype, other):
    for d in WIDTHS:
        weight = random(d, dtype=other)
        for tokens in TOKENS:
            x = random(tokens, d, dtype=dtype)
            for eps, offset in ((1e-6, 0.0), (0.1, 1.0)):
                exact = reference.rms_norm(x.double(), weight.double(), eps, offset)
                out = cpu.rms_norm(x, weight, eps, offset)
                assert out.dtype == dtype
                assert_within_budget(out, exact, norm_error(exact))


@BOTH_DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(cpu, dtype, other, weight_dtype):
    for d in WIDTHS:
        weight = random(d, dtype=weight_dtype)
        for tokens in TOKENS:
            x, residual = random(tokens, d, dtype=dtype), random(tokens, d).flip(0).to(other)
            normed, total = cpu.add_rms_norm(x, residual, weight, 1e-6, 1.0)
            assert torch.equal(total, (x.float() + residual.float()).to(dtype))
            assert total.is_contiguous()
            assert normed.dtype == dtype
            assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-6, 1.0))
            exact = reference.rms_norm(total.double(), weight.double(), 1e-6, 1.0)
            assert_within_budget(normed, exact, norm_error(exact))


def tanh_exponent(gate):
    """(1 + tanh(y)) / 2 is the logistic function of 2 y."""
    return 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)


def activations(cpu):
    """Each op with the activation in float64, free of cancellation, and a bound on its error, given gate and that.

    Of e^x, correct to 2 units in the last place, that is to 4 U, both sums and quotients take 2 more, and the products
    with gate and up 2. The tanh form's exponent is off by the 6 roundings of its polynomial. e^x is 0 below -87.3; the
    exponent may have been rounded to there.
    """
    flushed = math.exp(-87.2)
    return {
        "silu": (
            cpu.silu_and_mul,
            lambda gate: gate * gate.sigmoid(),
            lambda gate, exact: exact.abs() * gamma(8) + gate.abs() * flushed,
        ),
        "tanh": (
            lambda x: cpu.gelu_and_mul(x, True),
            lambda gate: gate * tanh_exponent(gate).sigmoid(),
            lambda gate, exact: (
                exact.abs() * gamma(6 * tanh_exponent(gate).abs().clamp(max=88) + 8) + gate.abs() * flushed
            ),
        ),
        "erf": (
            lambda x: cpu.gelu_and_mul(x, False),
            lambda gate: gate * torch.special.erfc(-gate / 2**0.5) / 2,
            lambda gate, exact: gate.abs() * 1e-6 + exact.abs() * gamma(2),  # stated in activation_kernels.cpp
        ),
    }


@ONE_DTYPE
@pytest.mark.parametrize("activation", ["silu", "tanh", "erf"])
def test_activations(cpu, activation, dtype):
    op, exactly, bound = activations(cpu)[activation]
    for n in WIDTHS:
        for tokens in TOKENS:
            gate_up = 3 * random(tokens, 2 * n, dtype=dtype)
            gate, up = gate_up.double().chunk(2, -1)
            exact, out = exactly(gate), op(gate_up)
            assert out.dtype == dtype
            assert_within_budget(out, exact * up, bound(gate, exact) * up.abs())


@pytest.mark.parametrize("activation", ["silu", "tanh", "erf"])
def test_activations_on_a_fine_grid(cpu, activation):
    """In float32, up to where all of them are 0 or the gate itself."""
    op, exactly, bound = activations(cpu)[activation]
    for limit in (1e-3, 1.0, 15.0, 120.0):
        gate = torch.linspace(-limit, limit, 200_001)
        exact = exactly(gate.double())
        assert_within_budget(op(torch.cat([gate, torch.ones_like(gate)])), exact, bound(gate.double(), exact))


def test_activations_of_special_values_are_those_of_torch(cpu):
    gate = torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1e20, -1e20, -100.0, 0.0, -0.0])
    gate_up = torch.cat([gate, torch.ones_like(gate)])
    tiny = torch.finfo(torch.float32).tiny * 100
    for out, expected in (
        (cpu.silu_and_mul(gate_up), F.silu(gate)),
        (cpu.gelu_and_mul(gate_up, True), F.gelu(gate, approximate="tanh")),
        (cpu.gelu_and_mul(gate_up, False), F.gelu(gate)),
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=tiny, equal_nan=True)


def rope_error(x, cos, sin):
    """Two products and a sum."""
    r = cos.shape[-1]
    x, cos, sin = x.double().abs(), cos.double().abs(), sin.double().abs()
    swapped = x[..., :r].roll(r // 2, -1)
    turned = x[..., :r] * cos[:, None] + swapped * sin[:, None]
    return gamma(2) * torch.cat([turned, torch.zeros_like(x[..., r:])], -1)


@BOTH_DTYPES
@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
def test_rope_write_kv(cpu, dtype, other, rope_dtype):
    """Slots that the mapping does not name stay as they were."""
    for d in WIDTHS:
        for r in {d // 2 * 2, d // 4 * 2}:
            for tokens in TOKENS:
                args = rope_args(tokens, d, r, dtype=dtype, cache_dtype=other, rope_dtype=rope_dtype)
                q, k, v, cos, sin, k_cache, v_cache, slots = args
                wide = [x.double() for x in args[:5]]
                caches = [torch.full(cache.shape, NAN, dtype=torch.float64) for cache in (k_cache, v_cache)]
                exact = reference.rope_write_kv(*wide, *caches, slots)
                out = cpu.rope_write_kv(*args)
                assert out.dtype == dtype
                assert_within_budget(out, exact, rope_error(q, cos, sin))
                assert_within_budget(rows_of(k_cache, slots), rows_of(caches[0], slots), rope_error(k, cos, sin))
                assert torch.equal(rows_of(v_cache, slots), v.to(other))
                assert torch.equal(k_cache.isnan(), caches[0].isnan())
                assert torch.equal(v_cache.isnan(), caches[1].isnan())


@ONE_DTYPE
def test_rope_by_no_angle_writes_what_write_kv_writes(cpu, dtype):
    q, k, v, cos, sin, *caches, slots = rope_args(65, 80, 64, dtype=dtype, cache_dtype=torch.bfloat16)
    expected = [cache.clone() for cache in caches]
    assert torch.equal(cpu.rope_write_kv(q, k, v, cos.fill_(1), sin.fill_(0), *caches, slots), q)
    overload("write_kv", "cpu")(k, v, *expected, slots)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache.nan_to_num(7), other.nan_to_num(7))


def test_padding_tokens_share_the_null_slot(cpu):
    q, k, v, cos, sin, k_cache, v_cache, slots = rope_args(9, 16, 16)
    slots[-2:] = 0
    cpu.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots)
    assert torch.isin(v_cache[0, 0], v[-2:]).all()
    assert k_cache[0, 0].isfinite().all()
    assert k_cache[0, 1:].isnan().all()


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


@ONE_DTYPE
def test_strides_are_free(cpu, dtype):
    x, residual = random(5, 3, 72, dtype=dtype), random(5, 3, 72, dtype=dtype).flip(0)
    apart = random(144)[::2]
    weight = apart.contiguous()
    expected = cpu.rms_norm(x, weight, 1e-6, 1.0)
    summed = cpu.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    for view, other in zip(strided_views(x), strided_views(residual), strict=True):
        assert not view.is_contiguous()
        out = cpu.rms_norm(view, apart, 1e-6, 1.0)
        assert (out.shape, out.is_contiguous()) == (view.shape, True)
        assert torch.equal(out.view(x.shape), expected)
        assert torch.equal(cpu.silu_and_mul(view).view(5, 3, 36), cpu.silu_and_mul(x))
        assert torch.equal(cpu.gelu_and_mul(view, True).view(5, 3, 36), cpu.gelu_and_mul(x, True))
        for added in (other, residual.view(view.shape)):
            both = cpu.add_rms_norm(view, added, apart, 1e-6, 1.0)
            assert all(torch.equal(a.view(x.shape), b) for a, b in zip(both, summed, strict=True))
    shared = x[:1].expand(4, 3, 72)
    assert torch.equal(cpu.rms_norm(shared, weight, 1e-6, 1.0), expected[:1].expand(4, 3, 72))
    assert torch.equal(cpu.rms_norm(x[0, 0], weight, 1e-6, 1.0), expected[0, 0])


@ONE_DTYPE
def test_rope_takes_any_strides(cpu, dtype):
    q, k, v, cos, sin, *caches, slots = rope_args(9, 40, 36, dtype=dtype, dv=40)
    expected = [cache.clone() for cache in caches]
    rotated = cpu.rope_write_kv(q, k, v, cos, sin, *expected, slots)
    apart = [torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0] for x in (cos, sin)]
    slots = torch.stack([slots, slots - 1000], -1)[:, 0]
    for views in zip(*(strided_views(x.contiguous())[:4] for x in (q, k, v)), strict=True):
        written = [torch.full_like(cache, NAN) for cache in caches]
        assert torch.equal(cpu.rope_write_kv(*views, *apart, *written, slots), rotated)
        for cache, other in zip(written, expected, strict=True):
            assert torch.equal(cache.nan_to_num(7), other.nan_to_num(7))


def test_a_view_into_a_merged_projection_is_not_copied(cpu):
    x, weight, rope = strided_views(random(5, 3, 72))[4], random(72), rope_args(3, 16, 16)
    with torch.profiler.profile() as profile:
        cpu.rms_norm(x, weight, 1e-6, 0.0)
        cpu.add_rms_norm(x, x, weight, 1e-6, 0.0)
        cpu.silu_and_mul(x)
        cpu.gelu_and_mul(x, True)
        cpu.rope_write_kv(*rope)
    assert {event.key for event in profile.key_averages()} >= {f"pagegraph::{op}" for op in FUSED}
    assert not {event.key for event in profile.key_averages()} & {"aten::contiguous", "aten::clone", "aten::copy_"}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_bit_for_bit_alone_and_in_a_batch_with_any_number_of_threads(cpu, threads):
    x, weight = random(200, 1152, dtype=torch.bfloat16), random(1152)
    args = rope_args(200, 128, 128)
    q, k, v, cos, sin, *caches, slots = args
    alone = [cache.clone() for cache in caches]
    rotated = torch.cat(
        [cpu.rope_write_kv(*(x[i : i + 1] for x in args[:5]), *alone, slots[i : i + 1]) for i in range(200)]
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = [cpu.rms_norm(x, weight, 1e-6, 0.0), cpu.silu_and_mul(x), cpu.gelu_and_mul(x, False)]
        together += cpu.add_rms_norm(x, x.flip(0), weight, 1e-6, 0.0)
        assert torch.equal(cpu.rope_write_kv(q, k, v, cos, sin, *caches, slots), rotated)
    finally:
        torch.set_num_threads(before)
    for cache, other in zip(caches, alone, strict=True):
        assert torch.equal(cache.nan_to_num(7), other.nan_to_num(7))
    for i in (0, 1, 99, 199):
        row = x[i : i + 1]
        one = [cpu.rms_norm(row, weight, 1e-6, 0.0), cpu.silu_and_mul(row), cpu.gelu_and_mul(row, False)]
        one += cpu.add_rms_norm(row, x[199 - i : 200 - i], weight, 1e-6, 0.0)
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, one, strict=True))


def test_a_nan_stays_in_its_row(cpu):
    x, weight = random(5, 70), random(70)
    clean = [cpu.rms_norm(x, weight, 1e-6, 0.0), cpu.silu_and_mul(x), cpu.gelu_and_mul(x, True)]
    x[2] = NAN
    dirty = [cpu.rms_norm(x, weight, 1e-6, 0.0), cpu.silu_and_mul(x), cpu.gelu_and_mul(x, True)]
    others = torch.tensor([0, 1, 3, 4])
    for out, before in zip(dirty, clean, strict=True):
        assert out[2].isnan().all()
        assert torch.equal(out[others], before[others])


def test_rows_beyond_int32(cpu):
    """Two rows that lie 2^31 elements apart, and caches of more elements, of which only some pages are ever touched."""
    x = torch.empty(2**31 + 100, dtype=torch.bfloat16).as_strided((2, 96), (2**31, 1))
    x.copy_(random(2, 96))
    weight = random(96)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-6, 0.0), cpu.rms_norm(x.contiguous(), weight, 1e-6, 0.0))
    assert torch.equal(cpu.silu_and_mul(x), cpu.silu_and_mul(x.contiguous()))
    for out, expected in zip(
        cpu.add_rms_norm(x, x, weight, 1e-6, 0.0),
        cpu.add_rms_norm(x.contiguous(), x.contiguous(), weight, 1e-6, 0.0),
        strict=True,
    ):
        assert torch.equal(out, expected)
    block_size, heads, d = 16, 2, 48
    num_blocks = 2**31 // (block_size * heads * d) + 4
    caches = [torch.empty(num_blocks, block_size, heads, d, dtype=torch.bfloat16) for _ in range(2)]
    assert caches[0].numel() > 2**31
    slots = torch.tensor([num_blocks * block_size - 1, num_blocks * block_size - 20])
    q = x.unflatten(1, (heads, d))
    cos, sin = random(2, d).cos(), random(2, d).sin()
    rotated = cpu.rope_write_kv(q, q, q, cos, sin, *caches, slots)
    assert torch.equal(rows_of(caches[0], slots), rotated)
    assert torch.equal(rows_of(caches[1], slots), q)


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_a_slot_that_is_not_there_is_refused_before_anything_is_written(cpu, slot):
    *args, k_cache, v_cache, slots = rope_args(5, 16, 16)
    slots[3] = slot
    with pytest.raises(RuntimeError, match=f"slot {slot} of token 3 is out of range: the caches have 16 slots"):
        cpu.rope_write_kv(*args, k_cache, v_cache, slots)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, random(4, 4, 16), "q must have as many tokens"),
        (0, random(5, 4, 18), "and k's head dim"),
        (1, random(5, 3, 16), "k and v must have the heads and head dims of the caches"),
        (2, random(4, 2, 13), "as many tokens as slot_mapping has slots"),
        (3, random(5, 14), r"cos and sin must be \[T, R\]"),
        (4, random(4, 16), r"cos and sin must be \[T, R\]"),
        (5, random(4, 4, 16, 2).transpose(2, 3), "the caches must be contiguous"),
        (6, random(3, 4, 2, 13), "k_cache and v_cache must have as many slots"),
        (7, torch.zeros(5), "slot_mapping must be int32 or int64"),
        (0, random(5, 4, 16).double(), "q must be float32, bfloat16 or float16"),
    ],
)
def test_rope_refuses_what_does_not_fit(cpu, index, value, message):
    args = rope_args(5, 16, 16)
    caches = args[5:7]
    args[index] = value
    with pytest.raises(RuntimeError, match=message):
        cpu.rope_write_kv(*args)
    assert all(cache.isnan().all() for cache in caches)


@pytest.mark.parametrize("r", [3, 18])
def test_rope_refuses_an_odd_or_too_large_number_of_columns(cpu, r):
    with pytest.raises(RuntimeError, match=f"cos and sin have {r} columns, which must be even and at most 16"):
        cpu.rope_write_kv(*rope_args(5, 16, r))


def test_sizes_and_dtypes_that_do_not_fit_are_refused(cpu):
    with pytest.raises(RuntimeError, match=r"takes x \[\.\.\., D\] and a weight \[D\]"):
        cpu.rms_norm(random(2, 7), random(8), 1e-6, 0.0)
    with pytest.raises(RuntimeError, match="x and residual must be of one shape"):
        cpu.add_rms_norm(random(2, 8), random(1, 8), random(8), 1e-6, 0.0)
    with pytest.raises(RuntimeError, match=r"gate_up must be \[\.\.\., 2 N\]"):
        cpu.silu_and_mul(random(2, 7))
    with pytest.raises(RuntimeError, match="weight must be float32, bfloat16 or float16"):
        cpu.rms_norm(random(2, 8), random(8).double(), 1e-6, 0.0)
    with pytest.raises(RuntimeError, match="gate_up must be float32, bfloat16 or float16"):
        cpu.gelu_and_mul(random(2, 8).double(), True)


# Both providers.


def test_no_tokens(ops):
    weight = random(8)
    for shape in ((0, 8), (2, 0, 8)):
        x = random(*shape)
        assert ops.rms_norm(x, weight, 1e-6, 0.0).shape == shape
        assert [out.shape for out in ops.add_rms_norm(x, x, weight, 1e-6, 0.0)] == [shape, shape]
        assert ops.silu_and_mul(x).shape == (*shape[:-1], 4)
        assert ops.gelu_and_mul(x, True).shape == (*shape[:-1], 4)
    assert ops.silu_and_mul(random(3, 0)).shape == (3, 0)
    *args, k_cache, v_cache, slots = rope_args(0, 16, 8)
    assert ops.rope_write_kv(*args, k_cache, v_cache, slots).shape == (0, 4, 16)
    assert k_cache.isnan().all()


@ONE_DTYPE
@pytest.mark.parametrize("op", FUSED)
def test_opcheck(ops, op, dtype):
    x = strided_views(random(3, 2, 24, dtype=dtype))[4]
    rope = rope_args(3, 16, 8, dtype=dtype)
    args = {
        "rms_norm": (x, random(24), 1e-6, 1.0),
        "add_rms_norm": (x, random(1, 3, 2, 24), random(24), 1e-6, 0.0),
        "silu_and_mul": (x,),
        "gelu_and_mul": (x, True),
        "rope_write_kv": (*rope[:5], *(cache.nan_to_num(1.0) for cache in rope[5:7]), rope[7]),
    }
    results = torch.library.opcheck(getattr(ops, op), args[op])
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("mark", ["backed", "unbacked"])
def test_one_graph_serves_all_numbers_of_tokens(ops, mark):
    """Unbacked sizes turn any guard on them into an error, so there one token goes through the same graph."""

    def layer(qkv, residual, weight, cos, sin, k_cache, v_cache, slots):
        q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
        q, k = ops.rms_norm(q, weight, 1e-6, 1.0), ops.rms_norm(k, weight, 1e-6, 1.0)
        rotated = ops.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots)
        normed, total = ops.add_rms_norm(rotated, residual, weight, 1e-6, 0.0)
        return ops.silu_and_mul(normed) + ops.gelu_and_mul(normed, False) + ops.gelu_and_mul(normed, True), total

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    marker = torch._dynamo.mark_dynamic if mark == "backed" else torch._dynamo.decorators.mark_unbacked
    weight = random(16)
    for tokens in (9, 70, 3) if mark == "backed" else (9, 70, 1, 64):
        caches = [torch.zeros(tokens + 5, 4, 2, 16) for _ in "kv"]
        args = [random(tokens, 12, 16), random(tokens, 8, 16).flip(0), weight, random(tokens, 8), random(tokens, 8) + 1]
        args += [*caches, torch.arange(tokens)]
        copies = [x.clone() for x in args]
        expected = layer(*copies)
        for x in args[:2] + args[3:]:
            marker(x, 0)
        out = compiled(*args)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True))
    assert counter.frame_count == 1
