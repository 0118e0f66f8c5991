"""The main job on the real default model (fetched from PyPI once)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import runtime
from models import default_model

pytestmark = pytest.mark.smollm2

PREFIX = "You are a careful assistant. Answer in one short paragraph.\n\n"
PROMPTS = [
    "The capital of France is",
    PREFIX + "Why is the sky blue?",
    PREFIX + "What does a compiler do?",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "Water boils at",
    "In 1969, the first human",
]
TOKENS = 64


def test_float32_greedy_equals_hugging_face_eager() -> None:
    folder = default_model.fetch(progress=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = runtime.compile(folder, backend="eager", dtype="float32", num_blocks=200, progress=False)
        greedy = runtime.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        first = engine.generate(PROMPTS[1], greedy, progress=False)[0]  # its blocks are the prefix cache's from now on
        outputs = engine.generate(PROMPTS, greedy, progress=False)
        assert outputs[1].num_cached_tokens > 0
        assert first.outputs[0].token_ids == outputs[1].outputs[0].token_ids
        engine.check_integrity()
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        reference.generation_config.eos_token_id = None
        for output in outputs:
            ids = torch.tensor([output.prompt_token_ids])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
            )[0, ids.shape[1] :]
            assert output.outputs[0].token_ids == expected.tolist(), output.prompt
    finally:
        torch.set_num_threads(threads)
