"""paged_attention and write_kv in C++ against dense attention in float64, with everything unreadable poisoned."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ops.cpu.build import BuildError, find_compiler
from ops.cpu.library import load

NAN = float("nan")
OPS = torch.ops.pagegraph
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

try:
    find_compiler()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

ISAS = load().isas


@contextmanager
def using(isa):
    """Within the context, ops use that instruction set."""
    library = load()
    before = library.isa
    library.use(isa)
    try:
        yield
    finally:
        library.use(before)


@pytest.fixture(params=ISAS)
def isa(request):
    """Every instruction set of the machine in turn."""
    with using(request.param):
        yield request.param


@dataclass
class Batch:
    """Arguments of paged_attention, and the dense K and V of each sequence."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    dense: list[tuple[Tensor, Tensor]]

    def attend(self, scale=0.3, window=0, softcap=0.0, sinks=None):
        """The op's output."""
        return OPS.paged_attention.cpu(*self.tensors(), scale, window, softcap, sinks)

    def tensors(self):
        """The tensor arguments but sinks."""
        return [getattr(self, name) for name in list(self.__dataclass_fields__)[:6]]

    def row(self, row):
        """The batch of one sequence only, on the same caches."""
        start, end = self.query_start_loc[row : row + 2].tolist()
        return replace(
            self,
            q=self.q[start:end],
            block_table=self.block_table[row : row + 1],
            seq_lens=self.seq_lens[row : row + 1],
            query_start_loc=torch.tensor([0, end - start]),
        )


def make_batch(lens, query_lens, *, block_size=16, heads=2, group=2, dk=16, dv=16, dtype=torch.float32, window=0):
    """Sequences of `lens` tokens, the last `query_lens` of them queries, over scattered blocks.

    NaN everywhere but in slot 0 of block 0 and in the positions that some query of a sequence sees.
    """
    generator = torch.Generator().manual_seed(sum(lens))
    needed = [-(-length // block_size) for length in lens]
    num_blocks = sum(needed) + 3
    ids = torch.randperm(num_blocks - 1, generator=generator) + 1
    caches = [torch.full((num_blocks, block_size, heads, d), NAN, dtype=dtype) for d in (dk, dv)]
    for cache in caches:
        cache[0, 0] = 0.5
    table = torch.full((len(lens), max(needed) + 2), int(ids[-1]), dtype=torch.int32)
    dense = []
    for row, (length, queries) in enumerate(zip(lens, query_lens, strict=True)):
        blocks, ids = ids[: needed[row]], ids[needed[row] :]
        table[row, : needed[row]] = blocks
        oldest = max(0, length - queries - window + 1) if window else 0
        positions = torch.arange(oldest, length)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        rows = []
        for cache in caches:
            values = torch.randn(length, heads, cache.shape[3], generator=generator).to(dtype)
            cache.view(-1, *cache.shape[2:])[slots] = values[oldest:]
            rows.append(values)
        dense.append((rows[0], rows[1]))
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(query_lens), heads * group, dk, generator=generator).to(dtype)
    return Batch(q, *caches, table, torch.tensor(lens, dtype=torch.int32), starts, dense)


def dense_attention(batch, dtype, scale=0.3, window=0, softcap=0.0, sinks=None):
    """The same attention without pages, in `dtype` throughout, with sinks as one more column."""
    outs = []
    for row, (k, v) in enumerate(batch.dense):
        q = batch.q[batch.query_start_loc[row] : batch.query_start_loc[row + 1]].to(dtype)
        group = q.shape[1] // k.shape[1]
        k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        queries, keys = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        visible = (keys <= queries) & ((keys > queries - window) if window else True)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)], -1)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outs)


def assert_within_budget(batch, **options):
    """With any instruction set the error is at most twice that of plain torch in the inputs' own precision, plus a few
    roundings of it."""
    exact = dense_attention(batch, torch.float64, **options)
    plain = dense_attention(batch, batch.q.dtype, **options).double()
    atol = 4 * torch.finfo(batch.q.dtype).eps * exact.abs().max()
    for isa in ISAS:
        with using(isa):
            out = batch.attend(**options)
        assert (out.shape, out.dtype, out.is_contiguous()) == (exact.shape, batch.q.dtype, True)
        assert (out.double() - exact).abs().max() <= 2 * (plain - exact).abs().max() + atol, isa


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0])},
    "all": {"window": 70, "softcap": 3.0, "sinks": torch.tensor([-30.0, 0.0, 1.0, 90.0])},
}
KINDS = {"decode": (1, 1, 1, 1), "mixed": (1, 100, 1, 7), "prefill": (9, 130, 63, 40)}
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def in_dtype(options, dtype):
    return options | ({"sinks": options["sinks"].to(dtype)} if "sinks" in options else {})


@TWO_DTYPES
@pytest.mark.parametrize("query_lens", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_equals_dense(options, query_lens, dtype):
    batch = make_batch((9, 300, 64, 257), query_lens, dtype=dtype, dk=64, dv=64, window=options.get("window", 0))
    assert_within_budget(batch, **in_dtype(options, dtype))


@pytest.mark.parametrize("query_lens", [(1, 1), (40, 7)], ids=["decode", "prefill"])
def test_float16(query_lens):
    batch = make_batch((80, 70), query_lens, dtype=torch.float16, dk=64, dv=40, window=70)
    assert_within_budget(batch, **in_dtype(OPTIONS["all"], torch.float16))


@TWO_DTYPES
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(("dk", "dv"), [(80, 80), (96, 96), (128, 64), (5, 13)])
@pytest.mark.parametrize(("heads", "group"), [(3, 1), (1, 7), (2, 7)])
def test_attention_at_odd_sizes(heads, group, dk, dv, block_size, dtype):
    sizes = {"block_size": block_size, "heads": heads, "group": group, "dk": dk, "dv": dv, "dtype": dtype}
    for query_lens in ((1, 1), (6, 1)):
        assert_within_budget(make_batch((37, 1), query_lens, **sizes))


@pytest.mark.parametrize("query_lens", [(1, 1), (6, 1)])
def test_more_query_heads_than_rows_of_a_tile(query_lens):
    assert_within_budget(make_batch((37, 1), query_lens, heads=1, group=110))


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("query_lens", [(1, 1), (150, 1)], ids=["decode", "tiled"])
@TWO_DTYPES
def test_attention_over_a_long_context(dtype, query_lens, window):
    assert_within_budget(make_batch((10_000, 1), query_lens, heads=1, window=window, dtype=dtype), window=window)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("query_lens", KINDS.values(), ids=KINDS)
def test_a_row_is_the_same_bit_for_bit_alone_and_in_a_batch_with_any_number_of_threads(query_lens, threads):
    options = {"window": 270, "softcap": 4.0}
    batch = make_batch((9, 1200, 64, 700), query_lens, dk=64, dv=32, window=270, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    alone = torch.cat([batch.row(row).attend(**options) for row in range(4)])
    try:
        torch.set_num_threads(threads)
        together = batch.attend(**options)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


@pytest.mark.usefixtures("isa")
def test_a_decoded_row_is_the_same_bit_for_bit_in_a_mixed_batch():
    mixed = make_batch((300, 500, 40), (1, 30, 1))
    out = mixed.attend()
    assert torch.equal(mixed.row(0).attend(), out[:1])
    assert torch.equal(mixed.row(2).attend(), out[-1:])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [0, 90])
def test_chunks_of_a_prompt_give_what_the_whole_gives_bit_for_bit(window):
    whole = make_batch((500,), (500,), window=window, dk=32)
    expected = whole.attend(window=window)
    for start, end in ((0, 130), (130, 131 + 64), (195, 500)):
        chunk = replace(
            whole,
            q=whole.q[start:end],
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - start]),
        )
        assert torch.equal(chunk.attend(window=window), expected[start:end])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("query_lens", [(1, 1), (5, 1)])
@TWO_DTYPES
def test_strides_and_index_dtypes_are_free(dtype, query_lens):
    batch = make_batch((20, 9), query_lens, dtype=dtype, dk=32)
    interleaved = torch.stack([batch.q, batch.q * NAN], -1)[..., 0]
    transposed = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    indices = {name: getattr(batch, name).long() for name in ("block_table", "seq_lens", "query_start_loc")}
    spread = {name: torch.stack([index, index - 1000], -1)[..., 0] for name, index in indices.items()}
    for q in (interleaved, transposed):
        assert not q.is_contiguous()
        assert torch.equal(replace(batch, q=q, **spread).attend(), batch.attend())


@pytest.mark.usefixtures("isa")
def test_queries_and_caches_may_differ_in_dtype():
    batch = make_batch((70, 300), (20, 1), dtype=torch.bfloat16, dk=32)
    out = replace(batch, q=batch.q.float()).attend()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.bfloat16(), batch.attend())


@pytest.mark.usefixtures("isa")
def test_padding_rows_and_tokens():
    """A padded decode row reads slot 0 of block 0 (0.5 there), padding tokens of a mixed batch give zero."""
    batch = make_batch((9, 40), (1, 1))
    padded = replace(
        batch,
        q=torch.cat([batch.q, batch.q[:1]]),
        block_table=torch.cat([batch.block_table, torch.zeros_like(batch.block_table[:1])]),
        seq_lens=torch.cat([batch.seq_lens, torch.ones(1, dtype=torch.int32)]),
        query_start_loc=torch.arange(4, dtype=torch.int32),
    ).attend()
    assert torch.equal(padded[:2], batch.attend())
    assert padded[2].eq(0.5).all()
    mixed = make_batch((9, 40), (3, 1))
    out = replace(mixed, q=torch.cat([mixed.q, torch.full_like(mixed.q, NAN)])).attend()
    assert torch.equal(out[:4], mixed.attend())
    assert out[4:].eq(0).all()
    assert replace(mixed, q=mixed.q[:0], query_start_loc=torch.zeros(3, dtype=torch.int32)).attend().shape == (0, 4, 16)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("query_lens", [(1, 1), (4, 2)])
def test_a_nan_shows_in_its_own_sequence_only(query_lens):
    batch = make_batch((9, 40), query_lens)
    clean = batch.attend()
    batch.k_cache[batch.block_table[1, 0].item()] = NAN
    batch.k_cache[0] = batch.v_cache[0] = NAN
    out = batch.attend()
    assert torch.equal(out[: query_lens[0]], clean[: query_lens[0]])
    assert out[-1].isnan().all()


def test_slots_beyond_int32():
    """A cache of 2^31 elements and more, of which only the pages of one sequence are ever touched."""
    heads, dim, block_size = 2, 64, 16
    num_blocks = 2**31 // (heads * dim * block_size) + 4
    caches = [torch.empty(num_blocks, block_size, heads, dim, dtype=torch.bfloat16) for _ in range(2)]
    assert caches[0].numel() > 2**31
    table = torch.tensor([[num_blocks - 2, num_blocks - 1]], dtype=torch.int32)
    slots = torch.arange(20) + (num_blocks - 2) * block_size
    k, v = torch.randn(2, 20, heads, dim).bfloat16()
    OPS.write_kv.cpu(k, v, *caches, slots)
    for queries in (1, 3):
        starts = torch.tensor([0, queries], dtype=torch.int32)
        q = torch.randn(queries, heads, dim).bfloat16()
        batch = Batch(q, *caches, table, torch.tensor([20], dtype=torch.int32), starts, [(k, v)])
        assert_within_budget(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.tensor([[99]], dtype=torch.int32)}, "row 0 has block 99, but there are"),
        ({"block_table": torch.tensor([[-1]], dtype=torch.int32)}, "row 0 has block -1"),
        ({"seq_lens": torch.tensor([17], dtype=torch.int32)}, "seq_len 17, 1 queries and room for 16"),
        ({"seq_lens": torch.tensor([0], dtype=torch.int32)}, "seq_len 0"),
        ({"seq_lens": torch.tensor([2.0])}, "seq_lens must be int32 or int64"),
        ({"q": torch.zeros(1, 3, 16)}, "q of 3 heads of 16 does not fit a cache of 2 heads of 16"),
        ({"q": torch.zeros(1, 4, 16, dtype=torch.float64)}, "q must be float32, bfloat16 or float16"),
    ],
)
def test_what_would_read_other_memory_is_refused(changes, message):
    batch = make_batch((9,), (1,))
    batch = replace(batch, block_table=batch.block_table[:, :1])
    with pytest.raises(RuntimeError, match=message):
        replace(batch, **changes).attend()


def write_args(tokens, dtype=torch.float32, cache_dtype=None, block_size=4):
    """Arguments of write_kv: k and v are views into one packed projection; two tokens of padding come last."""
    qkv = torch.randn(tokens, 6, 40).to(dtype)
    num_blocks = tokens // block_size + 3
    caches = [torch.full((num_blocks, block_size, 2, d), NAN, dtype=cache_dtype or dtype) for d in (40, 33)]
    slots = torch.randperm((num_blocks - 1) * block_size)[:tokens] + block_size
    slots[-2:] = 0
    return qkv[:, 2:4], qkv[:, 4:6, :33], *caches, slots


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("cache_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tokens", [2, 1500])
def test_write_kv_stores_rounded_rows_in_their_slots_and_touches_no_other(tokens, dtype, cache_dtype):
    k, v, k_cache, v_cache, slots = write_args(tokens, dtype, cache_dtype)
    special = [0.0, -0.0, 1e-7, -6e-5, 65519.0, 65520.0, 3e38, float("inf"), -float("inf"), NAN]
    k[0, 0, : len(special)] = torch.tensor(special).to(dtype)
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for source, cache in zip((k, v), expected, strict=True):
        cache.view(-1, *cache.shape[2:])[slots[:-2]] = source[:-2].to(cache_dtype)
    for source, cache in ((k, k_cache), (v, v_cache)):
        assert not source.is_contiguous()
        assert cache.is_contiguous()
    OPS.write_kv.cpu(k, v, k_cache, v_cache, slots)
    for source, cache, reference in zip((k, v), (k_cache, v_cache), expected, strict=True):
        assert torch.isin(cache[0, 0].nan_to_num(7), source[-2:].to(cache_dtype).nan_to_num(7)).all()
        cache[0, 0] = reference[0, 0]
        assert torch.equal(cache.nan_to_num(7), reference.nan_to_num(7))
        assert torch.equal(cache.signbit() & ~cache.isnan(), reference.signbit() & ~reference.isnan())


@pytest.mark.usefixtures("isa")
def test_write_kv_takes_any_strides():
    k, v, k_cache, v_cache, slots = write_args(9)
    expected = (k_cache.clone(), v_cache.clone())
    OPS.write_kv.cpu(k, v, *expected, slots)
    k, v = (x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (k, v))
    assert k.stride(2) != 1
    OPS.write_kv.cpu(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[1:].nan_to_num(7), expected[0][1:].nan_to_num(7))
    assert torch.equal(v_cache[1:].nan_to_num(7), expected[1][1:].nan_to_num(7))


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_write_kv_refuses_a_slot_that_is_not_there_before_it_writes(slot):
    k, v, k_cache, v_cache, slots = write_args(5)
    slots[3] = slot
    with pytest.raises(RuntimeError, match=f"slot {slot} of token 3 is out of range: the caches have 16 slots"):
        OPS.write_kv.cpu(k, v, k_cache, v_cache, slots)
    assert k_cache.isnan().all()


def attention_args(query_lens, **options):
    batch = make_batch([count + 3 for count in query_lens], query_lens, block_size=4, **options)
    return *batch.tensors(), 0.3, 5, 2.0, torch.randn(batch.q.shape[1])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("paged_attention", attention_args((1, 1, 1))),
        ("paged_attention", attention_args((4, 1, 2), dv=6)),
        ("paged_attention", attention_args((4, 1), dtype=torch.bfloat16)),
        ("write_kv", tuple(x[..., :6].nan_to_num(1.0) if x.is_floating_point() else x for x in write_args(5))),
    ],
    ids=["decode", "mixed", "bfloat16", "write"],
)
def test_opcheck(op, args):
    args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)
    results = torch.library.opcheck(getattr(OPS, op).cpu, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def layer(q, k, v, k_cache, v_cache, block_table, seq_lens, query_start_loc, slots):
    OPS.write_kv.cpu(k, v, k_cache, v_cache, slots)
    return OPS.paged_attention.cpu(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, 0.3, 0, 0.0, None) + 1


def test_one_compiled_graph_serves_all_sizes():
    """T, B, W and N vary, 1 included; unbacked sizes turn any guard on them into an error."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for query_lens in ((4, 1, 2), (1, 1), (1,), (5,)):
        batch = make_batch([count + 3 for count in query_lens], query_lens, block_size=4)
        q, k_cache, v_cache, table, *lengths = batch.tensors()
        tokens = len(q)
        k, v = torch.randn(2, tokens, 2, 16)
        args = [q, k, v, k_cache, v_cache, table, *lengths, torch.arange(tokens)]
        copies = [x.clone() for x in args]
        expected = layer(*copies)
        for tensor in args:
            for dim in (0, 1) if tensor is table else (0,):
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
        assert torch.equal(compiled(*args), expected)
        assert torch.equal(args[3].nan_to_num(7), copies[3].nan_to_num(7))
    assert counter.frame_count == 1
