"""The provider `varlen`: what it passes to torch's varlen_attn, here a stub that computes with SDPA, and refuses."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen as torch_varlen

from ops import providers, reference, varlen

NAN = float("nan")


def by_sdpa(query, key, value, cu_seq_q, k_lengths, k_of, scale, window_size, shared):
    """varlen_attn's result, sequence by sequence; padding tokens get NaN, as if it had left memory as it was."""
    out = torch.full_like(query, NAN)
    for row, (start, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        length = int(k_lengths[row])
        k, v = (k_of(cache, row)[:length].transpose(0, 1) for cache in (key, value))
        positions = torch.arange(length)
        queries = positions[length - (end - start) :, None]
        left = length if window_size[0] < 0 else window_size[0]
        visible = (positions <= queries) & (positions >= queries - left)
        q = query[start:end].transpose(0, 1)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], visible, scale=scale, enable_gqa=shared)
        out[start:end] = attended[0].transpose(0, 1)
    return out


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size[1] == 0, "not causal"
    assert (cu_seq_q.diff() <= max_q).all()
    assert (cu_seq_k.diff() <= max_k).all()
    assert {cu_seq_q.dtype, cu_seq_k.dtype} == {torch.int32}
    starts = cu_seq_k.tolist()
    return by_sdpa(
        query, key, value, cu_seq_q, cu_seq_k.diff(), lambda k, row: k[starts[row] :], scale, window_size, True
    )


def varlen_attn_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa or query.shape[1] == key.shape[-2]
    if block_table is None:
        return varlen_attn_2_11(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
        )
    assert cu_seq_k is None
    assert {seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert (cu_seq_q.diff() <= max_q).all()
    assert (seqused_k <= max_k).all()
    used = [-(-int(length) // key.shape[1]) for length in seqused_k]
    return by_sdpa(
        query,
        key,
        value,
        cu_seq_q,
        seqused_k,
        lambda k, row: k[block_table[row, : used[row]].long()].flatten(0, 1),
        scale,
        window_size,
        enable_gqa,
    )


def make_args(query_lens, heads=2, group=2, dim=16, dtype=torch.bfloat16, window=0) -> list:
    """Arguments of paged_attention: three sequences, NaN in what they do not own, padding tokens if T != B."""
    lens, block_size = (9, 40, 33), 16
    needed = [-(-length // block_size) for length in lens]
    ids = (torch.randperm(sum(needed)) + 1).split(needed)
    caches = [torch.full((sum(needed) + 1, block_size, heads, dim), NAN, dtype=dtype) for _ in "kv"]
    table = torch.full((3, max(needed) + 1), 0)
    for row, (blocks, length) in enumerate(zip(ids, lens, strict=True)):
        table[row, : needed[row]] = blocks
        for cache in caches:
            owned = torch.full((needed[row] * block_size, heads, dim), NAN)
            owned[:length] = torch.randn(length, heads, dim)
            cache[blocks] = owned.view(-1, block_size, heads, dim).to(dtype)
    for cache in caches:
        cache[0, 0] = 0.5
    tokens = sum(query_lens)
    q = torch.randn(tokens if tokens == 3 else tokens + 2, heads * group, dim).to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return [q, *caches, table, torch.tensor(lens), starts, 0.25, window, 0.0, None]


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (4, 1, 20)], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("function", "active"),
    [(varlen_attn_2_11, None), (varlen_attn_2_13, None), (varlen_attn_2_13, "FA3")],
    ids=["2.11", "2.13", "paged"],
)
def test_equals_the_reference(monkeypatch, function, active, query_lens, group, window):
    monkeypatch.setattr(torch_varlen, "varlen_attn", function)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active, raising=False)
    args = make_args(query_lens, group=group, window=window)
    out, expected = varlen.paged_attention(*args), reference.paged_attention(*args)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert out[sum(query_lens) :].eq(0).all()


def test_the_installed_function_has_the_parameters_that_are_passed():
    installed = inspect.signature(torch_varlen.varlen_attn).parameters
    for stub in (varlen_attn_2_11, varlen_attn_2_13):
        if len(inspect.signature(stub).parameters) == len(installed):
            assert list(inspect.signature(stub).parameters) == list(installed)
    assert varlen.problem() is None
    assert set(varlen.NEEDED) <= set(installed)


def test_a_torch_without_the_function_or_a_parameter_is_named(monkeypatch):
    def short(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False): ...

    monkeypatch.setattr(torch_varlen, "varlen_attn", short)
    assert varlen.problem() == f"varlen_attn of torch {torch.__version__} has no scale and no window_size"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert varlen.problem() == f"torch {torch.__version__} has no torch.nn.attention.varlen"


def changed(position: int, value) -> list:
    args = make_args((1, 1, 1))
    args[position] = value
    return args


@pytest.mark.parametrize(
    ("args", "feature"),
    [
        (changed(8, 5.0), r"a softcap \(5.0\)"),
        (changed(9, torch.zeros(4)), "sinks"),
        (changed(2, torch.zeros(9, 16, 2, 8).bfloat16()), "keys of 16 dimensions with values of 8"),
        (make_args((1, 1, 1), dim=20), "heads of 20 dimensions"),
        (make_args((1, 1, 1), dim=264), "heads of 264 dimensions"),
        (make_args((1, 1, 1), dtype=torch.float32), "queries of torch.float32"),
        (changed(0, torch.zeros(3, 4, 16).half()), "queries of torch.float16 with a cache of torch.bfloat16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_cannot_do_is_refused_by_name(args, feature):
    with pytest.raises(ValueError, match=f"provider 'varlen' of paged_attention does not support {feature}"):
        varlen.paged_attention(*args)


def test_slots_of_packed_sequences():
    table, starts = torch.tensor([[3, 4], [1, 9]]), torch.tensor([0, 3, 4], dtype=torch.int32)
    assert varlen._packed_slots(table, starts, 2).tolist() == [6, 7, 8, 2, 0, 0, 0, 0]


def test_it_is_chosen_only_when_asked_for():
    cuda = torch.device("cuda")
    assert providers.select("paged_attention", cuda, "varlen", torch.bfloat16).provider == "varlen"
    assert providers.select("paged_attention", cuda).provider != "varlen"
    with pytest.raises(ValueError, match="does not serve cuda with float32"):
        providers.select("paged_attention", cuda, "varlen", torch.float32)
    assert isinstance(torch.ops.pagegraph.paged_attention.varlen, torch._ops.OpOverload)
