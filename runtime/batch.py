"""From a schedule to the inputs of the graph: plain numpy on the host side of the arena."""

from __future__ import annotations

import numpy as np

from graphs.inputs import InputArena, StepSizes
from models.step_inputs import StepInputs
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.schedule import Schedule, ScheduledRow

_MAX_FLOAT32, _MAX_INT32 = float(np.finfo(np.float32).max), np.iinfo(np.int32).max


def fill(arena: InputArena, schedule: Schedule, manager: KVCacheManager) -> StepInputs:
    """Write the step's inputs into the arena and return the device's tensors. Side effect: the arena's content.

    A step that samples nothing (chunks in mid-prompt only) still gets one row of logits, which nobody reads: the graph
    then has no empty tensor.
    """
    rows = schedule.rows
    assert rows, "an empty step has no inputs"
    sampled = [row for row in rows if row.samples]
    masked = [row.request.masked_token_ids() for row in sampled]
    sizes = StepSizes(
        tokens=schedule.num_tokens,
        sequences=len(rows),
        table_width=max(manager.num_blocks_for(row.start + row.num_tokens) for row in rows),
        rows=max(1, sum(row.num_draws for row in sampled)),
        masked=max([1, *map(len, masked)]),
    )
    host = arena.carve(sizes)
    _fill_tokens(host, rows, manager)
    _fill_sampling(host, sampled, masked)
    return arena.upload()


def _fill_tokens(host: StepInputs, rows: list[ScheduledRow], manager: KVCacheManager) -> None:
    """Tokens, positions, slots and block tables; and where each row that samples ends."""
    input_ids, positions, seq_lens = host.input_ids.numpy(), host.positions.numpy(), host.seq_lens.numpy()
    table = host.block_table.numpy()[0]  # one cache group
    table[:] = 0
    lengths = np.array([row.num_tokens for row in rows])
    ends = np.cumsum(lengths)
    for index, (row, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
        start, stop = row.start, row.start + row.num_tokens
        input_ids[end - row.num_tokens : end] = row.request.token_ids[start:stop]
        positions[end - row.num_tokens : end] = np.arange(start, stop)
        width = manager.num_blocks_for(stop)
        table[index, :width] = manager.block_ids(row.request)[:width]
        seq_lens[index] = stop
    host.prev_row.numpy()[:] = -1
    host.prev_tokens.numpy()[:] = 0
    owner = np.repeat(np.arange(len(rows)), lengths)
    block, offset = np.divmod(positions, manager.block_size)
    host.slot_mapping.numpy()[0] = table[owner, block].astype(np.int64) * manager.block_size + offset
    query_start_loc = host.query_start_loc.numpy()
    query_start_loc[0], query_start_loc[1:] = 0, ends
    draws = np.array([row.num_draws for row in rows])
    host.logits_indices.numpy()[:] = np.repeat(ends - 1, draws) if draws.any() else 0


def _fill_sampling(host: StepInputs, sampled: list[ScheduledRow], masked: list[tuple[int, ...]]) -> None:
    """One row of parameters per draw; a greedy one that nobody reads if there is none."""
    if not sampled:
        host.temperature.numpy()[:] = 0
    temperature, top_k, top_p, min_p = (
        tensor.numpy() for tensor in (host.temperature, host.top_k, host.top_p, host.min_p)
    )
    noise_key, noise_position = host.noise_key.numpy(), host.noise_position.numpy()
    masked_ids = host.masked_ids.numpy()
    masked_ids[:] = -1
    start = 0
    for row, ids in zip(sampled, masked, strict=True):
        request, params, draws = row.request, row.request.params, slice(start, start + row.num_draws)
        temperature[draws] = min(params.temperature, _MAX_FLOAT32)
        top_k[draws] = min(params.top_k, _MAX_INT32)
        top_p[draws] = params.top_p
        min_p[draws] = params.min_p
        noise_key[draws] = request.draw_keys()
        noise_position[draws] = request.num_tokens
        masked_ids[draws, : len(ids)] = ids
        start = draws.stop
