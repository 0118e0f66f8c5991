"""How long is a decode step, how near to what the memory allows, and beside Hugging Face `generate`?

python -m bench.decode_latency --model smollm2 --batch 1,8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria

import runtime
from bench.roofline import ReadBandwidth, bytes_per_step
from models.checkpoint import resolve
from runtime.engine import Engine


def decode_step_seconds(engine: Engine, batch: int, prompt: int, steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps of `batch` sequences, scheduling and output included."""
    engine.reset_prefix_cache()
    params = runtime.SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
    before = engine.stats().num_output_tokens
    for ids in _prompts(engine, batch, prompt):
        engine.add_request(ids, params)
    while engine.stats().num_output_tokens < before + batch:  # until every prompt has given its first token
        engine.step()
    seconds = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


class _Clock(StoppingCriteria):
    """Notes when each token of a `generate` call was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate_step_seconds(model: Any, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps of Hugging Face `generate`, greedy, with its default cache."""
    clock = _Clock()
    ids = torch.tensor(prompts, device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=steps + 1,
        min_new_tokens=steps + 1,
        stopping_criteria=[clock],
    )
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]


def _prompts(engine: Engine, batch: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, engine.vocab_size, (batch, length), generator=generator).tolist()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all batch sizes, ours, Hugging Face and the bandwidth probe in alternation, and return the results."""
    batches = [int(batch) for batch in args.batch.split(",")]
    folder = resolve(args.model).folder
    engine = runtime.compile(folder, backend=args.backend, dtype=args.dtype, device=args.device)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.dtype).to(engine.device).eval()
    bandwidth = ReadBandwidth(engine.device)
    rows = []
    for batch in batches:
        ours: list[float] = []
        theirs: list[float] = []
        prompts = _prompts(engine, batch, args.prompt)
        decode_step_seconds(engine, batch, args.prompt, 2)
        generate_step_seconds(reference, prompts, 2)
        for _ in range(args.rounds):
            bandwidth.sample()
            ours += decode_step_seconds(engine, batch, args.prompt, args.steps)
            theirs += generate_step_seconds(reference, prompts, args.steps)
        needed = bytes_per_step(engine, batch, args.prompt + args.steps // 2)
        ms, hf_ms = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        rows.append({"batch": batch, "bytes": needed, "ms": ms, "hf_ms": hf_ms})
    for row in rows:
        row["floor_ms"] = row["bytes"] / bandwidth.best * 1e3
        row["bandwidth_fraction"] = row["floor_ms"] / row["ms"]
        row["hf_bandwidth_fraction"] = row["floor_ms"] / row["hf_ms"]
        row["speedup"] = row["hf_ms"] / row["ms"]
    return {
        "bench": "decode_latency",
        "model": args.model,
        "backend": args.backend,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompt": args.prompt,
        "read_gb_s": bandwidth.best / 1e9,
        "read_gb_s_median": bandwidth.median / 1e9,
        "read_buffer_bytes": bandwidth.nbytes,
        "num_recompiles": engine.stats().num_recompiles,
        "rows": rows,
    }


def main() -> None:
    """Print the roofline and a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id, or smollm2")
    parser.add_argument("--batch", default="1,8", help="batch sizes, separated by commas")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=24, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of bandwidth, ours, Hugging Face")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    result = measure(parser.parse_args())
    print(
        f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']} threads: reads "
        f"{result['read_gb_s']:.1f} GB/s at best, {result['read_gb_s_median']:.1f} in the median, over "
        f"{result['read_buffer_bytes'] / 2**30:.2f} GiB"
    )
    head = ("batch", "MB/step", "floor ms", "ms/step", "ms/token", "of bandwidth", "HF ms/step", "HF of bw", "HF/ours")
    print("".join(f"{name:>13}" for name in head))
    for row in result["rows"]:
        print(
            f"{row['batch']:>13}{row['bytes'] / 1e6:>13.0f}{row['floor_ms']:>13.1f}{row['ms']:>13.1f}"
            f"{row['ms'] / row['batch']:>13.2f}{row['bandwidth_fraction']:>13.0%}{row['hf_ms']:>13.1f}"
            f"{row['hf_bandwidth_fraction']:>13.0%}{row['speedup']:>13.2f}"
        )
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
