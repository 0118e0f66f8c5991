"""Arguments for every op at the sizes of a model, and how far a provider's results are from the specification's.

The specification is computed in float64, from the very arguments. The error that is allowed is twice that of the
specification computed in the arguments' own precision, which rounds once, and a few roundings of the largest value;
each by rows along the last dimension, since attention over many keys gives small values, and over few large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ops.schema import SCHEMAS, overload

NAN = float("nan")
ROUNDINGS = 4  # of a row's largest result, beside what the specification in low precision is off by
HOST_READERS = {"swap_blocks": "it runs outside the graph", "grouped_linear": "no provider of it can be captured"}


@dataclass(frozen=True)
class Sizes:
    """Of a model and a step."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    inter: int = 14336
    vocab: int = 128256
    tokens: int = 509  # of a step with prompts
    batch: int = 61  # of a decode step
    context: int = 4096  # most tokens of a sequence
    long_context: int = 32768
    blocks: int = 257


TINY = Sizes(
    heads=4,
    kv_heads=2,
    dim=16,
    hidden=48,
    inter=40,
    vocab=77,
    tokens=13,
    batch=3,
    context=40,
    long_context=90,
    blocks=9,
)
BLOCK_SIZE = 16


class Maker:
    """Random tensors of one dtype on a device, from a seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.host = torch.Generator().manual_seed(seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed values."""
        return (torch.randn(shape, generator=self._generator, device=self.device) * scale).to(self.dtype)

    def on_device(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers of the host."""
        return torch.as_tensor(values).to(self.device, dtype)

    def below(self, low: int, high: int, count: int) -> list[int]:
        """Whole numbers from `low` to `high`, both included."""
        return torch.randint(low, high + 1, (count,), generator=self.host).tolist()

    def distinct(self, count: int, most: int) -> Tensor:
        """`count` different numbers from 1 to most - 1, int64 on the host."""
        return torch.randperm(most - 1, generator=self.host)[:count] + 1


@dataclass(frozen=True)
class Case:
    """One op at certain sizes. make: its arguments, of the same shapes for every seed, and other lengths and places.

    in_all_dtypes: False where a kernel differs from another case's in options only, and one dtype will do: a kernel
    takes seconds to compile.
    """

    op: str
    label: str
    make: Callable[[Maker], list[Any]]
    in_all_dtypes: bool = True

    @property
    def name(self) -> str:
        """Op and label."""
        return f"{self.op} {self.label}".strip()


def cases(sizes: Sizes) -> list[Case]:
    """Cases of every op of `ops.schema.SCHEMAS`."""
    h, k, d = sizes.heads, sizes.kv_heads, sizes.dim
    small = (max(1, h // 4), max(1, k // 4), d // 2)

    def attention(lens: Lens, heads: Sequence[int] = (h, k, d), **options: Any) -> Callable[[Maker], list[Any]]:
        return lambda maker: attention_arguments(maker, sizes, lens, heads, **options)

    decode, mixed = decode_lens(sizes), mixed_lens(sizes)
    found = [
        Case("paged_attention", "decode", attention(decode)),
        Case("paged_attention", "decode, one long sequence", attention(decode_lens(sizes, batch=1))),
        Case("paged_attention", "decode, window", attention(decode, window=sizes.context // 3), False),
        Case("paged_attention", "decode, softcap, sinks", attention(decode, small, softcap=3.0, sinks=True), False),
        Case("paged_attention", "prompts and decode", attention(mixed)),
        Case("paged_attention", "prompts, window", attention(mixed, window=sizes.tokens // 5), False),
        Case("paged_attention", "prompts, softcap, sinks", attention(mixed, small, softcap=3.0, sinks=True), False),
        Case("write_kv", "", lambda maker: write_arguments(maker, sizes)),
        Case("rope_write_kv", "", lambda maker: rope_arguments(maker, sizes, d)),
        Case("rope_write_kv", "half of the dimensions", lambda maker: rope_arguments(maker, sizes, d // 2)),
        Case("copy_blocks", "", lambda maker: copy_arguments(maker, sizes)),
        Case("swap_blocks", "out", lambda maker: swap_arguments(maker, sizes, out=True)),
        Case("swap_blocks", "in", lambda maker: swap_arguments(maker, sizes, out=False)),
        Case("sample", "", lambda maker: sample_arguments(maker, sizes.batch, sizes.vocab)),
        Case("linear", "", lambda m: [m.normal(sizes.tokens, sizes.hidden), weight(m, h * d, sizes.hidden), None]),
        Case("grouped_linear", "", lambda maker: grouped_arguments(maker, sizes)),
    ]
    for rows in (sizes.batch, sizes.tokens):
        found += [
            Case("rms_norm", f"{rows} rows", lambda m, n=rows: norm_arguments(m, n, sizes.hidden, 1)),
            Case("rms_norm", f"{rows} rows of heads", lambda m, n=rows: norm_arguments(m, n * k, d, 1)),
            Case("add_rms_norm", f"{rows} rows", lambda m, n=rows: norm_arguments(m, n, sizes.hidden, 2)),
            Case("silu_and_mul", f"{rows} rows", lambda m, n=rows: [m.normal(n, 2 * sizes.inter)]),
            Case("gelu_and_mul", f"{rows} rows, tanh", lambda m, n=rows: [m.normal(n, 2 * sizes.inter), True]),
            Case("gelu_and_mul", f"{rows} rows, erf", lambda m, n=rows: [m.normal(n, 2 * sizes.inter), False]),
        ]
    assert {case.op for case in found} == SCHEMAS.keys()
    return found


Lens = Callable[[Maker], tuple[list[int], list[int]]]  # tokens and queries of each sequence


def decode_lens(sizes: Sizes, batch: int | None = None) -> Lens:
    """One query a sequence; a batch of one is long."""

    def lens(maker: Maker) -> tuple[list[int], list[int]]:
        if batch == 1:
            return maker.below(sizes.long_context * 3 // 4, sizes.long_context, 1), [1]
        return [*maker.below(1, sizes.context, sizes.batch - 2), 1, sizes.context], [1] * sizes.batch

    return lens


def mixed_lens(sizes: Sizes) -> Lens:
    """A whole prompt, the rest of another, and decode steps: in all `tokens` queries of which three are padding."""

    def lens(maker: Maker) -> tuple[list[int], list[int]]:
        (whole,) = maker.below(sizes.tokens // 4, sizes.tokens // 2, 1)
        queries = [1, whole, 1, sizes.tokens - 3 - whole - 3, 1]
        past = [*maker.below(0, sizes.context - sizes.tokens if sizes.context > sizes.tokens else 0, 5)]
        past[1] = 0
        return [p + q for p, q in zip(past, queries, strict=True)], queries

    return lens


def attention_arguments(
    maker: Maker,
    sizes: Sizes,
    lens: Lens,
    heads: Sequence[int],
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> list[Any]:
    """Scattered blocks, with NaN in all slots that belong to no sequence."""
    lengths, queries = lens(maker)
    q_heads, kv_heads, dim = heads
    width = -(-(sizes.long_context if len(lengths) == 1 else sizes.context + sizes.tokens) // BLOCK_SIZE)
    num_blocks = width * len(lengths) + 2
    table = maker.distinct(width * len(lengths), num_blocks).view(len(lengths), width)
    positions = torch.arange(width * BLOCK_SIZE)
    slots = (table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    slots = maker.on_device(slots[positions < torch.tensor(lengths)[:, None]], torch.int64)
    caches = []
    for _ in "kv":
        cache = torch.full((num_blocks, BLOCK_SIZE, kv_heads, dim), NAN, dtype=maker.dtype, device=maker.device)
        cache[0] = 0
        cache.view(-1, kv_heads, dim)[slots] = maker.normal(len(slots), kv_heads, dim)
        caches.append(cache)
    starts = torch.tensor([0, *queries]).cumsum(0)
    tokens = len(queries) if set(queries) == {1} else sizes.tokens
    merged = maker.normal(tokens, (q_heads + 2 * kv_heads) * dim)  # as a merged projection gives it
    return [
        merged[:, : q_heads * dim].view(tokens, q_heads, dim),
        *caches,
        maker.on_device(table),
        maker.on_device(lengths),
        maker.on_device(starts),
        dim**-0.5,
        window,
        softcap,
        maker.normal(q_heads) if sinks else None,
    ]


def _token_slots(maker: Maker, sizes: Sizes) -> Tensor:
    """A slot for each of `tokens` tokens, the last two of which are padding."""
    slots = maker.distinct(sizes.tokens, sizes.blocks * BLOCK_SIZE - BLOCK_SIZE) + BLOCK_SIZE - 1
    slots[-2:] = 0
    return maker.on_device(slots, torch.int64)


def _tokens(maker: Maker, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of `tokens` tokens, slices of a merged projection; padding tokens are alike."""
    h, k, d = sizes.heads, sizes.kv_heads, sizes.dim
    merged = maker.normal(sizes.tokens, (h + 2 * k) * d)
    merged[-1] = merged[-2]  # both go to slot 0, in an order that nobody promises
    q, keys, values = merged.split([h * d, k * d, k * d], 1)
    return q.view(-1, h, d), keys.view(-1, k, d), values.view(-1, k, d)


def _caches(maker: Maker, sizes: Sizes) -> list[Tensor]:
    return [maker.normal(sizes.blocks, BLOCK_SIZE, sizes.kv_heads, sizes.dim) for _ in "kv"]


def write_arguments(maker: Maker, sizes: Sizes) -> list[Any]:
    """Of write_kv."""
    return [*_tokens(maker, sizes)[1:], *_caches(maker, sizes), _token_slots(maker, sizes)]


def rope_arguments(maker: Maker, sizes: Sizes, turned: int) -> list[Any]:
    """Of rope_write_kv; turned: how many dimensions."""
    angles = torch.rand(sizes.tokens, turned // 2, generator=maker.host) * 100
    angles[-1] = angles[-2]
    cos, sin = (maker.on_device(torch.cat([x, x], -1), maker.dtype) for x in (angles.cos(), angles.sin()))
    return [*_tokens(maker, sizes), cos, sin, *_caches(maker, sizes), _token_slots(maker, sizes)]


def copy_arguments(maker: Maker, sizes: Sizes) -> list[Any]:
    """Of copy_blocks: a third of all blocks are sources, a third destinations."""
    pairs = maker.distinct(2 * (sizes.blocks // 3), sizes.blocks).view(-1, 2)
    return [_caches(maker, sizes) + _caches(maker, sizes), maker.on_device(pairs, torch.int64)]


def swap_arguments(maker: Maker, sizes: Sizes, *, out: bool) -> list[Any]:
    """Of swap_blocks, from the device to page-locked memory of the host, or back; some blocks follow each other."""
    caches = _caches(maker, sizes)
    host = [cache.cpu() for cache in _caches(maker, sizes)]
    if maker.device.type == "cuda":
        host = [cache.pin_memory() for cache in host]
    sources = maker.distinct(sizes.blocks // 2, sizes.blocks)
    targets = sources.sort().values  # where they follow each other, so do some of the sources
    half = len(sources) // 2
    sources[:half] = sources[:half].sort().values
    pairs = torch.stack([sources, targets], 1)
    return [caches, host, pairs] if out else [host, caches, pairs]


def sample_arguments(maker: Maker, rows: int, vocab: int) -> list[Any]:
    """Of sample: rows of all kinds in turn, from greedy to all filters at once; some have masked ids."""
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    kinds.append((0.8, 40, 0.95, 0.02))
    temperature, top_k, top_p, min_p = zip(*(kinds[row % len(kinds)] for row in range(rows)), strict=True)
    masked = torch.full((rows, 8), -1)
    masked[::3, :2] = torch.tensor([0, vocab - 1])
    return [
        maker.normal(rows, vocab, scale=3.0),
        maker.on_device(temperature, torch.float32),
        maker.on_device(top_k),
        maker.on_device(top_p, torch.float32),
        maker.on_device(min_p, torch.float32),
        maker.on_device(maker.below(0, 2**62, rows), torch.int64),
        maker.on_device(maker.below(0, 10_000, rows), torch.int64),
        maker.on_device(masked),
    ]


def weight(maker: Maker, rows: int, columns: int) -> Tensor:
    """A matrix that keeps the size of what it is multiplied by."""
    return maker.normal(rows, columns, scale=columns**-0.5)


def grouped_arguments(maker: Maker, sizes: Sizes) -> list[Any]:
    """Of grouped_linear, 8 experts, one of them idle."""
    ends = sorted([*maker.below(0, sizes.tokens, 6), sizes.tokens])
    weights = torch.stack([weight(maker, sizes.dim, sizes.hidden) for _ in range(8)])
    return [maker.normal(sizes.tokens, sizes.hidden), weights, maker.on_device([ends[0], *ends])]


def norm_arguments(maker: Maker, rows: int, width: int, inputs: int) -> list[Any]:
    """Of rms_norm, or with two inputs of add_rms_norm."""
    return [*(maker.normal(rows, width) for _ in range(inputs)), maker.normal(width), 1e-5, 0.0]


def results(op: str, provider: str, arguments: Sequence[Any]) -> list[Tensor]:
    """What an op returns, and the tensors that it has written, from copies of the arguments."""
    copies = copy_of(arguments)
    returned = overload(op, provider)(*copies)
    if torch.cuda.is_available():  # copies to page-locked memory are only queued
        torch.cuda.synchronize()
    return [*tensors(returned), *written(op, copies)]


def written(op: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Those of the arguments that the op writes, by its schema."""
    declared = overload(op, "reference")._schema.arguments
    writes = [each.alias_info is not None and each.alias_info.is_write for each in declared]
    return tensors([argument for argument, is_written in zip(arguments, writes, strict=True) if is_written])


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in lists and tuples."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def copy_of(arguments: Sequence[Any]) -> list[Any]:
    """Copies that keep strides, and pages that are locked."""
    return tree_map(_copy, list(arguments))


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_pinned():
        return leaf.clone().pin_memory()
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copy.copy_(leaf)


def fill(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Write the tensors of other arguments into those that a captured call reads."""
    for target, source in zip(tensors(targets), tensors(sources), strict=True):
        target.copy_(source)


def judge(case: Case, found: Sequence[Tensor], arguments: Sequence[Any]) -> dict[str, Any]:
    """Whether the results of an op for these arguments are within the budget, and how far off they are.

    found: as `results` gives them; arguments: as they were before.
    """
    if case.op == "sample":
        expected = results("sample", "reference", arguments)[0]
        different = int((found[0] != expected).sum())
        allowed = max(1, len(expected) // 20)  # a filter's border, and the last bits of log, may differ
        return {"different": different, "of": len(expected), "passed": different <= allowed}
    wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, list(arguments))
    exact, plain = results(case.op, "reference", wide), results(case.op, "reference", arguments)
    verdicts = [_compare(*each) for each in zip(found, plain, exact, strict=True)]
    return max(verdicts, key=lambda verdict: (not verdict["passed"], verdict["share"]))


def _compare(found: Tensor, plain: Tensor, exact: Tensor) -> dict[str, Any]:
    """The row with the largest error beside what is allowed there; NaN, and another shape, is more than any error."""
    if (found.shape, found.dtype) != (plain.shape, plain.dtype):
        return {"passed": False, "share": float("inf"), "why": f"{found.dtype} {list(found.shape)}"}
    info = torch.finfo(found.dtype)
    error, noise = ((x.double() - exact).abs().amax(-1).flatten() for x in (found, plain))
    allowed = 2 * noise + ROUNDINGS * info.eps * exact.abs().amax(-1).flatten() + info.tiny
    shares = (error / allowed).nan_to_num(nan=float("inf"))
    worst = int(shares.argmax())
    share = shares[worst].item()
    return {"passed": share <= 1, "share": share, "error": error[worst].item(), "allowed": allowed[worst].item()}
