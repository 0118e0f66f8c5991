"""What each process of `bench.cold_start` does: start, answer a prompt with one token, and print where the time went.

python -m bench.cold_start_child TASK

TASK is JSON: what (see `TASKS`), spawned (time.time() of whoever started this process), model (a folder), artifact
(a folder), knobs (of runtime.compile), prompt (text, or token ids for a model without tokenizer). The last line of
stdout is JSON. Nothing is imported before it is needed: imports are a part of what is measured.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Task = dict[str, Any]


class Phases:
    """Seconds by phase, one after the other, from when the process was spawned."""

    def __init__(self, spawned: float) -> None:
        self.seconds = {"start": time.time() - spawned}  # of the interpreter
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """What was done since the phase before belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def compile(task: Task, phases: Phases) -> list[int]:
    """Compile the model, or take its graph from the compile cache."""
    import runtime.engine

    phases.end("imports")
    return _first_token(runtime.compile(task["model"], progress=False, **task["knobs"]), task, phases)


def load(task: Task, phases: Phases) -> list[int]:
    """Load the artifact."""
    import runtime.engine

    phases.end("imports")
    return _first_token(runtime.load(task["artifact"], progress=False), task, phases)


def export(task: Task, phases: Phases) -> list[int]:
    """Compile the model and make the artifact."""
    import runtime

    with runtime.compile(task["model"], progress=False, **task["knobs"]) as engine:
        engine.export(task["artifact"])
    return []


def hugging_face(task: Task, phases: Phases) -> list[int]:
    """Hugging Face, uncompiled; of task["knobs"] it takes the dtype and the device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    phases.end("imports")
    device = task["knobs"].get("device", "auto")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=task["knobs"].get("dtype", "auto")).to(device)
    prompt = task["prompt"]
    token_ids = AutoTokenizer.from_pretrained(task["model"]).encode(prompt) if isinstance(prompt, str) else prompt
    phases.end("load")
    ids = torch.tensor([token_ids], device=device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    tokens = out[0, len(token_ids) :].tolist()
    phases.end("first step")
    return tokens


TASKS: dict[str, Callable[[Task, Phases], list[int]]] = {
    "compile": compile,
    "load": load,
    "export": export,
    "hugging face": hugging_face,
}


def _first_token(engine: Any, task: Task, phases: Phases) -> list[int]:
    """Run the prompt until the first token, and close the engine. Its own phases are taken out of the time so far."""
    import runtime

    phases.end("other")  # tokenizer and pool, say
    for name in ("fetch", "load", "compile", "capture"):
        phases.seconds[name] = getattr(engine.seconds, name)
        phases.seconds["other"] -= phases.seconds[name]
    with engine:
        engine.add_request(task["prompt"], runtime.SamplingParams(max_tokens=1, temperature=0))
        outputs: list[Any] = []
        while not outputs:
            outputs = engine.step()
        tokens = outputs[0].outputs[0].token_ids
        phases.end("first step")
    return tokens


def counters() -> dict[str, Any]:
    """What was done that an artifact makes needless: Dynamo's and inductor's counters, and what was imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counts = {} if utils is None else {name: dict(group) for name, group in utils.counters.items() if group}
    return {
        "graphs": counts.get("stats", {}).get("unique_graphs", 0),
        "torch": counts,
        "num_modules": len(sys.modules),
        "compiler_imported": sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()),
        "modelling_imported": sorted(
            name for name in sys.modules if name.startswith("transformers.") and ".modeling_" in name
        ),
    }


def main(task: Task) -> None:
    """Do the task and print the phases, the counters, and the tokens."""
    phases = Phases(task["spawned"])
    tokens = TASKS[task["what"]](task, phases)
    print(json.dumps({"phases": phases.seconds, "counters": counters(), "tokens": tokens}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
