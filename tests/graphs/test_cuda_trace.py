"""The graph of every family for a GPU, traced without one: whole, on the GPU all through, and made of Triton ops.

What the kernels compute is not seen here, nor whether inductor can compile the rest.
"""

from collections.abc import Callable
from typing import Any

import pytest

from models.step_inputs import FIELDS

GATED = ["rope_write_kv", "paged_attention", "add_rms_norm", "silu_and_mul", "add_rms_norm"]
SANDWICHED = [
    "rope_write_kv",
    "paged_attention",
    "rms_norm",
    "add_rms_norm",
    "gelu_and_mul",
    "rms_norm",
    "add_rms_norm",
]
NORMED_HEADS = ["rms_norm", "rms_norm"]  # of queries and keys
# Ops of ours in a layer. Before the first there is one more norm, but for gpt2, whose norms are no RMS norms.
LAYERS = {
    "llama": GATED,
    "qwen3": [*NORMED_HEADS, *GATED],
    "mistral": GATED,
    "gemma2": SANDWICHED,
    "gemma3_text": [*NORMED_HEADS, *SANDWICHED],
    "gpt2": ["write_kv", "paged_attention"],
    "mixtral": GATED,
    # Its rope is written in a way of its own, its activation is clamped.
    "gpt_oss": ["write_kv", "paged_attention", "add_rms_norm", "add_rms_norm"],
}


@pytest.fixture
def trace(traced: Callable[[str, str], dict[str, Any]], family: str) -> dict[str, Any]:
    """Of every family in turn."""
    return traced("cuda", family)


def test_one_graph_without_breaks(trace: dict[str, Any]) -> None:
    assert (trace["graphs"], trace["breaks"]) == (1, {})


def test_every_dynamic_size_is_one_symbol(trace: dict[str, Any]) -> None:
    names = {dim for _, dims in FIELDS.values() for dim in dims} - {"G"}  # "B+1" has a symbol of its own
    assert trace["num_dynamic_sizes"] == len(names) + 1  # and the number of blocks


def test_each_layer_is_made_of_triton_ops(trace: dict[str, Any], family: str) -> None:
    ours = [call.removeprefix("pagegraph.") for call in trace["calls"] if call.startswith("pagegraph.")]
    first = [] if family == "gpt2" else ["rms_norm"]
    expected = [*first, *(trace["call_sites"] * LAYERS[family]), "sample"]
    assert ours == [f"{op}.triton" for op in expected]


def test_no_rule_is_skipped(trace: dict[str, Any]) -> None:
    assert trace["skipped"] == []


def test_every_tensor_is_on_the_gpu(trace: dict[str, Any]) -> None:
    assert trace["devices"] == ["cuda:0"]


def test_the_host_reads_nothing(trace: dict[str, Any]) -> None:
    assert trace["host_reads"] == []
