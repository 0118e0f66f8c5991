"""Requests' block tables: which physical blocks hold which request's tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.memory.block import KVCacheBlock
from runtime.memory.block_pool import BlockPool
from runtime.memory.hashing import BlockContent, extend_block_hashes
from runtime.memory.host_pool import HostBlock, HostBlockPool
from runtime.request import Request


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one request in logical order; at least the first `num_published` are in the prefix cache."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    block_ids: array[int] = field(default_factory=lambda: array("i"))  # numpy reads it without a loop
    num_published: int = 0

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)

    def replace(self, index: int, block: KVCacheBlock) -> None:
        self.blocks[index], self.block_ids[index] = block, block.block_id


@dataclass(slots=True, frozen=True)
class _SwappedTable:
    """The host blocks of one request in logical order, and how many tokens they hold."""

    blocks: list[HostBlock]
    num_tokens: int


class KVCacheManager:
    """Owns every request's block table over one `BlockPool` of `num_blocks` blocks of `block_size` tokens.

    Tables may share blocks. A block may be written only if one table holds it and it is not published; else the writer
    gets a new block in its place and the tokens already there are to be copied: *copy on write*.

    A request's blocks may be swapped out to `num_swap_blocks` blocks of host memory; `get_computed_blocks` then offers
    them as if they were cached.

    What is to be moved before the next forward is pending, in this order: `pending_swap_outs`, `pending_swap_ins`,
    `pending_copies`. It is pending until `finish_transfers`; a copy's source and a host block are held as long.

    Raises ValueError for a block size below 1 or a pool without a usable block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_swap_blocks: int = 0
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not supported: a block holds at least 1 token")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.host_pool = HostBlockPool(num_swap_blocks)
        self._tables: dict[Request, _BlockTable] = {}
        self._swapped: dict[Request, _SwappedTable] = {}
        self.num_swapped_out = self.num_swapped_in = self.num_copied = 0  # blocks that were moved so far
        self._swap_outs: list[tuple[KVCacheBlock, HostBlock]] = []
        self._swap_ins: list[tuple[HostBlock, KVCacheBlock]] = []
        self._copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        self._holds: Counter[int] = Counter()  # block id -> copies that are still to read it

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks one request could hold if it were alone."""
        return self.pool.num_usable_blocks

    @property
    def usage(self) -> float:
        """The share of usable blocks that are held, in [0, 1]."""
        return self.pool.usage

    @property
    def pending_swap_outs(self) -> list[tuple[int, int]]:
        """(device block, host block) ids to copy before anything else is written."""
        return [(block.block_id, host.block_id) for block, host in self._swap_outs]

    @property
    def pending_swap_ins(self) -> list[tuple[int, int]]:
        """(host block, device block) ids to copy next."""
        return [(host.block_id, block.block_id) for host, block in self._swap_ins]

    @property
    def pending_copies(self) -> list[tuple[int, int]]:
        """(source, destination) block ids to copy before the next forward; no block is both, none destination twice."""
        return [(source.block_id, target.block_id) for source, target in self._copies]

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def num_worst_case_blocks(self, request: Request) -> int:
        """Blocks that a request can come to hold: its prompt's full blocks once, all else for each of its sequences."""
        shared = request.num_prompt_tokens // self.block_size
        longest = (
            request.num_prompt_tokens + request.max_output_tokens - 1
        )  # the last token's K and V are never written
        return shared + request.num_slots * (self.num_blocks_for(longest) - shared)

    def tables(self) -> Mapping[Request, Sequence[KVCacheBlock]]:
        """The blocks of every request that holds some, in logical order."""
        return {request: table.blocks for request, table in self._tables.items()}

    def is_swapped(self, request: Request) -> bool:
        """Whether the swap space holds a request's tokens, and no device block does."""
        return request in self._swapped and request not in self._tables

    def get_computed_blocks(
        self, request: Request, num_tokens: int | None = None
    ) -> tuple[Sequence[KVCacheBlock | HostBlock], int]:
        """What of the first `num_tokens` tokens (None: all) need not be computed, as (blocks, tokens): the longest
        cached prefix, then what was swapped out of the request. Takes no reference.

        The last block may be usable in part only: then `tokens` ends inside it, and writing on means copying it. At
        least one token is left to compute, since the next token's logits come from a forward, not from the cache.
        """
        hits, num_hits = self._cached_prefix(request, request.num_tokens if num_tokens is None else num_tokens)
        swapped = self._swapped.get(request)
        if swapped is None or swapped.num_tokens < num_hits:
            return hits, num_hits
        # At a tie too: a hit inside a block would have to be copied, and what beams share be shared no more.
        # What another table loads in this very step is shared, not loaded again.
        loading = dict(self._swap_ins)
        whole = num_hits // self.block_size
        return [*hits[:whole], *(loading.get(host, host) for host in swapped.blocks[whole:])], swapped.num_tokens

    def _cached_prefix(self, request: Request, num_tokens: int) -> tuple[list[KVCacheBlock], int]:
        hits: list[KVCacheBlock] = []
        if not self.enable_prefix_caching:
            return hits, 0
        self._extend_hashes(request)
        for block_hash in request.block_hashes[: (num_tokens - 1) // self.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        num_hits = len(hits) * self.block_size
        rest = request.token_ids[num_hits : min(num_hits + self.block_size, num_tokens - 1)]
        parent = request.block_hashes[len(hits) - 1] if hits else None
        partial, run = self.pool.longest_run(parent, request.extra_keys, rest)
        return (hits, num_hits) if partial is None else ([*hits, partial], num_hits + run)

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: Sequence[KVCacheBlock | HostBlock] = (),
        num_computed_tokens: int | None = None,
    ) -> list[KVCacheBlock] | None:
        """Make the table of `request` cover its first `num_tokens` tokens, all from the first one that is not computed
        on writable; returns the newly taken blocks, those to be loaded from the host first, then private copies.

        `computed_blocks` and `num_computed_tokens`, from `get_computed_blocks`, begin a table that does not exist yet.
        All or nothing: None means that too few blocks are free and that nothing changed.
        """
        table = self._tables.get(request)
        if table is None:
            return self._begin_table(request, num_tokens, computed_blocks, num_computed_tokens or 0)
        assert not computed_blocks, "prefix hits can only begin a table"
        start = request.num_computed_tokens
        first, held = start // self.block_size, len(table.blocks)
        num_new = max(0, -(-num_tokens // self.block_size) - held)
        shared = [i for i in range(first, held) if not self._writable(table.blocks[i])]
        if len(shared) + num_new > self.pool.num_free_blocks:
            return None
        return self._extend_table(request, table, start, shared, num_new)

    def _begin_table(
        self, request: Request, num_tokens: int, computed: Sequence[KVCacheBlock | HostBlock], start: int
    ) -> list[KVCacheBlock] | None:
        loads = [block for block in computed if isinstance(block, HostBlock)]
        hits = [block for block in computed if isinstance(block, KVCacheBlock)]
        shared = [i for i in range(start // self.block_size, len(computed)) if isinstance(computed[i], KVCacheBlock)]
        num_new = max(0, self.num_blocks_for(num_tokens) - len(computed))
        num_revived = sum(block.ref_cnt == 0 for block in hits)
        if len(loads) + len(shared) + num_new + num_revived > self.pool.num_free_blocks:
            return None
        # Before anything is taken: a hit in the free list could otherwise be handed out as a new block.
        self.pool.touch(hits)
        if any(block.content is None for block in hits):  # being loaded: no longer its first owner's alone
            for other in self._swapped:
                other.num_writable_tokens = 0
        loaded = self.pool.get_new_blocks(len(loads))
        self._swap_ins += zip(loads, loaded, strict=True)
        self.host_pool.touch(loads)  # until they are loaded, whatever becomes of the request
        table, fresh = self._tables.setdefault(request, _BlockTable()), iter(loaded)
        table.extend([block if isinstance(block, KVCacheBlock) else next(fresh) for block in computed])
        full = table.blocks[: start // self.block_size]
        table.num_published = next((i for i, block in enumerate(full) if block.content is None), len(full))
        return loaded + self._extend_table(request, table, start, shared, num_new)

    def _extend_table(
        self, request: Request, table: _BlockTable, start: int, shared: list[int], num_new: int
    ) -> list[KVCacheBlock]:
        """Private blocks in the places `shared`, copied where tokens before `start` are in them, and new ones."""
        new_blocks = self.pool.get_new_blocks(len(shared) + num_new)
        for index, block in zip(shared, new_blocks, strict=False):
            self._replace(table, index, block, copy=index * self.block_size < start)
        table.extend(new_blocks[len(shared) :])
        request.num_writable_tokens = len(table.blocks) * self.block_size
        return new_blocks

    def fork(self, parent: Request, child: Request, num_tokens: int | None = None) -> None:
        """Give `child` a table that shares every block of `parent` that holds its first `num_tokens` tokens (None: all
        computed ones), the tail included; of a parent that is swapped out, the host's blocks."""
        assert child not in self._tables, f"{child.request_id!r} has a table already"
        if self.is_swapped(parent):
            self._swapped[child] = self._swapped[parent]
            self.host_pool.touch(self._swapped[parent].blocks)
            return
        table = self._tables[parent]
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        count, full = self.num_blocks_for(num_tokens), num_tokens // self.block_size
        self._tables[child] = _BlockTable(table.blocks[:count], table.block_ids[:count], min(table.num_published, full))
        self.pool.touch(table.blocks[:count])
        parent.num_writable_tokens = 0

    def swap_out(self, requests: Sequence[Request]) -> bool:
        """Move the computed tokens of requests to the swap space and free their blocks.

        All or nothing: False means that there was too little room, or nothing computed, and that nothing changed.
        """
        for request in [request for request in requests if request in self._swapped]:
            self.retract(request)  # its step was interrupted before it was swapped in: the host still has all
        requests = [request for request in requests if request not in self._swapped]
        distinct = self._distinct_blocks(requests)
        missing = [(block, filled) for block, filled in distinct.items() if self.host_pool.find(block, filled) is None]
        if (requests and not distinct) or len(missing) > self.host_pool.num_free_blocks:
            return False
        for block, filled in missing:
            # What was still to be copied there is read from where it comes: swapping out is first.
            source = next((source for source, target in self._copies if target is block), block)
            self._swap_outs.append((source, self.host_pool.take(block, filled)))
        for request in requests:
            copies = [self.host_pool.find(block, filled) for block, filled in self._filled_blocks(request)]
            blocks = [copy for copy in copies if copy is not None]
            assert len(blocks) == len(copies)
            self.host_pool.touch(blocks)
            self._swapped[request] = _SwappedTable(blocks, request.num_computed_tokens)
            self.retract(request)
        return True

    def swap_cost(self, requests: Sequence[Request]) -> tuple[int, int, int]:
        """What giving up the blocks of requests costs: (blocks to copy out, blocks to copy back in, tokens to compute
        otherwise).

        Blocks with a copy on the host need not go out. Those that are published and held by others too are expected to
        be found again either way. Shared ones count once.
        """
        distinct = self._distinct_blocks(requests)
        holders = Counter(block for request in requests for block in self._tables[request].blocks)
        lost = {block: n for block, n in distinct.items() if block.content is None or block.ref_cnt == holders[block]}
        num_out = sum(self.host_pool.find(block, filled) is None for block, filled in distinct.items())
        return num_out, len(lost), sum(lost.values())

    def _distinct_blocks(self, requests: Sequence[Request]) -> dict[KVCacheBlock, int]:
        """The blocks that hold computed tokens of requests, and the most that any of them has there."""
        distinct: dict[KVCacheBlock, int] = {}
        for request in requests:
            for block, filled in self._filled_blocks(request):
                distinct[block] = max(filled, distinct.get(block, 0))
        return distinct

    def _filled_blocks(self, request: Request) -> Iterable[tuple[KVCacheBlock, int]]:
        """The blocks of a table that hold computed tokens, and how many."""
        size, num_tokens = self.block_size, request.num_computed_tokens
        return [
            (block, min(size, num_tokens - index * size))
            for index, block in enumerate(self._tables[request].blocks[: self.num_blocks_for(num_tokens)])
        ]

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Offer the full blocks among the first `num_computed_tokens` tokens to other requests.

        Only for tokens whose forward was launched: until then the block holds someone else's keys and values.
        """
        table = self._tables[request]
        start, end = table.num_published, num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or end <= start:
            return
        self._extend_hashes(request)
        for index, block in enumerate(table.blocks[start:end], start):
            if block.content is None:  # else it was loaded for several tables, and published with another one of them
                self.pool.cache_full_block(block, self._content(request, index))
        table.num_published = end

    def free(self, request: Request) -> None:
        """Give back all blocks of `request`, on the host too. It has none: no effect."""
        self.retract(request)
        self._discard_swapped(request)

    def retract(self, request: Request) -> None:
        """Give back the blocks that `request` holds on the device, the tail first so that prefixes live longest."""
        table = self._tables.pop(request, None)
        request.num_writable_tokens = 0
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))
            self._drop_loads([load for load in self._swap_ins if load[1].ref_cnt == 0])
            self._drop_copies([copy for copy in self._copies if copy[1].ref_cnt == 0])

    def finish_swap_outs(self) -> None:
        """What was pending to be swapped out has been."""
        self.num_swapped_out += len(self._swap_outs)
        self._swap_outs.clear()

    def finish_swap_ins(self) -> None:
        """What was pending to be swapped in has been: let go of the host blocks."""
        self.num_swapped_in += len(self._swap_ins)
        self._drop_loads(list(self._swap_ins))
        for request in [request for request in self._swapped if request in self._tables]:
            self._discard_swapped(request)

    def finish_copies(self) -> None:
        """The pending copies have been run: let go of their sources."""
        self.num_copied += len(self._copies)
        self._drop_copies(list(self._copies))

    def finish_transfers(self) -> None:
        """All that was pending has been run."""
        if self._swap_outs:
            self.finish_swap_outs()
        if self._swap_ins or self._swapped:
            self.finish_swap_ins()
        if self._copies:
            self.finish_copies()

    def abandon_transfers(self) -> None:
        """The step failed. What it did not move is moved before the next one, but for what it was swapping out: that is
        forgotten, and computed again, since the swap space itself may be what fails."""
        lost = {host for _, host in self._swap_outs}
        for request in [request for request, swapped in self._swapped.items() if lost & set(swapped.blocks)]:
            self._discard_swapped(request)

    def forget_swapped(self) -> None:
        """Drop all that is swapped out; those requests are computed again."""
        for request in list(self._swapped):
            self._discard_swapped(request)

    def block_ids(self, request: Request) -> array[int]:
        """The live table of a request as physical block ids (C ints), not to be changed by the caller."""
        return self._tables[request].block_ids

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and no change, while any request holds a block."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check all tables, counts, the free queue, the map and the swap space; AssertionError prints the arithmetic.

        O(pool); changes nothing.
        """
        for request, table in self._tables.items():
            actual, ids = [block.block_id for block in table.blocks], table.block_ids.tolist()
            assert actual == ids, f"{request.request_id!r}: blocks {actual} != ids {ids}"
            hashed = [block.block_hash for block in table.blocks[: table.num_published]]
            known = [*request.block_hashes[: len(hashed)], *hashed[len(request.block_hashes) :]]
            intact = None not in hashed and hashed == known
            assert intact, f"{request.request_id!r}: {table.num_published} published, but hashed {hashed}"
            first, end = (n // self.block_size for n in (request.num_computed_tokens, request.num_writable_tokens))
            unwritten = [block for block in table.blocks[first:end] if block.content is None]
            assert all(map(self._writable, unwritten)), f"{request.request_id!r} may not write all of {unwritten}"
        sources, targets = {source for source, _ in self.pending_copies}, [target for _, target in self.pending_copies]
        assert len(set(targets)) == len(targets), f"destination twice in {self.pending_copies}"
        assert not sources & set(targets), f"source and destination in {self.pending_copies}"
        stored = [target for _, target in self.pending_swap_outs]
        assert len(set(stored)) == len(stored), f"destination twice in {self.pending_swap_outs}"
        loaded = [target for _, target in self.pending_swap_ins]
        assert len(set(loaded)) == len(loaded), f"destination twice in {self.pending_swap_ins}"
        assert not set(loaded) & set(targets), f"loaded and copied to: {loaded}, {targets}"
        references = Counter(i for table in self._tables.values() for i in table.block_ids)
        self.pool.check_integrity(references + self._holds)
        held = Counter(host for swapped in self._swapped.values() for host in swapped.blocks)
        self.host_pool.check_integrity(held + Counter(host for host, _ in self._swap_ins))

    def _writable(self, block: KVCacheBlock) -> bool:
        """Whether the one table that holds `block` may write it. A copy that still reads it runs before the forward."""
        return block.content is None and block.ref_cnt - self._holds[block.block_id] == 1

    def _replace(self, table: _BlockTable, index: int, block: KVCacheBlock, *, copy: bool) -> None:
        """Put a private block into a table's place `index`; with `copy`, what the old one holds is to be copied."""
        old = table.blocks[index]
        table.replace(index, block)
        if copy:
            # What is itself still to be copied is read from where it comes.
            source = next((source for source, target in self._copies if target is old), old)
            self.pool.touch([source])
            self._holds[source.block_id] += 1
            self._copies.append((source, block))
        self.pool.free_blocks([old])

    def _discard_swapped(self, request: Request) -> None:
        swapped = self._swapped.pop(request, None)
        if swapped is not None:
            self.host_pool.free_blocks(swapped.blocks)
            # Nobody will read them, and the next that is swapped out may take the same host blocks.
            self._swap_outs = [swap for swap in self._swap_outs if swap[1].ref_cnt]

    def _drop_loads(self, loads: Sequence[tuple[HostBlock, KVCacheBlock]]) -> None:
        for load in loads:
            self._swap_ins.remove(load)
        self.host_pool.free_blocks(host for host, _ in loads)

    def _drop_copies(self, copies: Sequence[tuple[KVCacheBlock, KVCacheBlock]]) -> None:
        for copy in copies:
            self._copies.remove(copy)
            self._holds[copy[0].block_id] -= 1
        self._holds += Counter()  # forgets the zeros
        self.pool.free_blocks(source for source, _ in copies)

    def _content(self, request: Request, index: int) -> BlockContent:
        hashes, start = request.block_hashes, index * self.block_size
        parent = hashes[index - 1] if index else None
        token_ids = tuple(request.token_ids[start : start + self.block_size])
        return BlockContent(hashes[index], parent, token_ids, request.extra_keys)

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
