"""The acceptance test: chunked prefill and decode, mixed with other requests, against Hugging Face eager.

A single prefill of a whole prompt would not show state that the paged cache misses: models are known that pass it and
differ as soon as the prompt is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from graphs.executor import EagerExecutor
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from models import skeleton
from models.adapted import adapt
from models.attention import use_attention
from models.step_inputs import StepInputs

TOLERANCE = 1e-4  # of the largest logit, in float32; a lost token or position gives 1e-2 and more
_BLOCK_SIZE, _VOCAB, _WINDOW, _INNER = 4, 512, 6, 64
# Tokens of each of three sequences in each step: whole and cut prompts, single tokens between, longer than a window.
_STEPS = ((7, 11, 0), (1, 1, 5), (9, 1, 3), (1, 0, 1), (1, 6, 8), (1, 1, 1), (0, 1, 1))


def tiny_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Shrink a config to the fewest layers that show every layer type, and to short windows, keeping heads and flags.

    Per-layer lists are cut with the layers; windows and chunks become shorter than the test's sequences.
    """
    tiny = copy.deepcopy(config.get_text_config())
    layers = tiny.num_hidden_layers
    types = list(getattr(tiny, "layer_types", None) or ["same"] * layers)
    kept = min(layers, max(2, 1 + max(types.index(kind) for kind in set(types))))
    for name, value in list(vars(tiny).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(tiny, name, value[:kept])
    tiny.num_hidden_layers, tiny.vocab_size = kept, min(_VOCAB, tiny.vocab_size)
    tiny.pad_token_id = tiny.bos_token_id = tiny.eos_token_id = None
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(tiny, name, None):
            setattr(tiny, name, _WINDOW)
    for name in ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"):
        if getattr(tiny, name, None):
            setattr(tiny, name, min(_INNER, getattr(tiny, name)))
    return tiny


def acceptance_error(config: PretrainedConfig, device: torch.device) -> float:
    """Run the acceptance test on a small random model of `config` and return the largest error of any sampled logit,
    relative to the largest logit. Below TOLERANCE the architecture passes.

    Raises UnsupportedModelError if the architecture is refused anyway.
    """
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(tiny_copy(config), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)  # biases, sinks and norms that begin at 0 or 1 too
        lengths = [sum(step[row] for step in _STEPS) for row in range(3)]
        sequences = [torch.randint(model.config.vocab_size, (length,)) for length in lengths]
    finally:
        torch.random.set_rng_state(torch_state)
    expected = _whole(model, sequences)
    scale = max(float(logits.abs().max()) for logits in expected)
    found = _chunked(model, sequences, device)
    return max(float((logits - expected[row][at]).abs().max()) for row, at, logits in found) / scale


@torch.no_grad()
def _whole(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """Logits [length, V] of each sequence alone, by Hugging Face's eager attention."""
    reference = skeleton.share(model)
    use_attention(reference, "eager", experts="eager")
    return [reference(input_ids=sequence[None]).logits[0] for sequence in sequences]


def _chunked(
    model: PreTrainedModel, sequences: list[Tensor], device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Run the steps over a paged cache; yields (sequence, position, logits [V]) of every row that a step samples."""
    adaptation = adapt(skeleton.share(model), device)
    adaptation.materialise(device, own=True)
    adaptation.copy_from(model.state_dict())
    width = max(len(sequence) for sequence in sequences) // _BLOCK_SIZE + 1
    tables = 1 + torch.randperm(len(sequences) * width, generator=torch.Generator().manual_seed(0)).view(-1, width)
    cache = KVCache(
        adaptation.module.plan,
        tables.numel() + 1,
        _BLOCK_SIZE,
        torch.float32,
        device,
        adaptation.report.providers["copy_blocks"],
    )
    executor, arena, done = EagerExecutor(adaptation.module, cache), InputArena(device), [0] * len(sequences)
    for step in _STEPS:
        rows = [row for row, count in enumerate(step) if count]
        chunks = [(row, done[row], done[row] + step[row]) for row in rows]
        logits = executor.run(_inputs(arena, sequences, tables, chunks)).logits.cpu()
        for (row, _, end), row_logits in zip(chunks, logits, strict=True):
            done[row] = end
            yield row, end - 1, row_logits


def _inputs(
    arena: InputArena, sequences: list[Tensor], tables: Tensor, chunks: list[tuple[int, int, int]]
) -> StepInputs:
    """Inputs of one step that runs tokens [start, end) of each (row, start, end) and samples its last one, greedily."""
    tokens = sum(end - start for _, start, end in chunks)
    sizes = StepSizes(tokens=tokens, sequences=len(chunks), table_width=tables.shape[1], rows=len(chunks))
    host = arena.carve(sizes)
    for tensor in host:
        tensor.zero_()
    host.prev_row.fill_(-1)
    host.masked_ids.fill_(-1)
    at = 0
    for index, (row, start, end) in enumerate(chunks):
        span, positions = slice(at, at + end - start), torch.arange(start, end)
        host.input_ids[span], host.positions[span] = sequences[row][start:end], positions
        host.slot_mapping[0, span] = tables[row][positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        host.block_table[0, index], host.seq_lens[index] = tables[row], end
        at = span.stop
        host.query_start_loc[index + 1], host.logits_indices[index] = at, at - 1
    return arena.upload()
