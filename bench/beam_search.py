"""What do beams that share their blocks save, beside re-submitted prompts and Hugging Face?

python -m bench.beam_search --model smollm2 --width 4 --prompt-tokens 512 --max-tokens 64

The same search three times, in alternation: beams in the engine; a driver outside of it, which submits every beam as a
new prompt for each token (as one has to where an engine has no beams; the prefix cache makes most of it cheap); and
Hugging Face `generate(num_beams=...)`.
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
from torch import Tensor
from transformers import AutoModelForCausalLM

import runtime
from models.checkpoint import resolve
from runtime.beam_search import BeamSearch
from runtime.engine import Engine

Found = list[tuple[list[int], float]]  # completions and their scores, best first


def in_engine(engine: Engine, prompt: list[int], params: runtime.BeamSearchParams) -> Found:
    """Search with beams in the engine."""
    output = engine.generate(prompt, params, progress=False)[0]
    return [(one.token_ids, float(one.score or 0.0)) for one in output.outputs]


def resubmitted(engine: Engine, prompt: list[int], params: runtime.BeamSearchParams) -> Found:
    """Search from outside: every beam of every step is a request of its own, for one token."""
    search = BeamSearch(params, frozenset(), params.max_tokens)
    one_token = runtime.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    logits: list[Tensor] = []
    run = engine.runner.executor.run

    def recorded(inputs: Any) -> Any:
        outputs = run(inputs)
        logits.append(outputs.logits)
        return outputs

    engine.runner.executor.run = recorded  # type: ignore[method-assign]
    try:
        beams: list[list[int]] = [[]]
        while True:
            engine.generate([prompt + beam for beam in beams], one_token, progress=False)
            if len(logits) != 1:
                raise ValueError(f"{len(beams)} re-submitted beams did not run in one step: raise --budget")
            logprobs, ids = logits.pop().float().log_softmax(-1).topk(search.num_candidates)
            offers = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
            chosen = search.advance(beams, offers)
            if not chosen:
                return [(ended.token_ids, ended.score) for ended in search.hypotheses]
            beams = [[*beams[one.parent], one.token] for one in chosen]
    finally:
        engine.runner.executor.run = run  # type: ignore[method-assign]


def hugging_face(model: Any, prompt: list[int], params: runtime.BeamSearchParams) -> Found:
    """Search with transformers' generate and its default cache."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return list(zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all three in alternation and return the results."""
    folder = resolve(args.model).folder
    engine = runtime.compile(folder, backend=args.backend, dtype=args.dtype, max_num_batched_tokens=args.budget)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.dtype).to(engine.device).eval()
    reference.generation_config.eos_token_id = None  # as ignore_eos: all have the same length
    generator = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(3, engine.vocab_size, (args.prompt_tokens,), generator=generator).tolist()
    params = runtime.BeamSearchParams(args.width, args.max_tokens, ignore_eos=True)
    ways = {
        "beams in the engine": lambda: in_engine(engine, prompt, params),
        "re-submitted prompts": lambda: resubmitted(engine, prompt, params),
        "hugging face": lambda: hugging_face(reference, prompt, params),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Found] = {}
    prompt_tokens: dict[str, int] = {}
    copies: dict[str, int] = {}
    for round_number in range(args.rounds + 1):
        for name, search in ways.items():
            engine.reset_prefix_cache()
            before, start = engine.stats(), time.perf_counter()
            found[name] = search()
            if round_number:  # the first is for warming up
                seconds[name].append(time.perf_counter() - start)
            after = engine.stats()
            prompt_tokens[name] = after.num_prompt_tokens - before.num_prompt_tokens
            copies[name] = after.num_blocks_copied - before.num_blocks_copied
    expected = found["hugging face"]
    rows = []
    for name in ways:
        pairs = list(zip(found[name], expected, strict=True))
        rows.append(
            {
                "way": name,
                "seconds": statistics.median(seconds[name]),
                "of_engine": statistics.median(
                    other / ours for other, ours in zip(seconds[name], seconds["beams in the engine"], strict=True)
                ),
                "prompt_tokens": prompt_tokens[name] or None,
                "block_copies": copies[name] if prompt_tokens[name] else None,
                "equal_sequences": sum(ours[0] == theirs[0] for ours, theirs in pairs),
                "max_score_difference": max(abs(ours[1] - theirs[1]) for ours, theirs in pairs),
            }
        )
    return {
        "bench": "beam_search",
        "model": args.model,
        "backend": args.backend,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "width": args.width,
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "rows": rows,
    }


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder, hub id, or smollm2")
    parser.add_argument("--width", type=int, default=4, help="beams")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of all three, after one to warm up")
    parser.add_argument("--budget", type=int, default=4096, help="tokens a step: all beams, re-submitted, run in one")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompt")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="auto")
    result = measure(parser.parse_args())
    print(
        f"{result['model']}, {result['dtype']}, {result['threads']} threads: {result['width']} beams, "
        f"{result['prompt_tokens']} prompt tokens, {result['max_tokens']} new ones"
    )
    columns = ("seconds", "x engine", "prompt tokens", "block copies", "= HF", "score diff.")
    print(f"{'':<22}" + "".join(f"{name:>14}" for name in columns))
    for row in result["rows"]:
        print(
            f"{row['way']:<22}{row['seconds']:>14.2f}{row['of_engine']:>14.2f}{row['prompt_tokens'] or '-':>14}"
            f"{'-' if row['block_copies'] is None else row['block_copies']:>14}"
            f"{row['equal_sequences']:>14}{row['max_score_difference']:>14.1e}"
        )
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
