"""The engine over the captured graph: every family traced in one piece, one family through the real compiler."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx
from transformers import PreTrainedModel

import runtime
from runtime import SamplingParams
from runtime.engine import Engine

GREEDY = SamplingParams(max_tokens=10, temperature=0)
PROMPTS = [[(7 * i + 3) % 250 for i in range(length)] for length in (13, 1, 21)]


def serve(engine: Engine, model: PreTrainedModel, hf_greedy: Callable[..., list[int]]) -> None:
    """Whole, cut and mixed prompts, then one alone: batch sizes 3 to 1, one token and many."""
    outputs = engine.generate(PROMPTS, GREEDY, progress=False)
    outputs += engine.generate(PROMPTS[0], GREEDY, progress=False)
    for output in outputs:
        assert output.outputs[0].token_ids == hf_greedy(model, output.prompt_token_ids, 10)
    assert outputs[3].num_cached_tokens == 12
    engine.check_integrity()


def knobs(**more: object) -> dict:
    return {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 9, "progress": False, **more}


def test_every_family_is_one_graph(
    family: str,
    tiny_model: Callable[..., PreTrainedModel],
    hf_greedy: Callable[..., list[int]],
    uncompiled: list[fx.GraphModule],
) -> None:
    """Traced for the compiler and run as traced: no break, one graph for all sizes, the tokens of Hugging Face."""
    model = tiny_model(family)
    with runtime.compile(model, **knobs()) as engine:
        serve(engine, model, hf_greedy)
        assert len(uncompiled) == 1  # three layers are too few to be cut
        assert engine.stats().num_recompiles == 0
        sites = len(engine.report.plan.sites)
    ops = [node.target for node in uncompiled[0].graph.nodes if node.op == "call_function"]
    assert ops.count(torch.ops.pagegraph.paged_attention.cpu) == sites
    rotated = 0 if family in ("gpt2", "gpt_oss") else sites  # no rope; a rope written in another way
    assert ops.count(torch.ops.pagegraph.rope_write_kv.cpu) == rotated
    assert ops.count(torch.ops.pagegraph.write_kv.cpu) == sites - rotated
    assert ops.count(torch.ops.pagegraph.sample.reference) == 1


@pytest.mark.compile
def test_the_default_backend_from_end_to_end(
    tiny_model: Callable[..., PreTrainedModel], hf_greedy: Callable[..., list[int]]
) -> None:
    model = tiny_model("gemma2")
    with runtime.compile(model, **knobs()) as engine:
        assert engine.seconds.compile > 0
        serve(engine, model, hf_greedy)
        forked = engine.generate(PROMPTS[0], SamplingParams(n=3, seed=1, max_tokens=5), progress=False)[0]
        assert len(forked.outputs) == 3
        assert engine.stats().num_recompiles == 0


@pytest.mark.usefixtures("uncompiled")
def test_new_weights_reach_the_compiled_graph(
    tiny_model: Callable[..., PreTrainedModel], hf_greedy: Callable[..., list[int]]
) -> None:
    """A module in memory keeps its own weights, so the engine's become other tensors."""
    model, other = tiny_model("llama"), copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    with runtime.compile(model, **knobs()) as engine:
        serve(engine, model, hf_greedy)
        engine.load_weights(other.state_dict())
        for prompt in PROMPTS:
            expected = other.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
            assert engine.generate(prompt, GREEDY, progress=False)[0].outputs[0].token_ids == expected.tolist()
        assert expected.tolist() != hf_greedy(model, PROMPTS[-1], 10)
