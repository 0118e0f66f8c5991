"""The C++ linear against float64, at every instruction set of the machine."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from ops.cpu import library as loading
from ops.cpu.build import ISA_FLAGS, BuildError

DTYPES = [
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
    pytest.param(torch.float32, torch.bfloat16, id="fp32-bf16"),
    pytest.param(torch.bfloat16, torch.float32, id="bf16-fp32"),
]


@contextmanager
def linear_with(isa):
    """The op with an instruction set, that of before is in use afterwards."""
    try:
        library = loading.load()
    except BuildError as error:
        pytest.skip(str(error))
    if isa not in library.isas:
        pytest.skip(f"this machine has no {isa}")
    before = library.isa
    library.use(isa)
    yield torch.ops.pagegraph.linear.cpu
    library.use(before)


@pytest.fixture(params=ISA_FLAGS)
def linear(request):
    with linear_with(request.param) as op:
        yield op


@pytest.fixture
def amx():
    with linear_with("amx") as op:
        yield op


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_within_budget(out, x, weight, bias=None):
    """The error is at most twice that of plain torch in x's precision, plus one rounding to it, plus a random walk of K
    roundings of float32 sums."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    roundings = torch.finfo(x.dtype).eps + torch.finfo(torch.float32).eps * x.shape[-1] ** 0.5
    atol = roundings * exact.abs().max()
    assert (out.shape, out.dtype) == (exact.shape, x.dtype)
    assert out.is_contiguous()
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + atol


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("k", [1, 7, 33, 80, 576, 2100])
@pytest.mark.parametrize("n", [1, 5, 130])
def test_linear_at_odd_sizes(linear, n, k, dtype, weight_dtype):
    weight, bias = random(n, k, dtype=weight_dtype), random(n, dtype=dtype)
    for rows in (1, 2, 3, 5, 8, 64, 65, 97):
        x = random(rows, k, dtype=dtype)
        assert_within_budget(linear(x, weight, bias), x, weight, bias)
        assert_within_budget(linear(x, weight, None), x, weight)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
def test_linear_at_every_number_of_rows(linear, dtype, weight_dtype):
    """Past 512, x is packed in pieces."""
    weight = random(29, 70, dtype=weight_dtype)
    for rows in (*range(1, 82), 200, 512, 513, 1100):
        x = random(rows, 70, dtype=dtype)
        assert_within_budget(linear(x, weight, None), x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_and_a_large_weight(linear, dtype):
    """Small float32 weights may be torch's business, these are large. So many rows of x are packed in pieces."""
    weight, x, bias = random(1025, 2100, dtype=dtype), random(550, 2100, dtype=dtype), random(1025, dtype=dtype)
    assert_within_budget(linear(x[:67], weight, bias), x[:67], weight, bias)
    assert_within_budget(linear(x, weight[:40], bias[:40]), x, weight[:40], bias[:40])


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("k", [33, 576, 2100])
def test_a_row_is_bit_for_bit_the_same_alone_and_in_a_batch(linear, k, dtype, weight_dtype):
    """Wherever it stands, up to 64 rows, on one thread or several, and among other rows of the weight."""
    weight, x = random(130, k, dtype=weight_dtype), random(64, k, dtype=dtype)
    alone = torch.cat([linear(row[None], weight, None) for row in x])
    for rows in (2, 3, 4, 7, 25, 33, 63, 64):
        assert torch.equal(linear(x[:rows], weight, None), alone[:rows])
        assert torch.equal(linear(x[-rows:], weight, None), alone[-rows:])
    for first in (1, 60, 129):
        assert torch.equal(linear(x[:5], weight[first:], None), alone[:5, first:])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(linear(x, weight, None), alone)
    finally:
        torch.set_num_threads(threads)


def test_with_amx_a_row_is_the_same_among_any_number_of_rows(amx):
    weight, x = random(70, 2100, dtype=torch.bfloat16), random(550, 2100, dtype=torch.bfloat16)
    alone = torch.cat([amx(row[None], weight, None) for row in x])
    for rows in (65, 96, 193, 550):
        assert torch.equal(amx(x[:rows], weight, None), alone[:rows])


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 90])
def test_strides_and_leading_dims_are_free(linear, rows, dtype, weight_dtype):
    """x is a slice of a merged projection, transposed, or has more dimensions; weight and bias are slices too."""
    packed = random(rows, 200, dtype=dtype)
    x = packed[:, 60:130]
    whole = torch.full((40, 90), float("nan"), dtype=weight_dtype)
    weight = whole[3:36, 10:80].copy_(random(33, 70, dtype=weight_dtype))
    bias = random(66, dtype=dtype)[::2]
    expected = linear(x.contiguous(), weight.contiguous(), bias.contiguous())
    assert_within_budget(expected, x, weight, bias)
    assert torch.equal(linear(x, weight, bias), expected)
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias), expected)
    assert torch.equal(linear(x[None], weight, bias), expected[None])
    cube = x.unflatten(0, (-1, rows)).expand(2, rows, 70)
    assert torch.equal(linear(cube, weight, bias), linear(cube.reshape(-1, 70), weight, bias).view(2, rows, 33))
    assert torch.equal(linear(x[0], weight, bias), linear(x[:1], weight, bias)[0])


def test_nan_and_infinity_stay_in_their_row_and_column(linear):
    for rows in (5, 70):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = random(rows, 40, dtype=dtype), random(20, 40, dtype=dtype)
            clean = linear(x, weight, None)
            x[2, 39], weight[3, 0] = float("nan"), float("inf")
            out = linear(x, weight, None)
            assert out[2].isnan().all()
            assert not out[:, 3].isfinite().any()
            others = torch.ones_like(out, dtype=torch.bool)
            others[2], others[:, 3] = False, False
            assert torch.equal(out[others], clean[others])


def test_empty_sizes(linear):
    weight = random(5, 8)
    assert linear(random(0, 8), weight, None).shape == (0, 5)
    assert linear(random(2, 0, 8), weight, None).shape == (2, 0, 5)
    assert linear(random(3, 8), weight[:0], None).shape == (3, 0)
    assert linear(random(3, 0), random(5, 0), random(5)).equal(random(5).expand(3, 5))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_and_layouts_are_left_to_torch(linear, dtype, rows):
    x, weight, bias = random(rows, 20, dtype=dtype), random(6, 20, dtype=dtype), random(6, dtype=dtype)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    x, transposed = random(rows, 20), random(20, 6).t()
    assert torch.equal(linear(x, transposed, None), F.linear(x, transposed))


def test_sizes_that_do_not_fit_are_refused(linear):
    with pytest.raises(RuntimeError, match=r"takes x \[\.\.\., K\] and a weight \[N, K\]"):
        linear(random(2, 7), random(5, 8), None)
    with pytest.raises(RuntimeError, match=r"bias must be \[5\]"):
        linear(random(2, 8), random(5, 8), random(4))


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("rows", [1, 70])
def test_opcheck(linear, rows, dtype, weight_dtype):
    args = random(rows, 24, dtype=dtype), random(5, 24, dtype=weight_dtype), random(5, dtype=dtype)
    results = torch.library.opcheck(linear, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("mark", ["backed", "unbacked"])
def test_one_graph_serves_all_numbers_of_rows(linear, mark):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, weight: linear(x[:, :40], weight, None) * 2, backend=counter, fullgraph=True)
    marker = torch._dynamo.mark_dynamic if mark == "backed" else torch._dynamo.decorators.mark_unbacked
    weight = random(12, 40, dtype=torch.bfloat16)
    for rows in (9, 70, 3) if mark == "backed" else (9, 70, 1, 64):
        x = random(rows, 50)
        expected = linear(x[:, :40], weight, None) * 2
        marker(x, 0)
        assert torch.equal(compiled(x, weight), expected)
    assert counter.frame_count == 1


@pytest.fixture
def grouped(linear):
    """The op `grouped_linear`, under the instruction set of `linear`."""
    return torch.ops.pagegraph.grouped_linear.cpu


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES)
@pytest.mark.parametrize("counts", [(3, 0, 1, 64), (0, 0, 0, 1), (5,), (0, 0)], ids=str)
def test_experts_get_their_own_rows(grouped, linear, counts, dtype, weight_dtype):
    x = torch.randn(sum(counts) + 2, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(len(counts), 19, 37, generator=torch.Generator().manual_seed(1)).to(weight_dtype)
    ends = torch.tensor(counts).cumsum(0)
    out = grouped(x, weight, ends.to(torch.int32))
    assert out.shape == (sum(counts) + 2, 19)
    for expert, count in enumerate(counts):
        rows = slice(int(ends[expert]) - count, int(ends[expert]))
        assert torch.equal(out[rows], linear(x[rows], weight[expert], None))
    assert torch.equal(out[sum(counts) :], torch.zeros(2, 19, dtype=dtype))


def test_an_expert_with_many_rows(grouped):
    x, weight = random(150, 80), random(2, 33, 80)
    out = grouped(x, weight, torch.tensor([20, 150]))
    assert_within_budget(out[20:], x[20:], weight[1])


def test_experts_without_rows_are_not_read(grouped):
    weight = torch.full((3, 8, 16), float("nan"))
    weight[1] = 1
    assert torch.equal(grouped(torch.ones(2, 16), weight, torch.tensor([0, 2, 2])), torch.full((2, 8), 16.0))


@pytest.mark.parametrize("ends", [[2, 1], [1, 5], [-1, 2]], ids=str)
def test_offsets_that_do_not_rise_to_the_rows_are_refused(grouped, ends):
    with pytest.raises(RuntimeError, match="offsets must rise to at most S = 4"):
        grouped(torch.ones(4, 8), torch.ones(2, 3, 8), torch.tensor(ends))


def test_opcheck_of_grouped_linear(grouped):
    args = (torch.randn(4, 8), torch.randn(2, 3, 8), torch.tensor([1, 4], dtype=torch.int32))
    torch.library.opcheck(grouped, args)


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_a_bias_may_be_of_another_dtype(linear, rows):
    x, weight, bias = random(rows, 40), random(9, 40), random(9, dtype=torch.bfloat16)
    assert_within_budget(linear(x, weight, bias), x, weight, bias)
