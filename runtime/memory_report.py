"""The ledger of an engine's memory: how many bytes each owner has, and which tokens lie in which blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.memory.block import KVCacheBlock
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request
from runtime.scheduler import Scheduler

_BAR, _MOST_ENTRIES, _MOST_REQUESTS = 64, 6, 40  # what a page shows


@dataclass(frozen=True)
class TableEntry:
    """One place of a block table: the request has `num_tokens` tokens there, of which `num_written` are in the cache.

    shared: other tables hold the block too. published: it is in the prefix cache.
    """

    block_id: int
    num_tokens: int
    num_written: int
    shared: bool
    published: bool


@dataclass(frozen=True)
class RequestMemory:
    """One live sequence and its block table in logical order: entry i is for tokens i * block_size and following.

    `status` is "waiting", "running", "preempted", or "swapped out" where the swap space keeps what was computed. Only a
    running one holds blocks; the table of another is empty.
    """

    request_id: str
    status: str
    num_tokens: int
    num_computed_tokens: int
    table: tuple[TableEntry, ...]


@dataclass(frozen=True)
class PoolMemory:
    """The blocks of the pool: num_blocks = num_used + num_free + 1, the null block.

    `cached_block_ids` are the free blocks that hold a reusable prefix; `copied_block_ids` the used ones that no table
    holds any more, but a copy that is still to read them. Slots of the blocks in tables are written, or reserved for a
    token that is known and not yet computed, or wasted: no token is there for them, which can only be at the end of a
    table. A block that several tables hold counts once, as the one with most tokens in it sees it. `num_saved` blocks
    more would be used if no table shared any.
    """

    nbytes: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    num_used: int
    num_free: int
    cached_block_ids: tuple[int, ...]
    copied_block_ids: tuple[int, ...]
    written_slots: int
    reserved_slots: int
    wasted_slots: int
    wasted_bytes: int
    num_saved: int
    saved_bytes: int


@dataclass(frozen=True)
class HitRate:
    """Tokens that were looked up in the prefix cache since the engine's start, and how many of them it had."""

    hits: int
    queries: int

    @property
    def rate(self) -> float | None:
        """The share found, in [0, 1]; None if nothing was looked up."""
        return self.hits / self.queries if self.queries else None

    def __str__(self) -> str:
        rate = self.rate
        return "no look-ups" if rate is None else f"{self.hits} of {self.queries} tokens ({rate:.0%})"


@dataclass(frozen=True)
class MemoryReport:
    """A snapshot. Printing it gives a page to read; `dataclasses.asdict` what JSON can hold.

    Bytes by owner: `weights` (parameters, each once), `activations` (an estimate: the most intermediate tensors that an
    uncompiled step of `max_num_batched_tokens` tokens and `max_num_seqs` sequences has at once, without what kernels
    allocate inside; None where there is no uncompiled model to run, as in an artifact, and then no total has them),
    `graphs` (what CUDA graphs hold), `pool.nbytes` (the KV cache). Apart from these `swap`: `num_swap_blocks` blocks of
    host memory for preempted requests, taken when the first one is swapped out.

    `resumed` are the look-ups of preempted requests, which find their own blocks again: they say nothing about sharing.
    """

    weights: int
    activations: int | None
    pool: PoolMemory
    requests: tuple[RequestMemory, ...]
    prefix_cache: HitRate
    resumed: HitRate
    max_num_batched_tokens: int
    max_num_seqs: int
    graphs: int = 0
    swap: int = 0
    num_swap_blocks: int = 0
    num_swap_blocks_used: int = 0

    def __str__(self) -> str:
        blocks = f"{self.pool.num_blocks} blocks of {self.pool.block_size} tokens, "
        step = f"estimate: a step of {self.max_num_batched_tokens} tokens, {self.max_num_seqs} sequences, uncompiled"
        unknown = "an artifact holds no model to estimate them with; not in the total"
        owners: list[tuple[str, int | None, str]] = [
            ("weights", self.weights, ""),
            ("activations", self.activations, unknown if self.activations is None else step),
            ("graphs", self.graphs, ""),
            ("pool", self.pool.nbytes, blocks + format_bytes(self.pool.bytes_per_block) + " each"),
        ]
        owners.append(("total", sum(nbytes or 0 for _, nbytes, _ in owners), ""))
        if self.swap:
            used = f"{self.num_swap_blocks_used} of {self.num_swap_blocks} blocks used"
            owners.append(("swap", self.swap, f"on the host, taken when first used: {used}"))
        lines = ["memory by owner"]
        lines += [f"  {name:<12}{format_bytes(nbytes):>11}  {note}".rstrip() for name, nbytes, note in owners]
        return "\n".join([*lines, "", *self._pool_lines(), "", *self._request_lines()]) + "\n"

    def _pool_lines(self) -> list[str]:
        pool = self.pool
        return [
            f"pool  [{_bar(pool)}]",
            f"  {pool.num_used} used (#), {pool.num_free} free, {len(pool.cached_block_ids)} of them with a reusable "
            "prefix (o), 1 null",
            f"  slots of used blocks: {pool.written_slots} written, {pool.reserved_slots} reserved, "
            f"{pool.wasted_slots} wasted ({format_bytes(pool.wasted_bytes)})",
            f"  sharing saves {pool.num_saved} blocks ({format_bytes(pool.saved_bytes)})",
            f"  prefix cache hits: {self.prefix_cache}; of resumed requests: {self.resumed}",
        ]

    def _request_lines(self) -> list[str]:
        if not self.requests:
            return ["no live requests"]
        shown = self.requests[:_MOST_REQUESTS]
        width = max(len(request.request_id) for request in shown)
        lines = ["block tables (+ published in the prefix cache, * shared with other tables)"]
        lines += [f"  {_request_line(request, self.pool.block_size, width)}" for request in shown]
        if more := len(self.requests) - len(shown):
            lines.append(f"  ... and {more} more")
        return lines


def take_report(
    scheduler: Scheduler,
    requests: Iterable[Request],
    *,
    weights: int,
    activations: int | None,
    bytes_per_block: int,
    graphs: int = 0,
) -> MemoryReport:
    """Look at the pool, and at the tables of `requests`: all live sequences, in the order to show them.

    weights, activations, graphs: bytes, as in the report. Changes nothing; takes time in proportion to the pool.
    """
    manager, admission = scheduler.manager, scheduler.admission
    tables, host_pool = manager.tables(), manager.host_pool
    live = [request for request in requests if not request.is_finished]
    holders = Counter(block for blocks in tables.values() for block in blocks)
    held = tuple(_request_memory(request, tables.get(request, ()), holders, manager) for request in live)
    return MemoryReport(
        weights=weights,
        activations=activations,
        pool=_pool_memory(manager, held, bytes_per_block),
        requests=held,
        prefix_cache=HitRate(admission.prefix_cache_hits, admission.prefix_cache_queries),
        resumed=HitRate(admission.resumed_cache_hits, admission.resumed_cache_queries),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        graphs=graphs,
        swap=host_pool.num_blocks * bytes_per_block,
        num_swap_blocks=host_pool.num_blocks,
        num_swap_blocks_used=host_pool.num_used_blocks,
    )


def _request_memory(
    request: Request, blocks: Sequence[KVCacheBlock], holders: Counter[KVCacheBlock], manager: KVCacheManager
) -> RequestMemory:
    block_size = manager.block_size

    def inside(num_tokens: int, index: int) -> int:
        """How many of the first `num_tokens` tokens fall into block `index`."""
        return min(max(num_tokens - index * block_size, 0), block_size)

    swapped = not blocks and manager.is_swapped(request)
    return RequestMemory(
        request_id=request.request_id,
        status="swapped out" if swapped else request.status.name.lower(),
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        table=tuple(
            TableEntry(
                block_id=block.block_id,
                num_tokens=inside(request.num_tokens, index),
                num_written=inside(request.num_computed_tokens, index),
                shared=holders[block] > 1,
                published=block.block_hash is not None,
            )
            for index, block in enumerate(blocks)
        ),
    )


def _pool_memory(manager: KVCacheManager, requests: Sequence[RequestMemory], bytes_per_block: int) -> PoolMemory:
    pool, block_size = manager.pool, manager.block_size
    entries = [entry for request in requests for entry in request.table]
    tokens: dict[int, int] = {}
    written: dict[int, int] = {}
    for entry in entries:
        tokens[entry.block_id] = max(entry.num_tokens, tokens.get(entry.block_id, 0))
        written[entry.block_id] = max(entry.num_written, written.get(entry.block_id, 0))
    num_tokens, num_written = sum(tokens.values()), sum(written.values())
    wasted, saved = len(tokens) * block_size - num_tokens, len(entries) - len(tokens)
    copied = [block.block_id for block in pool.blocks if block.ref_cnt and block.block_id not in tokens]
    return PoolMemory(
        nbytes=len(pool.blocks) * bytes_per_block,
        block_size=block_size,
        num_blocks=len(pool.blocks),
        bytes_per_block=bytes_per_block,
        num_used=pool.num_usable_blocks - pool.num_free_blocks,
        num_free=pool.num_free_blocks,
        cached_block_ids=tuple(block.block_id for block in pool.blocks if block.block_hash and not block.ref_cnt),
        copied_block_ids=tuple(copied),
        written_slots=num_written,
        reserved_slots=num_tokens - num_written,
        wasted_slots=wasted,
        wasted_bytes=wasted * bytes_per_block // block_size,
        num_saved=saved,
        saved_bytes=saved * bytes_per_block,
    )


def format_bytes(nbytes: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1; None is unknown."""
    if nbytes is None:
        return "unknown"
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _bar(pool: PoolMemory) -> str:
    """Used and reusable blocks in proportion, each at least one character if there is any."""
    usable = pool.num_used + pool.num_free

    def length(count: int) -> int:
        return max(count > 0, count * _BAR // usable)

    used, cached = length(pool.num_used), length(len(pool.cached_block_ids))
    return f"{'#' * used + 'o' * cached:.<{_BAR}}"[:_BAR]


def _request_line(request: RequestMemory, block_size: int, width: int) -> str:
    start = f"{request.request_id:<{width}}  {request.status}  {request.num_tokens} tokens"
    table = request.table
    if not table:
        return f"{start}  no blocks"
    ids = [f"{entry.block_id}{'+' * entry.published}{'*' * entry.shared}" for entry in table]
    fills = [f"{entry.num_written}/{block_size}" for entry in table]
    return f"{start}  logical 0..{len(table) - 1} -> physical {_abbreviated(ids)}  fill {_abbreviated(fills)}"


def _abbreviated(words: Sequence[str]) -> str:
    """All words, or the first and last few of very many."""
    half = _MOST_ENTRIES // 2
    kept = words if len(words) <= _MOST_ENTRIES else [*words[:half], "...", *words[-half:]]
    return " ".join(kept)
