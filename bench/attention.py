"""How near is the C++ paged attention to what the memory allows, and beside dense attention?

python -m bench.attention

Decode cycles over layers with at least 1 GiB of keys and values in all, so that no cache of the machine holds them. All
contestants run in turn in every round; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from bench.rounds import alternate, machine, ratio, timed
from ops.cpu.library import load
from ops.memory import Spec, allocate

Runner = Callable[[], object]


@dataclass
class Layer:
    """One layer's paged K and V [N, block_size, Hk, D], and the same dense, [B, Hk, S, D]."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """The paged K and V."""
        return self.k_cache, self.v_cache


class Decode:
    """`batch` sequences of `context` tokens in every layer, one query each, through a scattered or an orderly table."""

    def __init__(self, args: argparse.Namespace) -> None:
        dtype, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
        width = -(-args.context // args.block_size)
        num_blocks = args.batch * width + 1
        per_layer = 2 * args.batch * args.context * args.kv_heads * args.head_dim * dtype.itemsize
        self.ordered = torch.arange(1, num_blocks, dtype=torch.int32).view(args.batch, width)
        order = torch.randperm(num_blocks - 1, generator=generator).to(torch.int32) + 1
        self.scattered = order.view(args.batch, width)
        self.seq_lens = torch.full((args.batch,), args.context, dtype=torch.int32)
        self.starts = torch.arange(args.batch + 1, dtype=torch.int32)
        self.q = torch.randn(args.batch, args.kv_heads * args.group, args.head_dim, generator=generator).to(dtype)
        self.scale = args.head_dim**-0.5
        self.layers = []
        for _ in range(max(1, -(-args.bytes // per_layer))):
            shape = (num_blocks, args.block_size, args.kv_heads, args.head_dim)
            caches = allocate([Spec(shape, dtype)] * 2, torch.device("cpu"))  # as an engine's lie
            for cache in caches:
                cache.copy_(torch.randn(shape, generator=generator))
            self.layers.append(Layer(*caches, *(self.gather(cache) for cache in caches)))
        self.nbytes = per_layer * len(self.layers)

    def gather(self, cache: Tensor) -> Tensor:
        """The dense [B, Hk, S, D] copy of a cache."""
        pages = cache[self.scattered].flatten(1, 2)[:, : int(self.seq_lens[0])]
        return pages.transpose(1, 2).contiguous()

    def paged(self, table: Tensor) -> None:
        """Our kernel over all layers."""
        for layer in self.layers:
            torch.ops.pagegraph.paged_attention.cpu(
                self.q, *layer.caches, table, self.seq_lens, self.starts, self.scale, 0, 0.0, None
            )

    def read(self) -> None:
        """Read what `paged` must read and nothing else: the caches, as sums of float32."""
        for layer in self.layers:
            for cache in layer.caches:
                cache.view(-1).view(torch.float32).sum()

    def dense(self, attention: Callable[..., Tensor], *, gather: bool) -> None:
        """Another attention over the dense K and V of all layers, which are copied from the pages first if `gather`."""
        q = self.q[:, :, None]
        for layer in self.layers:
            k, v = (self.gather(cache) for cache in layer.caches) if gather else (layer.k, layer.v)
            attention(q, k, v, scale=self.scale, enable_gqa=True)


class Prefill:
    """One prompt of `tokens`, paged and dense."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        dtype, generator = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
        width = -(-tokens // args.block_size)
        heads, d = args.kv_heads, args.head_dim
        self.table = (torch.randperm(width, generator=generator).to(torch.int32) + 1).view(1, width)
        self.k_cache, self.v_cache = (
            torch.randn(width + 1, args.block_size, heads, d, generator=generator).to(dtype) for _ in range(2)
        )
        self.q = torch.randn(tokens, heads * args.group, d, generator=generator).to(dtype)
        self.k, self.v = (
            cache[self.table].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )
        self.seq_lens = torch.tensor([tokens], dtype=torch.int32)
        self.starts = torch.tensor([0, tokens], dtype=torch.int32)
        self.scale = d**-0.5
        self.flops = 2 * tokens * (tokens + 1) * heads * args.group * d  # two products of the causal half

    def paged(self) -> Tensor:
        """Our kernel."""
        return torch.ops.pagegraph.paged_attention.cpu(
            self.q, self.k_cache, self.v_cache, self.table, self.seq_lens, self.starts, self.scale, 0, 0.0, None
        )

    def sdpa(self) -> Tensor:
        """torch's attention over dense K and V, without the gather."""
        q = self.q.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, self.k, self.v, is_causal=True, scale=self.scale, enable_gqa=True)


def flex() -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled for this CPU."""
    return torch.compile(flex_attention, dynamic=False)


def measure_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Decode with all contestants; prints one line each."""
    decode = Decode(args)
    compiled, reason = flex(), None
    runners: dict[str, Runner] = {
        "read": decode.read,
        "paged": lambda: decode.paged(decode.scattered),
        "ordered": lambda: decode.paged(decode.ordered),
        "sdpa": lambda: decode.dense(F.scaled_dot_product_attention, gather=False),
        "sdpa_gather": lambda: decode.dense(F.scaled_dot_product_attention, gather=True),
        "flex": lambda: decode.dense(compiled, gather=False),
    }
    try:
        runners["flex"]()
    except Exception as error:  # whatever the compiler raises is the answer to print
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        del runners["flex"]
    with torch.inference_mode():
        seconds = alternate({name: timed(run) for name, run in runners.items()}, args.rounds, warm_up=1)
    labels = {
        "read": "read-only sum of the same bytes",
        "paged": "paged, scattered blocks",
        "ordered": "paged, blocks in order",
        "sdpa": "SDPA on dense K and V",
        "sdpa_gather": "SDPA and the gather before it",
        "flex": "FlexAttention on dense K and V",
    }
    layers = len(decode.layers)
    print(
        f"decode: {layers} layers of {args.batch} x {args.context} tokens, {args.kv_heads} kv heads x {args.head_dim}, "
        f"{args.group} query heads each, {args.dtype}, blocks of {args.block_size}: {decode.nbytes / 2**30:.2f} GiB"
    )
    for name in seconds:
        median = statistics.median(seconds[name])
        bandwidth = decode.nbytes / median / 1e9
        print(f"  {labels[name]:34}{median / layers * 1e3:9.2f} ms/layer{bandwidth:8.1f} GB/s"
              f"{ratio(seconds[name], seconds['paged']):8.2f} x paged")  # fmt: skip
    if reason:
        print(f"  FlexAttention does not run here: {reason}")
    fraction = ratio(seconds["read"], seconds["paged"])
    indirection = ratio(seconds["paged"], seconds["ordered"])
    verdict = "invalid probe: the sum is no upper bound here" if fraction > 1 else "target 85 %"
    print(f"  {fraction:.1%} of the read bandwidth ({verdict}); scattered over ordered {indirection:.3f} (target 1.05)")
    return {
        "nbytes": decode.nbytes,
        "layers": layers,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "fraction_of_read_bandwidth": fraction,
        "probe_valid": fraction <= 1,
        "scattered_over_ordered": indirection,
        "flex_error": reason,
    }


def measure_prefill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prefill beside SDPA, by prompt length; prints one line each."""
    rows = []
    for tokens in args.prompt:
        prefill = Prefill(args, tokens)
        with torch.inference_mode():
            seconds = alternate({"paged": timed(prefill.paged), "sdpa": timed(prefill.sdpa)}, args.rounds, warm_up=1)
        tflops = {name: prefill.flops / statistics.median(values) / 1e12 for name, values in seconds.items()}
        row = {"tokens": tokens, "tflops": tflops, "sdpa_over_paged": ratio(seconds["sdpa"], seconds["paged"])}
        rows.append(row)
        print(f"prefill of {tokens}: {tflops['paged']:.3f} TFLOP/s, SDPA {tflops['sdpa']:.3f} "
              f"({row['sdpa_over_paged']:.2f} x our time)")  # fmt: skip
    return rows


def main() -> None:
    """Parse the command line, measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="at least that many of K and V in all layers")
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load()
    print(f"torch {torch.__version__}, {args.threads} threads, {library.isa}")
    decode, prefill = measure_decode(args), measure_prefill(args)
    this_machine = machine() | {"isa": library.isa}
    print(
        json.dumps(
            {"bench": "attention", "machine": this_machine, "args": vars(args), "decode": decode, "prefill": prefill}
        )
    )


if __name__ == "__main__":
    main()
