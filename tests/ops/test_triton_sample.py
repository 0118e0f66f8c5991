"""sample in Triton: its draws and its kept ids are the specification's; rows stand alone.

Under the interpreter a filtered row takes a quarter of a second, so rows are few there. On a GPU they are many.
"""

import pytest
import torch
import triton
import triton.language as tl

from ops import sample as specification
from ops.schema import overload
from ops.triton import sample as kernels

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # to infinity, as it should
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arguments(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, masked_ids=None):
    """What the op takes; a scalar parameter holds for every row."""
    rows = logits.shape[0]

    def per_row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return (
        logits,
        per_row(temperature, torch.float32),
        per_row(top_k, torch.int32),
        per_row(top_p, torch.float32),
        per_row(min_p, torch.float32),
        per_row(seed, torch.int64),
        per_row(position, torch.int64),
        torch.full((rows, 0), -1, dtype=torch.int32) if masked_ids is None else masked_ids.to(torch.int32),
    )


def on_device(*tensors):
    """On the device, strides kept."""
    return [tensor.to(DEVICE) for tensor in tensors]


def draw(logits, **parameters):
    return overload("sample", "triton")(*on_device(*arguments(logits, **parameters))).cpu()


def specified(logits, **parameters):
    return overload("sample", "reference")(*arguments(logits, **parameters))


def noisy(rows, vocabulary, dtype=torch.float32, scale=3.0):
    return (scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5))).to(dtype)


# Greedy twice; then each filter alone, the first two together, all three, and none.
MIXED = {
    "temperature": torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.3, 1.0, 2.0]),
    "top_k": torch.tensor([0, 1, 5, 0, 0, 12, 40, 0]),
    "top_p": torch.tensor([0.5, 1.0, 1.0, 0.8, 1.0, 0.9, 0.7, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.01, 0.0]),
    "seed": torch.tensor([1, 2, -3, 2**62, 5, -(2**62), 7, 8]),
    "position": torch.tensor([0, 5, 3, 1000, 2**31, 17, 99, 1]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 2081, 5000])
def test_draws_equal_the_specifications(dtype, vocabulary):
    logits = noisy(8, vocabulary, dtype)
    assert torch.equal(draw(logits, **MIXED), specified(logits, **MIXED))


def test_nearly_all_draws_equal_the_specifications():
    """exp and log may differ in their last bits, so at most one draw in a thousand may."""
    rows = 20_000 if DEVICE == "cuda" else 150
    logits = noisy(rows, 300, scale=0.5)
    parameters = {"seed": torch.arange(rows) % 7, "position": torch.arange(rows)}
    different = draw(logits, **parameters) != specified(logits, **parameters)
    assert int(different.sum()) <= rows // 1000


@triton.jit
def _noise_kernel(out, seed, position):
    ids = tl.arange(0, 1024)
    tl.store(out + ids, kernels._gumbel(tl.load(seed), tl.load(position), ids))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (12345, 678), (-(2**63), 2**63 - 1), (2**63 - 1, -1)])
def test_noise_is_the_specifications(seed, position):
    out = torch.empty(1024, device=DEVICE)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    _noise_kernel[(1,)](out, *on_device(seeds, positions))
    key = specification._mix(specification._mix(seeds + specification._GAMMA) + positions * specification._GAMMA)
    expected = specification._gumbel(key[0], torch.arange(1024))
    torch.testing.assert_close(out.cpu(), expected, rtol=5e-7, atol=5e-7)


def kept(logits, monkeypatch, **parameters):
    """The ids that each row may draw, by its floor."""
    names = kernels._draws_kernel.arg_names
    bounds = []

    class Launcher:
        def __getitem__(self, grid):
            return lambda *args, **options: bounds.append(args[names.index("bounds")].cpu())

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_draws_kernel", Launcher())
        draw(logits, **parameters)
    floors = bounds[0][:, 1]
    return [set((row >= floor).nonzero().flatten().tolist()) for row, floor in zip(logits.float(), floors, strict=True)]


def specified_kept(logits, monkeypatch, **parameters):
    """The ids that reach the specification's final draw, row by row."""
    reached = []
    gumbel = specification._gumbel
    with monkeypatch.context() as patch:
        patch.setattr(specification, "_gumbel", lambda key, ids: reached.append(set(ids.tolist())) or gumbel(key, ids))
        specified(logits, **parameters)
    return reached


def check_kept(logits, monkeypatch, **parameters):
    expected = specified_kept(logits, monkeypatch, **parameters)
    assert len(expected) == len(logits)
    assert kept(logits, monkeypatch, **parameters) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_keeps_what_the_specification_keeps(dtype, monkeypatch):
    """700 ids are 22 groups, and the search begins otherwise where k is above. Rounded to eighths, many are equal."""
    top_k = torch.tensor([2, 3, 21, 22, 23, 300, 699, 700, 701, 2**31 - 1])
    logits = ((noisy(10, 700) * 8).round() / 8).to(dtype)
    logits[::2] = noisy(5, 700, dtype)
    logits[3, :690] = -INF  # more are asked for than there are
    check_kept(logits, monkeypatch, top_k=top_k, temperature=0.8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_keeps_what_the_specification_keeps(dtype, monkeypatch):
    """The temperatures put the floor on either side of the first thresholds, 2 and 8 temperatures below the peak."""
    top_p = torch.tensor([1e-6, 0.1, 0.5, 0.9, 0.99, 0.5, 0.9, 0.3])
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.01, 100.0, 3.4e38])
    logits = noisy(8, 700, dtype)
    logits[2] = logits[2, 0]  # all or nothing
    check_kept(logits, monkeypatch, top_p=top_p, temperature=temperature)


def test_min_p_keeps_what_the_specification_keeps(monkeypatch):
    min_p = torch.tensor([1e-30, 0.01, 0.2, 0.9, 1.0])
    check_kept(noisy(5, 700), monkeypatch, min_p=min_p, temperature=torch.tensor([1.0, 0.5, 3.0, 1.0, 1e-30]))


def test_filters_together_keep_what_the_specification_keeps(monkeypatch):
    logits = noisy(6, 3000, torch.bfloat16)
    top_k, top_p = torch.tensor([20, 20, 50, 2, 2000, 3]), torch.tensor([0.5, 0.95, 0.8, 0.9, 0.9, 0.2])
    min_p = torch.tensor([0.0, 0.2, 0.01, 0.3, 0.0, 0.0])
    masked_ids = logits.float().topk(3).indices.masked_fill(torch.arange(6)[:, None] % 2 == 0, -1)
    check_kept(logits, monkeypatch, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = specified_kept(logits, monkeypatch, top_k=top_k, top_p=top_p, min_p=min_p, masked_ids=masked_ids)
    found = kept(logits, monkeypatch, top_k=top_k, top_p=top_p, min_p=min_p, masked_ids=masked_ids)
    assert [ids - set(masked.tolist()) for ids, masked in zip(found, masked_ids, strict=True)] == expected


def test_scores_that_rounding_makes_equal_are_kept_together(monkeypatch):
    """The specification compares scores and probabilities: there 1e-9 and 2e-9 below a peak of 100 are one."""
    logits = torch.tensor([[100.0, 2e-9, 1e-9, -50.0, -60.0], [1e-9, 0.0, -1e-9, -5.0, -6.0]])
    check_kept(logits, monkeypatch, top_k=2)
    check_kept(logits, monkeypatch, top_p=torch.tensor([0.9, 0.3]))
    check_kept(logits, monkeypatch, min_p=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_of_ties_among_random_rows(dtype):
    logits = torch.zeros(5, 5000, dtype=dtype)
    logits[:, [7, 23, 2048, 4999]] = 2.0
    logits[4, [7, 23]] = -0.0
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0])
    tokens = draw(logits, temperature=temperature, top_k=torch.tensor([0, 0, 1, 5, 3]), top_p=0.9)
    assert tokens.dtype == torch.int64
    assert tokens[[0, 2, 4]].tolist() == [7, 7, 2048]
    assert draw(-logits.abs() * 0, temperature=0.0).tolist() == [0] * 5


def test_a_row_draws_the_same_in_any_company():
    logits = noisy(8, 2100, torch.bfloat16)
    together = draw(logits, **MIXED)
    for chosen in ([3], [7], [6, 2, 5], [7, 6, 5, 4, 3, 2, 1, 0]):
        company = draw(logits[chosen], **{name: value[chosen] for name, value in MIXED.items()})
        assert torch.equal(company, together[chosen])


def test_seed_and_position_choose_the_noise():
    flat = torch.zeros(5, 1000)
    tokens = draw(flat, seed=torch.tensor([0, 0, 1, 1, -1]), position=torch.tensor([0, 1, 0, 1, 0]))
    assert len(set(tokens.tolist())) == 5


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.5}])
def test_draws_follow_the_softmax(filters):
    """2 of 5 are left out by each filter: 18.5 is exceeded once in a thousand, or 13.8 for 3 ids."""
    if filters and DEVICE == "cpu":
        pytest.skip("needs many filtered rows, too slow when interpreted; their kept ids and draws are tested above")
    count = 20_000 if DEVICE == "cuda" else 300
    logits = torch.tensor([0.05, 0.2, 0.35, 0.1, 0.3]).log()
    probs = logits.softmax(-1) * (torch.tensor([False, True, True, False, True]) if filters else 1)
    tokens = draw(logits.expand(count, -1), position=torch.arange(count), **filters)
    observed, expected = torch.bincount(tokens, minlength=5), count * probs / probs.sum()
    assert int(observed[probs == 0].sum()) == 0
    statistic = ((observed - expected)[probs > 0] ** 2 / expected[probs > 0]).sum()
    assert statistic < (13.8 if filters else 18.5)


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_masked_ids_are_not_drawn(parameters):
    """The ids lie at both ends of groups, chunks and the vocabulary; -1 may stand anywhere."""
    logits = torch.full((4, 4100), -1000.0)
    logits[:, [0, 31, 32, 63, 2047, 2048, 4099]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    masked_ids = torch.tensor([[0, -1, 31, -1], [-1, -1, -1, -1], [32, 31, 0, 63], [2047, 4099, 0, 31]])
    before = logits.clone()
    tokens = draw(logits, masked_ids=masked_ids, **parameters)
    assert torch.equal(tokens, specified(logits, masked_ids=masked_ids, **parameters))
    assert not (tokens[:, None] == masked_ids).any()
    assert torch.equal(logits, before)


def test_many_masked_ids():
    """More than are looked at at once: all but one."""
    logits, left = noisy(2, 300), torch.tensor([255, 64])
    masked_ids = torch.stack([torch.arange(300)[torch.arange(300) != one] for one in left])
    assert torch.equal(draw(logits, masked_ids=masked_ids, temperature=torch.tensor([0.0, 1.0])), left)


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {}, {"temperature": 1e-30, "top_k": 2, "top_p": 0.5}])
def test_extreme_logits(parameters):
    rows = [[-INF, -INF, 1.0], [-3e38, -INF, -2e38], [3e38, 3e37, -3e38], [-INF, INF, 0.0], [-INF, -INF, -INF]]
    nan = [1.0, float("nan"), INF]
    assert draw(torch.tensor([*rows, nan]), **parameters).tolist() == [2, 2, 0, 1, 0, 1]


def test_vocabulary_of_one_and_no_rows():
    parameters = {"top_k": 3, "top_p": 0.5, "min_p": 0.5}
    assert draw(noisy(3, 1), temperature=torch.tensor([0.0, 1.0, 2.0]), **parameters).tolist() == [0, 0, 0]
    assert draw(torch.empty(0, 5)).tolist() == []


def test_rows_of_any_strides():
    logits, parameters = noisy(3, 100), {"temperature": torch.tensor([0.0, 1.0, 1.0]), "top_k": torch.tensor([0, 0, 5])}
    wide = torch.full((3, 164), float("nan"))
    wide[:, 32:132] = logits
    expected = specified(logits, **parameters)
    assert torch.equal(draw(wide[:, 32:132], **parameters), expected)
    assert torch.equal(draw(logits.T.contiguous().T, **parameters), expected)
    assert draw(logits[:1].expand(2, -1), temperature=0.0).tolist() == [int(logits[0].argmax())] * 2


def test_offsets_are_64_bits():
    """Rows 2**30 elements apart, the last ones without memory in between: only where the device can hold them."""
    rows, stride = 3, 2**30
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 3 * stride * 2:
            pytest.skip("needs 6 GiB of GPU memory")
        pool = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    else:
        pool = torch.empty(rows * stride, dtype=torch.bfloat16)  # virtual: untouched pages are not real
    logits = pool.as_strided((rows, 50), (stride, 1))
    logits.copy_(noisy(rows, 50, torch.bfloat16))
    tokens = overload("sample", "triton")(logits, *on_device(*arguments(logits, temperature=0.0)[1:]))
    assert torch.equal(tokens, logits.argmax(-1))


def test_opcheck():
    tensors = on_device(*arguments(noisy(2, 50), temperature=torch.tensor([0.0, 1.0]), min_p=0.1))
    torch.library.opcheck(overload("sample", "triton"), tuple(tensors))


def test_one_dynamic_graph():
    sample = overload("sample", "triton")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *tensors: sample(*tensors), backend=backend, dynamic=True, fullgraph=True)
    for rows, masks in ((8, 2), (4, 3), (5, 4)):
        logits = noisy(rows, 70)
        parameters = {
            "temperature": torch.arange(rows) % 2,
            "min_p": 0.01,
            "position": torch.arange(rows),
            "masked_ids": torch.arange(rows * masks).view(rows, masks) - 1,
        }
        found = compiled(*on_device(*arguments(logits, **parameters)))
        assert torch.equal(found.cpu(), specified(logits, **parameters))
    assert len(graphs) == 1


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_a_captured_graph_follows_its_inputs():
    """Captured with greedy rows, replayed with all kinds."""
    tensors = on_device(*arguments(noisy(8, 5000), temperature=0.0, masked_ids=torch.full((8, 2), -1)))
    sample = overload("sample", "triton")
    sample(*tensors)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(*tensors)
    others = arguments(noisy(8, 5000).flip(0), **MIXED, masked_ids=torch.tensor([[3, -1]] * 4 + [[-1, -1]] * 4))
    for tensor, other in zip(tensors, others, strict=True):
        tensor.copy_(other)
    for _ in range(2):
        graph.replay()
        assert torch.equal(tokens.cpu(), overload("sample", "reference")(*others))
