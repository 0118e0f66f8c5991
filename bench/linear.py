"""How near is the C++ linear to what the memory allows with few rows, and how does it do beside torch with many?

python -m bench.linear

The weights are distinct matrices of at least 1 GiB in all, taken in turn, so that no cache of the machine holds them:
on pages of 4 KiB, and then on transparent huge pages. All contestants get the same matrices in every round; a ratio is
the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import sizes
from bench.rounds import machine, ratio
from ops.cpu.library import load

PRODUCTS_PER_SAMPLE = 2e9  # multiply-adds; bounds the time of a sample where the products take it


class Weights:
    """Distinct matrices [N, K] side by side in one buffer of at least `nbytes` bytes, on huge pages or not."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, nbytes: int, huge: bool) -> None:
        count = -(-nbytes // (n * k * dtype.itemsize))
        self.nbytes = count * n * k * dtype.itemsize
        # Private, since shared memory has huge pages by another knob only.
        self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages; the table says how many bytes are on them
            self._memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        matrices = torch.frombuffer(self._memory, dtype=dtype).view(count, n, k)
        for matrix in matrices:
            matrix.copy_(torch.randn(n, k) / k**0.5)
        self._turn: Iterator[Tensor] = itertools.cycle(matrices)
        self.count = count

    def take(self, count: int) -> list[Tensor]:
        """The next `count` matrices in turn."""
        return list(itertools.islice(self._turn, min(count, self.count)))


def huge_page_bytes() -> int:
    """Bytes of this process on transparent huge pages."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("AnonHugePages"))


def read(weight: Tensor) -> Tensor:
    """A plain read-only sum of the matrix's bytes."""
    return weight.view(torch.float32).sum()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Our kernel, without a bias."""
    return torch.ops.pagegraph.linear.cpu(x, weight, None)


def mm(x: Tensor, weight: Tensor) -> Tensor:
    """torch's plain matrix product."""
    return torch.mm(x, weight.t())


def seconds(run: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """Time of one pass over the matrices."""
    start = time.perf_counter()
    for weight in weights:
        run(weight)
    return time.perf_counter() - start


def measure(
    contestants: dict[str, Callable[[Tensor], object]], weights: Weights, rows: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per matrix of every contestant and round, after one that is dropped. The order turns every round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants.items())
    for index in range(rounds + 1):
        first = weights.take(1)[0]
        batch = [first, *weights.take(max(0, int(PRODUCTS_PER_SAMPLE / (rows * first.numel())) - 1))]
        for name, run in order:
            taken = seconds(run, batch) / len(batch)
            if index:
                times[name].append(taken)
        order.append(order.pop(0))
    return times


def measure_weights(weights: Weights, args: argparse.Namespace) -> dict[str, Any]:
    """Both tables for one set of weights."""
    sample = weights.take(1)[0]
    dtype, nbytes, products = sample.dtype, sample.nbytes, sample.numel()
    few, many = [], []
    contestants: dict[str, Callable[[Tensor], object]]
    for rows in args.few:
        x = torch.randn(rows, sample.shape[1]).to(dtype)
        contestants = {"linear": partial(linear, x), "F.linear": partial(F.linear, x), "sum": read}
        times = measure(contestants, weights, rows, args.rounds)
        row = {"rows": rows, **{name: nbytes / statistics.median(t) / 1e9 for name, t in times.items()}}
        row |= {"of_sum": ratio(times["sum"], times["linear"]), "of_torch": ratio(times["F.linear"], times["linear"])}
        few.append(row)
        print(
            f"  {rows:5} rows: {row['linear']:6.2f} GB/s, {row['of_sum']:5.2f} of the sum ({row['sum']:.2f}), "
            f"{row['of_torch']:5.2f} x F.linear ({row['F.linear']:.2f})"
        )
    for rows in args.many:
        x = torch.randn(rows, sample.shape[1]).to(dtype)
        contestants = {"linear": partial(linear, x), "F.linear": partial(F.linear, x), "mm": partial(mm, x)}
        times = measure(contestants, weights, rows, args.rounds)
        row = {"rows": rows, **{name: 2e-9 * rows * products / statistics.median(t) for name, t in times.items()}}
        row |= {"of_torch": ratio(times["F.linear"], times["linear"]), "of_mm": ratio(times["mm"], times["linear"])}
        many.append(row)
        print(
            f"  {rows:5} rows: {row['linear']:6.1f} GFLOP/s, {row['of_torch']:5.2f} x F.linear ({row['F.linear']:.1f})"
            f", {row['of_mm']:5.2f} x mm ({row['mm']:.1f})"
        )
    return {"few": few, "many": many}


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(n), int(k)) for n, k in pairs]


def main() -> None:
    """Measure, print the tables, and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default="1536x576,576x1536,3072x1024,8192x2048,2048x8192",
        help="weights, N x K (the defaults are of SmolLM2-135M, Qwen3-0.6B and Llama-3.2-1B)",
    )
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of x and the weights")
    parser.add_argument("--few", type=sizes, default="1,2,4,8,16,32,64", help="rows of x, for GB/s")
    parser.add_argument("--many", type=sizes, default="128,512,2048", help="rows of x, for GFLOP/s")
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are kept")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load()
    print(f"torch {torch.__version__}, {args.threads} threads, {library.isa}")
    results = []
    for dtype, (n, k), huge in itertools.product(args.dtypes.split(","), args.shapes, (False, True)):
        before = huge_page_bytes()
        weights = Weights(n, k, getattr(torch, dtype), int(args.gib * 2**30), huge)
        share = max(0, huge_page_bytes() - before) / weights.nbytes
        print(f"{dtype} {n} x {k}, {weights.count} matrices, {share:.0%} on huge pages")
        case = {"dtype": dtype, "n": n, "k": k, "matrices": weights.count, "huge_pages": share}
        results.append({**case, **measure_weights(weights, args)})
        del weights
    print(
        json.dumps(
            {"bench": "linear", "machine": machine() | {"isa": library.isa}, "args": vars(args), "results": results}
        )
    )


if __name__ == "__main__":
    main()
