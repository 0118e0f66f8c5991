"""From a schedule to the inputs of the graph: plain numpy on the host side of the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphs.inputs import InputArena, StepSizes, fill_padding
from models.step_inputs import FIELDS, StepInputs
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request
from runtime.schedule import Schedule, ScheduledRow

_MAX_FLOAT32, _MAX_INT32 = float(np.finfo(np.float32).max), np.iinfo(np.int32).max


class InputFiller:
    """Fills the inputs of step after step into an arena, at the sizes that `padded` makes of a step's own.

    A decode step of the very requests of the step before differs in few fields, and only these are written: after a
    forward pass has streamed the weights through the machine's caches, every touch of Python's objects costs.
    """

    def __init__(
        self, arena: InputArena, manager: KVCacheManager, padded: Callable[[StepSizes], StepSizes] = lambda sizes: sizes
    ) -> None:
        self._arena, self._manager, self._padded = arena, manager, padded
        self._last: _Continuable | None = None

    def forget(self) -> None:
        """Continue nothing: the arena has been written by others."""
        self._last = None

    def fill(self, schedule: Schedule) -> StepInputs:
        """Write the step's inputs and return the device's tensors. Side effect: the arena's content.

        A step that samples nothing (chunks in mid-prompt only) still gets one row of logits, which nobody reads: the
        graph then has no empty tensor.
        """
        assert schedule.rows, "an empty step has no inputs"
        last, self._last = self._last, None  # nothing to continue, should this be interrupted
        self._last = last if last is not None and self._continues(schedule.rows, last) else self._write(schedule)
        return self._arena.upload()

    def _continues(self, rows: list[ScheduledRow], last: _Continuable) -> bool:
        """Advance the inputs of the last step by one token each, if that is what this one is."""
        if len(rows) != len(last.requests) or last.longest == last.capacity:
            return False
        for row, request, num_preemptions, start in zip(
            rows, last.requests, last.preemptions, last.starts, strict=True
        ):
            same = row.request is request and request.num_preemptions == num_preemptions
            if not same or row.start != start or row.num_tokens != 1 or row.num_draws != 1:
                return False
        if self._padded(last.own) != last.sizes:  # a graph that was not there yet
            return False
        size, block_ids = self._manager.block_size, self._manager.block_ids
        last.starts = [start + 1 for start in last.starts]
        last.longest += 1
        is_ahead = rows[0].previous_draw >= 0  # then all are
        if is_ahead or last.is_ahead:
            last.prev_row[:] = [row.previous_draw for row in rows]
            last.is_ahead = is_ahead
        if not is_ahead:
            last.input_ids[:] = [row.request.token_ids[row.start] for row in rows]
        last.positions += 1
        last.seq_lens += 1
        last.noise_position += 1
        # Of a table only the block that is written can be another one: a new one, or a copy on write.
        blocks = np.array([block_ids(row.request)[row.start // size] for row in rows], dtype=np.int64)
        column, offset = np.divmod(last.positions, size)
        last.block_table[last.lines, column] = blocks
        last.slot_mapping[:] = blocks * size + offset
        return True

    def _write(self, schedule: Schedule) -> _Continuable | None:
        """Write all fields; returns what the next step may continue from."""
        rows = schedule.rows
        lengths = np.array([row.num_tokens for row in rows])
        stops = np.array([row.start for row in rows]) + lengths
        sampled = [row for row in rows if row.num_draws]
        masked = [row.request.masked_token_ids(row.start + row.num_tokens) for row in sampled]
        own = StepSizes(
            tokens=schedule.num_tokens,
            sequences=len(rows),
            table_width=self._manager.num_blocks_for(int(stops.max())),
            rows=max(1, schedule.num_draws),
            masked=max(1, *map(len, masked)) if any(masked) else 1,
        )
        sizes = self._padded(own)
        host = self._arena.carve(sizes)
        if sizes.sequences > len(rows):
            fill_padding(host, len(rows))
        host = _first(host, own)
        _fill_tokens(host, rows, lengths, stops, self._manager)
        _fill_sampling(host, sampled, masked)
        # Beams change whole tables. Ids that are masked now need not be the next time; none now means none later.
        plain = not any(masked) and all(row.num_draws == 1 and row.request.lead.search is None for row in rows)
        if not plain or own.tokens != len(rows):
            return None
        return _Continuable(
            own=own,
            sizes=sizes,
            requests=[row.request for row in rows],
            preemptions=[row.request.num_preemptions for row in rows],
            starts=stops.tolist(),
            longest=int(stops.max()),
            capacity=sizes.table_width * self._manager.block_size,
            is_ahead=rows[0].previous_draw >= 0,
            lines=np.arange(len(rows)),
            input_ids=host.input_ids.numpy(),
            prev_row=host.prev_row.numpy(),
            positions=host.positions.numpy(),
            seq_lens=host.seq_lens.numpy(),
            noise_position=host.noise_position.numpy(),
            block_table=host.block_table.numpy()[0],
            slot_mapping=host.slot_mapping.numpy()[0],
        )


@dataclass
class _Continuable:
    """A decode step that was written, and the fields in the arena that change when each of its rows goes one token on.

    own, sizes: its sizes, and those it was padded to. starts: where each request goes on, longest the largest of them,
    and capacity the tokens that a line of its table has room for. is_ahead: whether its tokens were still being drawn.
    """

    own: StepSizes
    sizes: StepSizes
    requests: list[Request]
    preemptions: list[int]  # of each request so far: one that came back has other blocks
    starts: list[int]
    longest: int
    capacity: int
    is_ahead: bool
    lines: np.ndarray
    input_ids: np.ndarray
    prev_row: np.ndarray
    positions: np.ndarray
    seq_lens: np.ndarray
    noise_position: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray


def _token(row: ScheduledRow) -> int:
    """The one token of a row; 0 for one that is still being drawn, which the device takes from `previous_draw`."""
    return row.request.token_ids[row.start] if row.previous_draw < 0 else 0


def _first(host: StepInputs, own: StepSizes) -> StepInputs:
    """The part of padded inputs that a step of the sizes `own` fills. Tables and masked ids keep their columns."""
    counts = {"T": own.tokens, "B": own.sequences, "B+1": own.sequences + 1, "L": own.rows}
    fields = zip(StepInputs._fields, host, FIELDS.values(), strict=True)
    return StepInputs(
        *(
            tensor
            if name == "prev_tokens"
            else tensor[:, : counts[dims[1]]]
            if dims[0] == "G"
            else tensor[: counts[dims[0]]]
            for name, tensor, (_, dims) in fields
        )
    )


def _fill_tokens(
    host: StepInputs, rows: list[ScheduledRow], lengths: np.ndarray, stops: np.ndarray, manager: KVCacheManager
) -> None:
    """Tokens, positions, slots and block tables; and where each row that samples ends."""
    ends = np.cumsum(lengths)
    owner = np.repeat(np.arange(len(rows)), lengths)
    if len(rows) == len(owner):
        tokens = [_token(row) for row in rows]
    else:
        tokens = [token for row in rows for token in row.request.token_ids[row.start : row.start + row.num_tokens]]
    host.input_ids.numpy()[:] = tokens
    positions = np.arange(len(owner)) + (stops - ends)[owner]
    host.positions.numpy()[:] = positions
    host.seq_lens.numpy()[:] = stops
    query_start_loc = host.query_start_loc.numpy()
    query_start_loc[0], query_start_loc[1:] = 0, ends
    table = host.block_table.numpy()[0]  # one cache group
    table[:] = 0
    widths: list[int] = (-(-stops // manager.block_size)).tolist()
    for line, row, width in zip(table, rows, widths, strict=True):
        line[:width] = manager.block_ids(row.request)[:width]
    block, offset = np.divmod(positions, manager.block_size)
    host.slot_mapping.numpy()[0] = table[owner, block].astype(np.int64) * manager.block_size + offset
    host.prev_row.numpy()[:] = np.array([row.previous_draw for row in rows])[owner]
    draws = np.array([row.num_draws for row in rows])
    host.logits_indices.numpy()[:] = np.repeat(ends - 1, draws) if draws.any() else 0


def _fill_sampling(host: StepInputs, sampled: list[ScheduledRow], masked: list[tuple[int, ...]]) -> None:
    """One row of parameters per draw; a greedy one that nobody reads if there is none."""
    masked_ids = host.masked_ids.numpy()
    masked_ids[:] = -1
    if not sampled:
        host.temperature.numpy()[:] = 0
        return
    drawing = [row for row in sampled for _ in range(row.num_draws)]
    params = [row.request.params for row in drawing]
    host.temperature.numpy()[:] = [min(one.temperature, _MAX_FLOAT32) for one in params]
    host.top_k.numpy()[:] = [min(one.top_k, _MAX_INT32) for one in params]
    host.top_p.numpy()[:] = [one.top_p for one in params]
    host.min_p.numpy()[:] = [one.min_p for one in params]
    host.noise_key.numpy()[:] = [key for row in sampled for key in row.request.draw_keys()]
    host.noise_position.numpy()[:] = [row.start + row.num_tokens for row in drawing]
    start = 0
    for row, ids in zip(sampled, masked, strict=True):
        if ids:
            masked_ids[start : start + row.num_draws, : len(ids)] = ids
        start += row.num_draws
