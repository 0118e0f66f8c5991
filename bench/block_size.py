"""Which block size? Slots that are never written, bytes of block tables, bytes of a copy, and the time of attention.

python -m bench.block_size

Waste is from the request lengths of the Azure LLM inference traces (see bench/data): of the slots that a request holds
at its end, the share that no token is written to. Attention is the C++ kernel in decode steps with the geometry of
Llama 3.2 1B, over more keys and values than caches hold, in blocks scattered at random. All block sizes see the same
bytes and take turns in every round; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.arguments import at_least, sizes
from bench.fragmentation import LICENCE, SOURCE, new_figure, read_trace
from bench.rounds import alternate, machine, ratio, timed
from ops.cpu.library import load
from runtime.config import EngineConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = EngineConfig().block_size
TRACES = ("conv", "code")
TABLE_ENTRY_BYTES = 4  # block ids are int32


def num_blocks(length: int, block_size: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


def tail_waste(lengths: Sequence[int], block_size: int) -> float:
    """Share of the allocated slots that is never written, over requests that end with `lengths` tokens cached."""
    allocated = sum(num_blocks(length, block_size) for length in lengths) * block_size
    return 1 - sum(lengths) / allocated


def table_bytes(lengths: Sequence[int], block_size: int) -> float:
    """Mean bytes of a request's block table at its end."""
    return statistics.fmean(num_blocks(length, block_size) for length in lengths) * TABLE_ENTRY_BYTES


class Layers:
    """Keys and values of as many layers as make `nbytes`, which any block size can view as its own blocks."""

    def __init__(self, args: argparse.Namespace) -> None:
        dtype, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
        self.batch, self.context = args.batch, args.context
        self.padded = num_blocks(args.context, max(args.sizes)) * max(args.sizes)  # slots of a sequence
        slots = args.batch * self.padded + max(args.sizes)  # the null block of any size comes first
        per_layer = 2 * args.batch * args.context * args.kv_heads * args.head_dim * dtype.itemsize
        count = max(1, -(-args.bytes // per_layer))
        shape = (slots, args.kv_heads, args.head_dim)
        self.caches = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(2)] for _ in range(count)]
        self.nbytes = per_layer * count
        self.q = torch.randn(args.batch, args.kv_heads * args.group, args.head_dim, generator=generator).to(dtype)
        self.seq_lens = torch.full((args.batch,), args.context, dtype=torch.int32)
        self.starts = torch.arange(args.batch + 1, dtype=torch.int32)
        self.scale = args.head_dim**-0.5

    def table(self, block_size: int) -> Tensor:
        """A block table [B, W] of blocks scattered over all slots but the first max(sizes)."""
        count = self.batch * self.padded // block_size
        first = self.caches[0][0].shape[0] // block_size - count
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)) + first
        width = num_blocks(self.context, block_size)
        return order.view(self.batch, -1)[:, :width].to(torch.int32).contiguous()

    def attention(self, block_size: int, table: Tensor) -> None:
        """A decode step's attention, [B, Hq, D] queries in every layer."""
        for layer in self.caches:
            k, v = (cache.view(-1, block_size, *cache.shape[1:]) for cache in layer)
            torch.ops.pagegraph.paged_attention.cpu(
                self.q, k, v, table, self.seq_lens, self.starts, self.scale, 0, 0.0, None
            )


def spread(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the rounds' ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def attention_times(args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Milliseconds a layer, and the ratios to the default block size and to the fastest one, by block size."""
    layers = Layers(args)
    runners = {size: timed(partial(layers.attention, size, layers.table(size))) for size in args.sizes}
    with torch.inference_mode():
        rounds = alternate(runners, args.rounds, warm_up=1)
    over_default = {size: ratio(seconds, rounds[DEFAULT]) for size, seconds in rounds.items()}
    fastest = rounds[min(over_default, key=over_default.__getitem__)]
    return {
        size: {
            "ms_per_layer": statistics.median(seconds) * 1e3 / len(layers.caches),
            "gb_s": layers.nbytes / statistics.median(seconds) / 1e9,
            "over_default": over_default[size],
            "over_fastest": spread(seconds, fastest),
        }
        for size, seconds in rounds.items()
    }


def verdict(rows: Sequence[dict[str, Any]], waste: float, slack: float) -> str:
    """The largest block size that wastes at most the share `waste` in every trace and whose attention is not clearly
    more than 1 + slack times as long as the fastest: larger blocks are fewer for the host, and shorter tables.

    Clearly: even the lower quartile is above it. Without such a size, the smallest that is fast enough.
    """
    fast = [row for row in rows if row["over_fastest"]["low"] <= 1 + slack]
    frugal = [row for row in fast if max(row["tail_waste"].values()) <= waste]
    best = frugal[-1] if frugal else fast[0]
    time = best["over_fastest"]
    wasted = " and ".join(f"{share:.2%} ({name})" for name, share in best["tail_waste"].items())
    which = f"largest that wastes under {waste:.0%}" if frugal else f"smallest; none wastes under {waste:.0%}"
    return (
        f"{best['block_size']} is justified (the default is {DEFAULT}): of those about as fast as the fastest, the "
        f"{which}. It wastes {wasted}, and takes {time['median']:.2f} [{time['low']:.2f}, {time['high']:.2f}] times "
        "the fastest's time"
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All block sizes of `args.sizes`, in order."""
    library = load()
    # The last token that a request generates is never computed, so it is not cached.
    lengths = {name: [request.total - 1 for request in read_trace(name)] for name in TRACES}
    times = attention_times(args)
    token_bytes = 2 * args.layers * args.kv_heads * args.head_dim * getattr(torch, args.dtype).itemsize
    rows = [
        {
            "block_size": size,
            "tail_waste": {name: tail_waste(tokens, size) for name, tokens in lengths.items()},
            "table_bytes": {name: table_bytes(tokens, size) for name, tokens in lengths.items()},
            "copy_bytes": size * token_bytes,
            **times[size],
        }
        for size in args.sizes
    ]
    return {
        "bench": "block_size",
        "source": SOURCE,
        "licence": LICENCE,
        "machine": machine() | {"isa": library.isa},
        "args": vars(args),
        "default": DEFAULT,
        "rows": rows,
        "verdict": verdict(rows, args.waste, args.slack),
    }


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Two panels over the block size: waste of each trace, and the time of attention with its quartiles."""
    figure.set_size_inches(10, 4)
    waste, time = figure.subplots(1, 2)
    block_sizes = [row["block_size"] for row in rows]
    for name in TRACES:
        waste.plot(block_sizes, [row["tail_waste"][name] for row in rows], marker="o", label=name)
    waste.set(title="slots never written, share of allocated", ylim=(0, None))
    waste.legend()
    low, median, high = ([row["over_fastest"][end] for row in rows] for end in ("low", "median", "high"))
    time.plot(block_sizes, median, marker="o")
    time.fill_between(block_sizes, low, high, alpha=0.3)
    time.set(title="time of decode attention, x the fastest", ylim=(0, None))
    for axis in (waste, time):
        axis.set_xscale("log", base=2)
        axis.set(xlabel="block size", xticks=block_sizes, xticklabels=block_sizes)
        axis.axvline(DEFAULT, color="gray", linestyle=":")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits for sizes that cannot view one buffer, or that lack the default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default="1,2,4,8,16,32,64,128,256", help="ascending, with the default")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each")
    parser.add_argument("--layers", type=int, default=16, help="of the model, for the bytes of a copy")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="at least that many of K and V in a round")
    parser.add_argument("--rounds", type=at_least(2), default=31, help="rounds that are kept, after one that is not")
    parser.add_argument("--waste", type=float, default=0.01, help="share of slots that the verdict allows to waste")
    parser.add_argument("--slack", type=float, default=0.05, help="what the verdict still takes for equally fast")
    parser.add_argument("--plot", metavar="FILE", help="draw waste and time (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.sizes != sorted(args.sizes) or DEFAULT not in args.sizes or any(max(args.sizes) % s for s in args.sizes):
        parser.error(f"--sizes must ascend, divide the largest, and have {DEFAULT}, the default, among them")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table and the verdict, then one JSON line."""
    args = parse(argv)
    figure = new_figure() if args.plot else None
    result = measure(args)
    print(f"waste and tables (mean bytes of a request's): {SOURCE}, {LICENCE}")
    print(
        f"attention: batch {args.batch}, {args.context} tokens, {args.kv_heads} kv heads x {args.head_dim}, "
        f"{args.group} query heads each, {args.dtype}, {result['machine']['threads']} threads, "
        f"{result['machine']['isa']}; a copy-on-write or a swap moves whole blocks of {args.layers} layers"
    )
    waste, table = ([f"{what}, {name}" for name in TRACES] for what in ("waste", "table B"))
    heads = ("block size", *waste, *table, "copy KiB", "ms/layer", "GB/s", f"x {DEFAULT}", "x fastest")
    print("".join(f"{head:>14}" for head in heads))
    for row in result["rows"]:
        print(
            f"{row['block_size']:>14}"
            + "".join(f"{row['tail_waste'][name]:>14.2%}" for name in TRACES)
            + "".join(f"{row['table_bytes'][name]:>14.0f}" for name in TRACES)
            + f"{row['copy_bytes'] / 1024:>14.0f}{row['ms_per_layer']:>14.3f}{row['gb_s']:>14.1f}"
            f"{row['over_default']:>14.3f}{row['over_fastest']['median']:>14.3f}"
        )
    print(result["verdict"])
    if figure is not None:
        draw(figure, result["rows"])
        figure.savefig(args.plot)
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
