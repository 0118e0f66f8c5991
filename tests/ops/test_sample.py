"""sample: greedy rows, supports against a sort-based oracle, distributions, and independence of the neighbours."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ops  # noqa: F401  (defines torch.ops.pagegraph)
from ops import sample as sample_module

INF = float("inf")


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, masked_ids=None):
    """Call the op; a scalar parameter holds for every row."""
    rows = logits.shape[0]

    def per_row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return torch.ops.pagegraph.sample.reference(
        logits,
        per_row(temperature, torch.float32),
        per_row(top_k, torch.int32),
        per_row(top_p, torch.float32),
        per_row(min_p, torch.float32),
        per_row(seed, torch.int64),
        per_row(position, torch.int64),
        torch.full((rows, 0), -1, dtype=torch.int32) if masked_ids is None else masked_ids.to(torch.int32),
    )


def draws(logits, count, **parameters):
    """Draw `count` times from logits [V], at successive positions."""
    return draw(logits.expand(count, -1), position=torch.arange(count), **parameters)


def support(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The ids that reach the final draw and have a finite logit."""
    reached = []
    gumbel = sample_module._gumbel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_module, "_gumbel", lambda key, ids: reached.extend(ids.tolist()) or gumbel(key, ids))
        drawn = draw(logits[None], top_k=top_k, top_p=top_p, min_p=min_p).item()
    assert drawn in reached
    return {i for i in reached if logits[i] > -INF}


def oracle_support(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The same by sorting: cut after the k-th, then after the first whose cumulative mass reaches top_p; keep ties.

    In float64, so examples whose probabilities lie on a border up to float32's rounding are left out.
    """
    values = (logits - logits.max()).tolist()
    kept = sorted(range(len(values)), key=lambda i: -values[i])
    if 0 < top_k < len(kept):
        kept = [i for i in kept if values[i] >= values[kept[top_k - 1]]]
    probs = torch.tensor(sorted((values[i] for i in kept), reverse=True), dtype=torch.float64).softmax(0)
    mass = probs.cumsum(0)
    if top_p < 1:
        assume((mass - top_p).abs().min() > 1e-6)
        last = min(int((mass < top_p).sum()), len(kept) - 1)
        kept = [i for i in kept if values[i] >= values[kept[last]]]
    assume((probs - min_p * probs[0]).abs().min() > 1e-6 * probs[0])
    return {i for rank, i in enumerate(kept) if probs[rank] >= min_p * probs[0]}


# Multiples of 1/8: ties are common.
LOGITS = st.lists(st.integers(-24, 24).map(lambda i: i / 8), min_size=1, max_size=12).map(torch.tensor)
FRACTIONS = st.integers(1, 30).map(lambda i: i / 31)


@given(LOGITS, st.integers(2, 14))
def test_top_k_support(logits, top_k):
    assert support(logits, top_k=top_k) == oracle_support(logits, top_k=top_k)


@given(LOGITS, FRACTIONS)
def test_top_p_support(logits, top_p):
    assert support(logits, top_p=top_p) == oracle_support(logits, top_p=top_p)


@given(LOGITS, FRACTIONS)
def test_min_p_support(logits, min_p):
    assert support(logits, min_p=min_p) == oracle_support(logits, min_p=min_p)


@given(LOGITS, st.integers(2, 14), FRACTIONS, FRACTIONS)
def test_support_of_all_filters_together(logits, top_k, top_p, min_p):
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert support(logits, **filters) == oracle_support(logits, **filters)


def test_top_p_is_renormalised_after_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert support(logits, top_p=0.55) == {0, 1}
    assert support(logits, top_k=2, top_p=0.55) == {0}


def test_support_among_signed_zeros_and_infinities():
    assert support(torch.tensor([0.0, -0.0, -1.0]), top_k=2) == {0, 1}
    assert support(torch.tensor([-INF, 3.0, -INF, 2.0]), top_k=3) == {1, 3}
    assert support(torch.tensor([-INF, 3.0, -INF, 3.0]), top_p=0.3) == {1, 3}


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.data())
def test_threshold_is_the_kth_largest(values, data):
    k = data.draw(st.integers(1, len(values)))
    passes = 0

    def enough(top):
        nonlocal passes
        passes += 1
        return int(top.sum()) >= k

    assert sample_module._threshold(torch.tensor(values), enough) == sorted(values, reverse=True)[k - 1]
    assert passes <= 32


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_image_preserves_order(x, y):
    assert sample_module._from_image(sample_module._to_image(x)) == x
    if x < y:
        assert sample_module._to_image(x) < sample_module._to_image(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_lowest_of_ties_among_random_rows(dtype):
    logits = torch.zeros(5, 40, dtype=dtype)
    logits[:, [7, 23, 39]] = 2.0
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0])
    tokens = draw(logits, temperature, top_k=torch.tensor([0, 0, 1, 5, 3]), top_p=0.9)
    assert tokens.dtype == torch.int64
    assert tokens[[0, 2, 4]].tolist() == [7, 7, 7]
    assert draw(logits, 0.0).tolist() == [7] * 5


def test_greedy_rows_ignore_seed_position_and_draw_nothing(monkeypatch):
    logits = torch.randn(3, 50)
    monkeypatch.delattr(sample_module, "_draw")
    for seed in (0, -(2**63)):
        assert torch.equal(draw(logits, 0.0, seed=seed, position=seed), logits.argmax(-1))


def chi_square(logits, tokens):
    """Pearson's statistic of the counts against softmax(logits)."""
    expected = logits.double().softmax(-1) * len(tokens)
    observed = torch.bincount(tokens, minlength=len(logits))
    alive = expected > 0
    assert observed[~alive].sum() == 0
    return float(((observed - expected)[alive] ** 2 / expected[alive]).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature, vary):
    """7 degrees of freedom: 24.3 is exceeded once in a thousand."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0, -INF])
    tokens = draw(logits.expand(4000, -1), temperature, **{vary: torch.arange(4000)})
    assert chi_square(logits / temperature, tokens) < 24.3


def test_filtered_draws_follow_the_renormalised_softmax():
    """3 kept of 5, so 2 degrees of freedom: 13.8 is exceeded once in a thousand."""
    logits = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05]).log()
    kept = torch.where(torch.arange(5) < 3, logits, -INF)
    for filters in ({"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.5}):
        assert chi_square(kept, draws(logits, 1500, **filters)) < 13.8


def test_noise_is_gumbel():
    noise = sample_module._gumbel(torch.tensor(12345), torch.arange(200_000))
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert len(noise.unique()) > 195_000


def test_mix_is_splitmix64():
    """Outputs of the published generator seeded with 1234567."""
    states = torch.tensor([1234567]) + torch.arange(1, 6) * sample_module._GAMMA
    unsigned = [z % 2**64 for z in sample_module._mix(states).tolist()]
    assert unsigned == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_in_any_company(vocabulary, dtype):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(33, vocabulary, generator=generator).to(dtype)
    parameters = {
        "temperature": torch.rand(33, generator=generator).mul(2).where(torch.arange(33) % 5 > 0, 0),
        "top_k": torch.tensor([0, 5, 40]).repeat(11),
        "top_p": torch.rand(33, generator=generator).clamp(min=0.1),
        "min_p": torch.rand(33, generator=generator) * 0.1,
        "seed": torch.randint(-(2**62), 2**62, (33,), generator=generator),
        "position": torch.arange(33) * 17,
    }
    together = draw(logits, **parameters)
    for chosen in ([0], [4], [32], [7, 3], list(range(16)), list(range(32, -1, -1))):
        company = draw(logits[chosen], **{name: value[chosen] for name, value in parameters.items()})
        assert torch.equal(company, together[chosen])


def test_noise_depends_on_seed_position_and_token():
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0)]
    flat = torch.zeros(len(keys), 1000)
    tokens = draw(flat, seed=torch.tensor([k[0] for k in keys]), position=torch.tensor([k[1] for k in keys]))
    assert len(set(tokens.tolist())) == len(keys)
    assert len(set(draws(torch.zeros(1000), 100).tolist())) > 80


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_ids_are_never_drawn(temperature):
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0]).repeat(300, 1)
    masked = torch.tensor([[0, -1, 2], [-1, -1, -1], [3, 1, 0]]).repeat(100, 1)
    before = logits.clone()
    tokens = draw(logits, temperature, position=torch.arange(300), masked_ids=masked).view(100, 3)
    greedy = [{1}, {0}, {2}]
    allowed = greedy if temperature == 0 else [{1, 3}, {0, 1, 2, 3}, {2}]
    assert [set(column.tolist()) for column in tokens.T] == allowed
    assert torch.equal(logits, before)


def test_masks_leave_the_draws_of_others_alone():
    logits = torch.randn(4, 30)
    position = torch.arange(4)
    masked = torch.tensor([[-1], [-1], [3], [-1]])
    free = draw(logits, position=position)
    assert torch.equal(draw(logits, position=position, masked_ids=masked)[[0, 1, 3]], free[[0, 1, 3]])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30])
def test_extreme_logits(temperature):
    rows = [[-INF, -INF, 1.0], [-3e38, -INF, -2e38], [3e38, 3e37, -3e38], [-INF, INF, 0.0], [-INF, -INF, -INF]]
    assert draw(torch.tensor(rows), temperature).tolist() == [2, 2, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_of_one(dtype):
    parameters = {"temperature": torch.tensor([0.0, 1.0, 2.0]), "top_k": 3, "top_p": 0.5, "min_p": 0.5}
    assert draw(torch.randn(3, 1, dtype=dtype), **parameters).tolist() == [0, 0, 0]


def test_no_rows():
    assert draw(torch.empty(0, 5)).tolist() == []


def test_bfloat16_draws_equal_those_of_its_values_in_float32():
    logits = torch.randn(64, 500).to(torch.bfloat16)
    parameters = {"top_p": 0.9, "position": torch.arange(64)}
    assert torch.equal(draw(logits, **parameters), draw(logits.float(), **parameters))
