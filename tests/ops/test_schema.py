"""Schemas, fakes and how the ops behave under the compiler's front end (no code is generated here)."""

import hashlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ops import SCHEMAS, schema_hash

OPS = torch.ops.pagegraph


def attention_args(query_lens, *, dv=8, dtype=torch.float32, sinks=False):
    """Arguments of paged_attention over blocks of 4, Hk 2, Hq 4, Dk 8; sequences are 3 tokens longer than queries."""
    batch, tokens = len(query_lens), sum(query_lens)
    width = (max(query_lens) + 3) // 4 + 2
    caches = [torch.randn(batch * width + 1, 4, 2, d, dtype=dtype) for d in (8, dv)]
    return (
        torch.randn(tokens, 4, 8, dtype=dtype),
        *caches,
        torch.arange(1, batch * width + 1, dtype=torch.int32).view(batch, width),
        torch.tensor(query_lens, dtype=torch.int32) + 3,
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        *(0.3, 5, 2.0, torch.randn(4) if sinks else None),
    )


def sample_args(rows, vocabulary=11, masked=2, dtype=torch.float32):
    """Arguments of sample: alternating greedy and filtered rows, the first with a masked id."""
    masked_ids = torch.full((rows, masked), -1, dtype=torch.int32)
    masked_ids[:1] = 3
    greedy = torch.arange(rows) % 2 == 0
    return (
        torch.randn(rows, vocabulary, dtype=dtype),
        torch.where(greedy, 0.0, 0.8),
        torch.full((rows,), 5, dtype=torch.int32),
        torch.full((rows,), 0.9),
        torch.full((rows,), 0.05),
        torch.arange(rows),
        torch.arange(rows) + 7,
        masked_ids,
    )


def write_args(tokens=5):
    """Arguments of write_kv: k and v are views into one packed projection."""
    qkv = torch.randn(tokens, 6, 8)
    slots = torch.arange(tokens) * 2
    return qkv[:, 2:4], qkv[:, 4:6, :6], torch.randn(7, 4, 2, 8), torch.randn(7, 4, 2, 6), slots


CASES = {
    "decode": ("paged_attention", attention_args((1, 1, 1))),
    "decode_of_one": ("paged_attention", attention_args((1,))),
    "mixed": ("paged_attention", attention_args((4, 1, 2), dv=6, sinks=True)),
    "bfloat16": ("paged_attention", attention_args((4, 1), dtype=torch.bfloat16)),
    "write": ("write_kv", write_args()),
    "copy": ("copy_blocks", ([torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 6)], torch.tensor([[1, 2], [4, 5]]))),
    "swap": (
        "swap_blocks",
        (
            [torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 6)],
            [torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 6)],
            torch.tensor([[1, 2], [4, 0], [5, 1]]),
        ),
    ),
    "sample": ("sample", sample_args(4)),
    "sample_bfloat16": ("sample", sample_args(3, masked=0, dtype=torch.bfloat16)),
    "sample_one": ("sample", sample_args(1)),
    "linear": ("linear", (torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5))),
    "grouped_linear": ("grouped_linear", (torch.randn(4, 8), torch.randn(2, 5, 8), torch.tensor([1, 4]))),
    "linear_mixed": ("linear", (torch.randn(3, 16)[:, ::2], torch.randn(5, 8, dtype=torch.bfloat16), None)),
}


@pytest.mark.parametrize(("op", "args"), CASES.values(), ids=CASES)
def test_opcheck(op, args):
    """The whole default set: schema and mutation, autograd registration, fake tensors, AOT dispatch, dynamic shapes."""
    results = torch.library.opcheck(getattr(OPS, op).reference, args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("op", SCHEMAS)
def test_written_schema_is_the_canonical_one(op):
    canonical = str(getattr(OPS, op).reference._schema)
    assert canonical == f"pagegraph::{op}.reference{SCHEMAS[op]}"
    unnamed = canonical.replace(".reference", "", 1)
    assert schema_hash(op) == hashlib.sha256(unnamed.encode()).hexdigest()


def test_hashes_differ_per_op():
    assert len({schema_hash(op) for op in SCHEMAS}) == len(SCHEMAS)


def test_mutation_is_declared_and_nothing_is_returned():
    written = {
        op: [argument.name for argument in getattr(OPS, op).reference._schema.arguments if argument.is_write]
        for op in SCHEMAS
    }
    assert written == {
        "paged_attention": [],
        "write_kv": ["k_cache", "v_cache"],
        "copy_blocks": ["caches"],
        "swap_blocks": ["dst"],
        "sample": [],
        "linear": [],
        "grouped_linear": [],
        "rms_norm": [],
        "add_rms_norm": [],
        "silu_and_mul": [],
        "gelu_and_mul": [],
        "rope_write_kv": ["k_cache", "v_cache"],
    }
    assert all(not getattr(OPS, op).reference._schema.returns for op in ("write_kv", "copy_blocks", "swap_blocks"))


def test_no_batch_dependent_number_crosses_the_boundary():
    numbers = {
        argument.name
        for op in SCHEMAS
        for argument in getattr(OPS, op).reference._schema.arguments
        if str(argument.type) in ("int", "float", "bool")
    }
    assert numbers == {"scale", "window", "softcap", "eps", "offset", "tanh"}


def test_the_op_has_no_default_overload():
    assert all("default" not in getattr(OPS, op).overloads() for op in SCHEMAS)


def layer(q, k, v, k_cache, v_cache, block_table, seq_lens, query_start_loc, slots, indices, head, *sampling):
    """What a model's graph does with the ops, one layer deep."""
    OPS.write_kv.reference(k, v, k_cache, v_cache, slots)
    out = OPS.paged_attention.reference(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, 0.3, 0, 0.0, None)
    logits = OPS.linear.reference((out.flatten(1) + q.flatten(1))[indices], head, None)
    return OPS.sample.reference(logits, *sampling), logits


def layer_args(query_lens, spare_columns, spare_blocks, rows):
    """Arguments of `layer`, and for each the dimensions that vary between batches."""
    q, k_cache, v_cache, table, seq_lens, starts, *_ = attention_args(query_lens)
    tokens = q.shape[0]
    table = torch.nn.functional.pad(table, (0, spare_columns))
    caches = [torch.cat([cache, torch.randn(spare_blocks, *cache.shape[1:])]) for cache in (k_cache, v_cache)]
    slots = torch.cat(
        [
            table[b, positions // 4].long() * 4 + positions % 4
            for b, count in enumerate(query_lens)
            for positions in [torch.arange(3, 3 + count)]
        ]
    )
    k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)
    indices = torch.arange(rows) % tokens
    args = [q, k, v, *caches, table, seq_lens, starts, slots, indices, torch.randn(11, 32), *sample_args(rows)[1:]]
    dynamic = [(0,)] * 5 + [(0, 1)] + [(0,)] * 4 + [()] + [(0,)] * 7
    return args, dynamic


SIZES = [((4, 1, 2), 1, 5, 4), ((1, 1), 4, 9, 2), ((9, 1, 1, 3, 1), 0, 2, 6), ((1,), 3, 3, 1), ((5,), 2, 6, 1)]


@pytest.mark.parametrize("mark", ["backed", "unbacked"])
def test_one_graph_serves_all_sizes(mark):
    """T, B, L, W and N vary. Backed symbols may specialise on 1; unbacked ones turn any guard on a size into an error,
    so there batches of one token, one sequence and one row go through the same graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    marker = torch._dynamo.mark_dynamic if mark == "backed" else torch._dynamo.decorators.mark_unbacked
    for sizes in SIZES[: 3 if mark == "backed" else None]:
        args, dynamic = layer_args(*sizes)
        expected_args = [x.clone() for x in args]
        expected = layer(*expected_args)
        for tensor, dims in zip(args, dynamic, strict=True):
            for dim in dims:
                marker(tensor, dim)
        tokens, logits = compiled(*args)
        torch.testing.assert_close(logits, expected[1])
        assert torch.equal(tokens, expected[0])
        assert torch.equal(args[3], expected_args[3])
        assert torch.equal(args[4], expected_args[4])
    assert counter.frame_count == 1


def test_fakes_run_on_another_device():
    """Shapes, dtypes and device come from the fakes: nothing of the reference runs."""
    args = attention_args((4, 1), dv=6)
    with torch._subclasses.FakeTensorMode():
        fake = [torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x for x in args]
        out = OPS.paged_attention.reference(*fake)
        drawn = OPS.sample.reference(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in sample_args(3)))
    assert (out.shape, out.dtype, out.device.type) == ((5, 4, 6), torch.float32, "cuda")
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((3,), torch.int64, "cuda")
