"""paged_attention in Triton against dense attention in float64, with everything unreadable poisoned.

With a GPU the kernels are compiled and run there; without one Triton's interpreter runs them on the CPU.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ops.schema import overload
from ops.triton import attention, attention_decode, attention_varlen
from ops.triton.attention_decode import LONG_PART, MOST_LONG_PARTS, PROGRAMS, parts
from ops.triton.attention_tile import padded
from ops.triton.library import interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy's, of the interpreter: infinities are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NAN = float("nan")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION = overload("paged_attention", "triton")


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
        return ATTENTION(*self.tensors(), scale, window, softcap, sinks)

    def tensors(self):
        """The tensor arguments but sinks."""
        return [getattr(self, field.name) for field in fields(self)[:6]]


def make_batch(
    lens, query_lens, *, block_size=16, heads=2, group=2, dk=16, dv=None, dtype=torch.float32, window=0, columns=0
):
    """Sequences of `lens` tokens, the last `query_lens` of them queries, over scattered blocks.

    NaN everywhere but in slot 0 of block 0 and in the positions that some query of a sequence sees; the table's columns
    beyond a sequence name blocks that do not exist. columns: of the table, at least.
    """
    generator = torch.Generator().manual_seed(sum(lens))
    needed = [-(-length // block_size) for length in lens]
    num_blocks = sum(needed) + 2
    ids = torch.randperm(num_blocks - 1, generator=generator) + 1
    caches = [torch.full((num_blocks, block_size, heads, d), NAN, dtype=dtype) for d in (dk, dv or dk)]
    for cache in caches:
        cache[0, 0] = 0.5
    table = torch.full((len(lens), max(columns, *needed, 1) + 1), 2**30, dtype=torch.int32)
    dense = []
    for row, (length, queries) in enumerate(zip(lens, query_lens, strict=True)):
        blocks, ids = ids[: needed[row]], ids[needed[row] :]
        table[row, : needed[row]] = blocks
        positions = torch.arange(max(0, length - queries - window + 1) if window else 0, length)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        rows = []
        for cache in caches:
            values = torch.randn(length, heads, cache.shape[3], generator=generator).to(dtype)
            cache.view(-1, *cache.shape[2:])[slots] = values[positions]
            rows.append(values.to(DEVICE))
        dense.append((rows[0], rows[1]))
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(query_lens), heads * group, dk, generator=generator).to(dtype)
    tensors = [x.to(DEVICE) for x in (q, *caches, table, torch.tensor(lens, dtype=torch.int32), starts)]
    return Batch(*tensors, dense)


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
        keys = torch.arange(len(k), device=DEVICE)
        queries = keys[len(k) - len(q) :, None]
        visible = (keys <= queries) & ((keys > queries - window) if window else True)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)], -1)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outs)


def assert_within_budget(batch, out=None, **options):
    """The error is at most twice that of plain torch in the inputs' own precision, plus a few roundings of it."""
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(DEVICE, batch.q.dtype)
    exact = dense_attention(batch, torch.float64, **options)
    plain = dense_attention(batch, batch.q.dtype, **options).double()
    out = batch.attend(**options) if out is None else out
    assert (out.shape, out.dtype, out.is_contiguous()) == (exact.shape, batch.q.dtype, True)
    atol = 4 * torch.finfo(batch.q.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= 2 * (plain - exact).abs().max() + atol


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0])},
    "all": {"window": 70, "softcap": 3.0, "sinks": torch.tensor([-30.0, 0.0, 1.0, 90.0])},
}
KINDS = {"decode": (1, 1, 1, 1), "mixed": (1, 40, 1, 7), "prefill": (9, 50, 33, 20)}
EACH_KIND = pytest.mark.parametrize("query_lens", KINDS.values(), ids=KINDS)
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@TWO_DTYPES
@EACH_KIND
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_equals_dense(options, query_lens, dtype):
    batch = make_batch((9, 140, 64, 97), query_lens, dtype=dtype, window=options.get("window", 0))
    assert_within_budget(batch, **options)


@pytest.mark.parametrize("query_lens", [(1, 1), (40, 7)], ids=["decode", "varlen"])
def test_float16(query_lens):
    batch = make_batch((80, 70), query_lens, dtype=torch.float16, dk=64, dv=40, window=70)
    assert_within_budget(batch, **OPTIONS["all"])


@pytest.mark.parametrize("query_lens", [(1, 1), (6, 2)], ids=["decode", "varlen"])
@pytest.mark.parametrize(("dk", "dv"), [(64, 64), (80, 80), (96, 96), (128, 64), (256, 256), (5, 13)])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_groups_and_head_dims(group, dk, dv, query_lens):
    dtype = torch.bfloat16 if dk == 128 or group == 7 else torch.float32
    batch = make_batch((37, 2), query_lens, heads=2 if group < 7 else 1, group=group, dk=dk, dv=dv, dtype=dtype)
    assert_within_budget(batch, scale=dk**-0.5)


@pytest.mark.parametrize("query_lens", [(1, 1), (6, 1)], ids=["decode", "varlen"])
@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 256])
def test_block_sizes(block_size, window, query_lens):
    assert_within_budget(make_batch((75, 6), query_lens, block_size=block_size, window=window), window=window)


@pytest.mark.parametrize("query_lens", [(1, 1), (6, 1)], ids=["decode", "varlen"])
def test_more_query_heads_than_rows_of_a_tile(query_lens):
    assert_within_budget(make_batch((37, 1), query_lens, heads=1, group=150))


@pytest.mark.parametrize("window", [0, 1, 32, 33, 64])
@pytest.mark.parametrize("kind", ["decode", "varlen"])
def test_contexts_and_windows_around_the_borders_of_tiles(kind, window):
    """A tile is 32 keys of float32."""
    lens = (1, 31, 32, 33, 63, 64, 65, 97)
    queries = (1,) * 8 if kind == "decode" else (1, 31, 32, 1, 33, 2, 65, 96)
    assert_within_budget(make_batch(lens, queries, heads=1, window=window), window=window)


@pytest.mark.parametrize("window", [0, 4500])
def test_a_sequence_much_longer_than_its_neighbours_is_cut(window, monkeypatch):
    """Where there are programs for all processors only long sequences are cut; the parts of the others stay empty."""
    monkeypatch.setattr(attention_decode, "PROGRAMS", 3)
    assert parts(3, 1, 9000, 32) == (1, 3)
    batch = make_batch((1, 9000, 40), (1, 1, 1), heads=1, group=1, block_size=256, window=window)
    assert_within_budget(batch, window=window)


def test_more_parts_than_are_merged_at_once():
    """With float32 each tile of 32 keys is a part; the scores rise, so that the last parts weigh most."""
    batch = make_batch((620,), (1,), heads=1)
    slots = batch.block_table[0, :38].long()
    rising = torch.linspace(0.1, 3, 39 * 16, device=DEVICE)[:620, None, None]
    k = batch.dense[0][0].abs() * rising
    batch.k_cache[slots] = k[: 38 * 16].unflatten(0, (38, 16))
    batch.k_cache[batch.block_table[0, 38], :12] = k[38 * 16 :]
    assert_within_budget(replace(batch, q=batch.q.abs(), dense=[(k, batch.dense[0][1])]))


@pytest.mark.parametrize("group", [3, 7])
def test_rows_that_a_group_leaves_over_are_not_stored(group):
    """They are of the next tile's tokens, and that tile is done before."""
    assert_within_budget(make_batch((30, 25), (30, 9), heads=1, group=group))


def test_how_many_parts():
    assert parts(1, 8, 131_072, 64) == (PROGRAMS // 8, PROGRAMS // 8)
    assert parts(1, 8, 128, 64) == (2, 2)  # no more than tiles
    assert parts(64, 8, 131_072, 64) == (1, MOST_LONG_PARTS)
    assert parts(64, 8, 2048, 64) == (1, 1)  # nothing to cut: no second kernel
    assert parts(16, 8, 3 * LONG_PART.value, 64) == (2, 3)
    assert parts(0, 8, 64, 64) == (1, 1)


def test_more_sequences_than_are_looked_through_at_once():
    lens, queries = (3, 5, 2, 4) * 65, (0, 3, 0, 0) * 65
    assert len(lens) > attention_varlen.STARTS.value
    assert_within_budget(make_batch(lens, queries, heads=1, group=1))


@pytest.mark.parametrize("queries", [1, 90])
def test_one_sequence(queries):
    assert_within_budget(make_batch((99,), (queries,)))


@pytest.mark.parametrize("query_lens", [(1, 1), (5, 1)], ids=["decode", "varlen"])
@TWO_DTYPES
def test_strides_and_index_dtypes_are_free(dtype, query_lens):
    batch = make_batch((20, 9), query_lens, dtype=dtype, dk=32)
    expected = batch.attend()
    interleaved = torch.stack([batch.q, batch.q * NAN], -1)[..., 0]
    transposed = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    packed = torch.cat([batch.q, batch.q * NAN], 1)[:, : batch.q.shape[1]]
    indices = {name: getattr(batch, name).long() for name in ("block_table", "seq_lens", "query_start_loc")}
    spread = {name: torch.stack([index, index - 1000], -1)[..., 0] for name, index in indices.items()}
    for q, index in ((interleaved, indices), (transposed, spread), (packed, {})):
        assert not q.is_contiguous()
        assert torch.equal(replace(batch, q=q, **index).attend(), expected)
    wide = torch.cat([batch.block_table, batch.block_table], 1)
    assert torch.equal(replace(batch, block_table=wide[:, : batch.block_table.shape[1]]).attend(), expected)


@pytest.mark.parametrize("query_lens", [(1, 1), (20, 1)], ids=["decode", "varlen"])
def test_queries_and_caches_may_differ_in_dtype(query_lens):
    batch = make_batch((70, 200), query_lens, dtype=torch.bfloat16, dk=32)
    wide = replace(batch, q=batch.q.float() + 1e-3)
    assert_within_budget(wide)
    narrow = replace(batch, q=batch.q.half())
    exact = dense_attention(narrow, torch.float64)
    torch.testing.assert_close(narrow.attend().double(), exact, rtol=1e-3, atol=1e-3)


def test_padding_rows_and_tokens():
    """A padded decode row reads slot 0 of block 0 (0.5 there), padding tokens of other batches give zero."""
    batch = make_batch((9, 40), (1, 1))
    padding = torch.ones(1, dtype=torch.int32, device=DEVICE)
    padded_batch = replace(
        batch,
        q=torch.cat([batch.q, batch.q[:1]]),
        block_table=torch.cat([batch.block_table, torch.zeros_like(batch.block_table[:1])]),
        seq_lens=torch.cat([batch.seq_lens, padding]),
        query_start_loc=torch.arange(4, dtype=torch.int32, device=DEVICE),
    )
    out = padded_batch.attend()
    assert torch.equal(out[:2], batch.attend())
    assert out[2].eq(0.5).all()
    for count in (1, 4, 300):
        mixed = make_batch((9, 40), (3, 1))
        out = replace(mixed, q=torch.cat([mixed.q, torch.full_like(mixed.q, NAN)[:1].expand(count, -1, -1)])).attend()
        assert torch.equal(out[:4], mixed.attend())
        assert out[4:].eq(0).all()
    nobody = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert replace(mixed, query_start_loc=nobody).attend().eq(0).all()
    assert replace(mixed, q=mixed.q[:0], query_start_loc=nobody).attend().shape == (0, 4, 16)


def test_a_sequence_without_queries():
    assert_within_budget(make_batch((9, 40, 33), (3, 0, 2)))


@pytest.mark.parametrize("query_lens", [(1, 1), (4, 2)], ids=["decode", "varlen"])
def test_a_nan_shows_in_its_own_sequence_only(query_lens):
    batch = make_batch((9, 40), query_lens)
    clean = batch.attend()
    batch.k_cache[batch.block_table[1, 0].item()] = NAN
    batch.k_cache[0] = batch.v_cache[0] = NAN
    out = batch.attend()
    assert torch.equal(out[: query_lens[0]], clean[: query_lens[0]])
    assert out[-1].isnan().all()


KERNELS = ((attention_decode, "attend_part"), (attention_decode, "merge_parts"), (attention_varlen, "attend_queries"))


class Recorder:
    """A kernel, or none, that notes the grid, the numbers and the options of its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append((grid, [x for x in args if not isinstance(x, Tensor)], options))
            if self.kernel is not None:
                self.kernel[grid](*args, **options)

        return launch


@EACH_KIND
def test_one_launch_serves_other_lengths_and_tables(query_lens, monkeypatch):
    """What a captured graph replays: the same tensors, hence the same grid and constants, with other contents."""
    long, short = (make_batch(lens, query_lens, columns=20) for lens in ((9, 140, 64, 97), (200, 130, 33, 50)))
    launches = []
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, Recorder(getattr(module, kernel), launches))
    assert_within_budget(long)
    assert_within_budget(short)
    assert len(launches) in (2, 4)
    assert launches[: len(launches) // 2] == launches[len(launches) // 2 :]


@EACH_KIND
def test_nothing_is_read_on_the_host(query_lens, monkeypatch):
    """Meta tensors have no contents to read."""
    launches = []
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, Recorder(None, launches))
    tensors = [x.to("meta") for x in make_batch((9, 140, 64, 97), query_lens).tensors()]
    out = attention.paged_attention(*tensors, 0.3, 5, 2.0, torch.ones(4, device="meta"))
    assert out.shape == (sum(query_lens), 4, 16)
    assert launches


def test_slots_beyond_int32(monkeypatch):
    """A cache of 2^31 elements and more, of which only the pages of one sequence are ever touched."""
    if interpreting():  # it would copy the storages of all arguments onto themselves
        monkeypatch.setattr(triton.runtime.interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    heads, dim, block_size = 2, 64, 16
    num_blocks = 2**31 // (heads * dim * block_size) + 4
    caches = [torch.empty(num_blocks, block_size, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    assert caches[0].numel() > 2**31
    table = torch.tensor([[num_blocks - 2, num_blocks - 1]], dtype=torch.int32, device=DEVICE)
    k, v = torch.randn(2, 20, heads, dim, device=DEVICE).bfloat16()
    for cache, values in zip(caches, (k, v), strict=True):
        cache[-2], cache[-1, :4] = values[:16], values[16:]
    for queries in (1, 3):
        starts = torch.tensor([0, queries], dtype=torch.int32, device=DEVICE)
        q = torch.randn(queries, heads, dim, device=DEVICE).bfloat16()
        lengths = torch.tensor([20], dtype=torch.int32, device=DEVICE)
        assert_within_budget(Batch(q, *caches, table, lengths, starts, [(k, v)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3, 16)}, "3 query heads do not share 2 kv heads"),
        ({"q": torch.zeros(1, 4, 8)}, "queries have 8 dimensions, keys 16"),
        ({"k_cache": torch.zeros(2, 2, 16, 16).transpose(1, 2)}, "from their shapes"),
    ],
)
def test_what_would_read_other_memory_is_refused(changes, message):
    batch = make_batch((9,), (1,))
    with pytest.raises(AssertionError, match=message):
        replace(batch, **{name: value.to(DEVICE) for name, value in changes.items()}).attend()


def attention_args(query_lens, **options):
    batch = make_batch([count + 3 for count in query_lens], query_lens, block_size=4, window=5, **options)
    tensors = [x.nan_to_num(1.0) if x.is_floating_point() else x for x in batch.tensors()]
    return *tensors, 0.3, 5, 2.0, torch.randn(batch.q.shape[1], device=DEVICE)


@pytest.mark.parametrize(
    "args",
    [attention_args((1, 1, 1)), attention_args((4, 1, 2), dv=6), attention_args((4, 1), dtype=torch.bfloat16)],
    ids=["decode", "mixed", "bfloat16"],
)
def test_opcheck(args):
    results = torch.library.opcheck(ATTENTION, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def layer(*tensors):
    return ATTENTION(*tensors, 0.3, 0, 0.0, None) + 1


def test_one_compiled_graph_serves_all_sizes():
    """T, B, W and N vary, 1 included; unbacked sizes turn any guard on them into an error."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for query_lens in ((4, 1, 2), (1, 1), (1,), (5,)):
        batch = make_batch([count + 3 for count in query_lens], query_lens, block_size=4)
        args = batch.tensors()
        expected = layer(*args)
        for tensor in args:
            for dim in (0, 1) if tensor is batch.block_table else (0,):
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
        assert torch.equal(compiled(*args), expected)
    assert counter.frame_count == 1


def test_padded():
    assert [padded(size) for size in (1, 16, 17, 64, 80, 96, 128, 129)] == [16, 16, 32, 64, 128, 128, 128, 256]
