"""paged_attention against dense attention, with everything unreadable poisoned, and the ops that move K and V."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops import reference  # and so torch.ops.pagegraph is defined

NAN = float("nan")


@dataclass
class Batch:
    """A filled paged cache and the dense K and V of each sequence it stands for."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    dense: list[tuple[Tensor, Tensor]]

    def attend(self, scale=0.3, window=0, softcap=0.0, sinks=None, **changes):
        tensors = {name: getattr(self, name) for name in list(self.__dataclass_fields__)[:6]} | changes
        return torch.ops.pagegraph.paged_attention.reference(*tensors.values(), scale, window, softcap, sinks)


def make_batch(
    lens, query_lens, *, block_size=16, heads=2, group=2, dk=16, dv=16, dtype=torch.float32, window=0, extra_columns=2
):
    """Build sequences of `lens` tokens, the last `query_lens` of which are queries, over scattered blocks.

    NaN everywhere but in what may be read: slot 0 of block 0, and the positions that some query of a sequence sees.
    """
    generator = torch.Generator().manual_seed(len(lens) * 1000 + sum(lens))
    needed = [-(-length // block_size) for length in lens]
    num_blocks = sum(needed) + 4
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    k_cache = torch.full((num_blocks, block_size, heads, dk), NAN, dtype=dtype)
    v_cache = torch.full((num_blocks, block_size, heads, dv), NAN, dtype=dtype)
    k_cache[0, 0] = v_cache[0, 0] = 0.5
    # Columns past a sequence's own name another block, which is NaN or a neighbour's.
    table = torch.full((len(lens), max(needed) + extra_columns), num_blocks - 1, dtype=torch.int32)
    dense = []
    for row, (length, query_len) in enumerate(zip(lens, query_lens, strict=True)):
        table[row, : needed[row]] = torch.tensor([ids.pop() for _ in range(needed[row])], dtype=torch.int32)
        k = torch.randn(length, heads, dk, generator=generator).to(dtype)
        v = torch.randn(length, heads, dv, generator=generator).to(dtype)
        dense.append((k, v))
        for position in range(max(0, length - query_len - window + 1) if window else 0, length):
            block, offset = table[row, position // block_size], position % block_size
            k_cache[block, offset], v_cache[block, offset] = k[position], v[position]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(query_lens), heads * group, dk, generator=generator).to(dtype)
    return Batch(q, k_cache, v_cache, table, torch.tensor(lens, dtype=torch.int32), starts, dense)


def dense_attention(batch, scale=0.3, window=0, softcap=0.0, sinks=None, dtype=torch.float64):
    """The same attention without pages, in `dtype` throughout, by concatenating sinks as one more column."""
    outs = []
    for row, (k, v) in enumerate(batch.dense):
        q = batch.q[batch.query_start_loc[row] : batch.query_start_loc[row + 1]].to(dtype)
        group = q.shape[1] // k.shape[1]
        k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        queries = torch.arange(len(k) - len(q), len(k))[:, None]
        keys = torch.arange(len(k))
        visible = (keys <= queries) & ((keys > queries - window) if window else True)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], -1)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outs)


def assert_within_budget(out, batch, **options):
    """The error is at most twice that of plain torch in the inputs' own precision, plus one rounding of it."""
    exact = dense_attention(batch, **options)
    plain = dense_attention(batch, **options, dtype=batch.q.dtype).double()
    atol = 4 * torch.finfo(batch.q.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= 2 * (plain - exact).abs().max() + atol


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 3.0, "sinks": True},
}


def resolve(options, q_heads, dtype=torch.float32):
    return options | ({"sinks": torch.linspace(-1, 2, q_heads, dtype=dtype)} if "sinks" in options else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 20, 1), (9, 40, 3)], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_equals_dense(options, query_lens, dtype):
    batch = make_batch((9, 40, 33), query_lens, dtype=dtype, window=options.get("window", 0))
    options = resolve(options, 4, dtype)
    out = batch.attend(**options)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_within_budget(out, batch, **options)


@pytest.mark.parametrize("query_lens", [(1, 1), (6, 1)], ids=["decode", "mixed"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(("dk", "dv"), [(80, 80), (96, 96), (24, 16), (16, 24)])
@pytest.mark.parametrize(("heads", "group"), [(3, 1), (1, 7), (2, 7)])
def test_attention_at_odd_sizes(heads, group, dk, dv, block_size, query_lens):
    batch = make_batch((17, 1), query_lens, block_size=block_size, heads=heads, group=group, dk=dk, dv=dv)
    out = batch.attend(window=0)
    assert out.shape == (sum(query_lens), heads * group, dv)
    assert_within_budget(out, batch)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("query_lens", [(1, 1), (600, 1)], ids=["decode", "tiled"])
def test_attention_over_a_long_context(query_lens, window):
    batch = make_batch((10_000, 1), query_lens, heads=1, dk=8, dv=8, window=window)
    assert_within_budget(batch.attend(window=window), batch, window=window)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode_path_equals_the_general_path(options):
    """One padding token makes T != B, so that the same decodes take the other path."""
    batch = make_batch((9, 40, 33), (1, 1, 1), window=options.get("window", 0))
    options = resolve(options, 4)
    general = batch.attend(**options, q=torch.cat([batch.q, batch.q[:1]]))
    torch.testing.assert_close(batch.attend(**options), general[:3])
    assert general[3].eq(0).all()


def test_mixed_batch_equals_its_sequences_alone():
    batch = make_batch((30, 7, 50), (12, 1, 50), window=6)
    together = batch.attend(window=6)
    for row in range(3):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        alone = batch.attend(
            window=6,
            q=batch.q[start:end],
            block_table=batch.block_table[row : row + 1],
            seq_lens=batch.seq_lens[row : row + 1],
            query_start_loc=torch.tensor([0, end - start]),
        )
        torch.testing.assert_close(alone, together[start:end])


def test_tiles_do_not_show(monkeypatch):
    batch = make_batch((70, 20), (60, 1), window=9)
    whole = batch.attend(window=9)
    monkeypatch.setattr("ops.reference.QUERY_TILE", 7)
    torch.testing.assert_close(batch.attend(window=9), whole)


@pytest.mark.parametrize("query_lens", [(1, 1), (5, 1)])
def test_strides_and_index_dtypes_are_free(query_lens):
    batch = make_batch((20, 9), query_lens)
    strided = torch.stack([batch.q, batch.q], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    wide = {name: getattr(batch, name).long() for name in ("block_table", "seq_lens", "query_start_loc")}
    assert torch.equal(batch.attend(q=strided, **wide), batch.attend())


def test_padding_rows_and_tokens():
    """A padded decode row reads slot 0 of block 0 (0.5 there), padding tokens of a mixed batch give zero."""
    batch = make_batch((9, 40, 33), (1, 1, 1))
    padded = batch.attend(
        q=torch.cat([batch.q, batch.q[:1]]),
        block_table=torch.cat([batch.block_table, torch.zeros_like(batch.block_table[:1])]),
        seq_lens=torch.cat([batch.seq_lens, torch.ones(1, dtype=torch.int32)]),
        query_start_loc=torch.arange(5, dtype=torch.int32),
    )
    torch.testing.assert_close(padded[:3], batch.attend())
    assert padded[3].eq(0.5).all()
    mixed = make_batch((9, 40), (3, 1))
    out = mixed.attend(q=torch.cat([mixed.q, torch.full_like(mixed.q, NAN)]))
    torch.testing.assert_close(out[:4], mixed.attend())
    assert out[4:].eq(0).all()


@pytest.mark.parametrize("query_lens", [(1, 1), (4, 1)])
def test_sequences_are_isolated(query_lens):
    """A sequence whose own cache is NaN, or a NaN in the null slot, leaves its neighbour as it was."""
    batch = make_batch((9, 40), query_lens)
    clean = batch.attend()
    batch.v_cache[batch.block_table[1, 0].item()] = NAN
    batch.k_cache[0] = batch.v_cache[0] = NAN
    out = batch.attend()
    assert torch.equal(out[: query_lens[0]], clean[: query_lens[0]])
    assert out[-1].isnan().all()


def test_attention_only_reads():
    batch = make_batch((9, 40), (1, 1))
    before = [x.clone() for x in (batch.q, batch.k_cache, batch.v_cache)]
    batch.attend(softcap=2.0, sinks=torch.zeros(4))
    for x, y in zip((batch.q, batch.k_cache, batch.v_cache), before, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_kv_touches_its_slots_only(block_size):
    """Three rows padded to four: all else stays bit for bit, and padding goes to slot 0 of block 0."""
    k_cache = torch.randn(6, block_size, 2, 5)
    v_cache = torch.randn(6, block_size, 2, 3)
    before = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(4, 2, 5), torch.randn(4, 2, 3)
    slots = torch.tensor([5 * block_size, 2 * block_size + block_size - 1, 3 * block_size, 0])
    assert torch.ops.pagegraph.write_kv.reference(k, v, k_cache, v_cache, slots) is None
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        expected = old.clone()
        for token, slot in enumerate(slots.tolist()):
            expected[slot // block_size, slot % block_size] = new[token]
        assert torch.equal(cache, expected)


def test_write_kv_takes_any_strides_and_many_padding_tokens():
    qkv = torch.randn(5, 3, 4, 6)
    k, v = qkv[:, 1].transpose(1, 2), qkv[:, 2].transpose(1, 2)
    k_cache, v_cache = torch.zeros(3, 4, 6, 4), torch.zeros(3, 4, 6, 4)
    torch.ops.pagegraph.write_kv.reference(k, v, k_cache, v_cache, torch.tensor([0, 4, 0, 11, 0]))
    assert torch.equal(k_cache.view(12, 6, 4)[[4, 11]], k[[1, 3]])
    assert torch.equal(v_cache.view(12, 6, 4)[[4, 11]], v[[1, 3]])
    assert k_cache.view(12, 6, 4)[[1, 2, 3, 5, 6, 7, 8, 9, 10]].eq(0).all()


def test_written_positions_are_what_attention_reads():
    """Step by step through the cache equals attention over the whole."""
    batch = make_batch((11,), (11,), block_size=4)
    k, v = batch.dense[0]
    k_cache, v_cache = torch.full_like(batch.k_cache, NAN), torch.full_like(batch.v_cache, NAN)
    outs = []
    for start, end in ((0, 5), (5, 6), (6, 11)):
        positions = torch.arange(start, end)
        slots = batch.block_table[0, positions // 4].long() * 4 + positions % 4
        torch.ops.pagegraph.write_kv.reference(k[start:end], v[start:end], k_cache, v_cache, slots)
        step = {"q": batch.q[start:end], "k_cache": k_cache, "v_cache": v_cache}
        loc = torch.tensor([0, end - start])
        outs.append(batch.attend(**step, seq_lens=torch.tensor([end]), query_start_loc=loc))
    torch.testing.assert_close(torch.cat(outs), batch.attend())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copy_blocks(dtype):
    caches = [torch.randn(6, 4, 2, 5), torch.randn(6, 4, 2, 3)]
    expected = [cache[[0, 1, 5, 1, 4, 5]].clone() for cache in caches]
    src_dst = torch.tensor([[5, 2], [1, 3]], dtype=dtype)
    assert torch.ops.pagegraph.copy_blocks.reference(caches, src_dst) is None
    assert all(torch.equal(cache, want) for cache, want in zip(caches, expected, strict=True))
    torch.ops.pagegraph.copy_blocks.reference(caches, src_dst[:0])
    assert all(torch.equal(cache, want) for cache, want in zip(caches, expected, strict=True))


def test_copy_blocks_keeps_nan_bits():
    cache = torch.full((3, 2, 1, 1), NAN)
    cache[1] = 1.0
    torch.ops.pagegraph.copy_blocks.reference([cache], torch.tensor([[0, 1]]))
    assert cache.isnan().all()


BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bit_patterns(blocks, dtype):
    """Caches of two layers, Dk 5 and Dv 3, of random bits: NaNs of all kinds are among them, and each holds a -0.0."""
    caches = []
    for dim in (5, 5, 3, 3):
        limits = torch.iinfo(BITS[dtype])
        bits = torch.randint(limits.min, limits.max, (blocks, 4, 2, dim), dtype=BITS[dtype])
        bits[:, 0, 0, 0] = limits.min  # -0.0
        bits[:, 0, 0, 1] = torch.tensor(NAN, dtype=dtype).view(BITS[dtype]) | 1
        caches.append(bits.view(dtype))
    return caches


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("pairs", [[(1, 4), (2, 5), (5, 0), (6, 1), (0, 3)], [(7, 2)], []])
def test_swap_blocks_copies_every_bit_of_its_blocks_and_no_other(pairs, dtype):
    src, dst = bit_patterns(8, dtype), bit_patterns(6, dtype)
    before = [cache.view(BITS[dtype]).clone() for cache in (*src, *dst)]
    src_dst = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    assert torch.ops.pagegraph.swap_blocks.reference(src, dst, src_dst) is None
    for block, target in pairs:
        for layer in range(4):
            before[4 + layer][target] = before[layer][block]
    for cache, bits in zip((*src, *dst), before, strict=True):
        assert torch.equal(cache.view(BITS[dtype]), bits)


def test_swap_blocks_in_any_order_of_pairs():
    src, first, second = bit_patterns(6, torch.float32), *(bit_patterns(6, torch.float32) for _ in range(2))
    for cache, like in zip(second, first, strict=True):
        cache.copy_(like)
    src_dst = torch.tensor([[0, 5], [1, 1], [2, 2], [3, 3], [5, 4]])
    torch.ops.pagegraph.swap_blocks.reference(src, first, src_dst)
    torch.ops.pagegraph.swap_blocks.reference(src, second, src_dst[[3, 0, 4, 2, 1]])
    for cache, like in zip(second, first, strict=True):
        assert torch.equal(cache.view(torch.int32), like.view(torch.int32))


def test_swapping_out_and_in_restores_a_cache():
    cache, host = bit_patterns(5, torch.bfloat16), bit_patterns(9, torch.bfloat16)
    before = [tensor.view(torch.int16).clone() for tensor in cache]
    out = torch.tensor([[1, 8], [2, 3], [4, 4]])
    torch.ops.pagegraph.swap_blocks.reference(cache, host, out)
    for tensor in cache:
        tensor[[1, 2, 4]] = 0
    torch.ops.pagegraph.swap_blocks.reference(host, cache, out.flip(1))
    assert all(torch.equal(tensor.view(torch.int16), bits) for tensor, bits in zip(cache, before, strict=True))


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([[3, 1]], [(3, 1, 1)]),
        ([[2, 5], [3, 6], [1, 4]], [(1, 4, 3)]),
        ([[1, 4], [2, 6], [3, 7]], [(1, 4, 1), (2, 6, 2)]),  # a gap on the one side
        ([[1, 4], [3, 5], [4, 6]], [(1, 4, 1), (3, 5, 2)]),  # and on the other
        ([[1, 5], [2, 4], [3, 3]], [(1, 5, 1), (2, 4, 1), (3, 3, 1)]),  # downwards is no run
    ],
)
def test_swap_blocks_copies_a_run_at_once_without_temporaries(pairs, runs):
    assert list(reference._runs(pairs)) == runs
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func.name(), args[0].shape[0]))
            return func(*args, **kwargs or {})

    src, dst = bit_patterns(8, torch.float32), bit_patterns(8, torch.float32)
    src_dst = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    with Record():
        reference.swap_blocks(src, dst, src_dst)
    assert [blocks for name, blocks in calls if name == "aten::copy_"] == [n for *_, n in runs for _ in range(4)]
    assert {name for name, _ in calls} <= {"aten::copy_", "aten::slice.Tensor"}  # a view is no temporary


@pytest.mark.parametrize("pairs", [[[4, 0]], [[0, 6]], [[2, 4], [3, 5], [4, 6]]])
def test_swap_blocks_refuses_a_block_that_is_not_there(pairs):
    src, dst = bit_patterns(4, torch.float32), bit_patterns(6, torch.float32)
    with pytest.raises(RuntimeError, match=r"exceeds dimension size|out of range"):
        torch.ops.pagegraph.swap_blocks.reference(src, dst, torch.tensor(pairs))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_computes_in_the_wider_dtype_and_returns_that_of_x(dtype, weight_dtype, bias):
    x, weight = torch.randn(2, 3, 20).to(dtype), torch.randn(7, 20).to(weight_dtype)
    added = torch.randn(7).to(dtype) if bias else None
    out = torch.ops.pagegraph.linear.reference(x, weight, added)
    assert (out.shape, out.dtype) == ((2, 3, 7), dtype)
    exact = x.double() @ weight.double().T + (added.double() if bias else 0)
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
