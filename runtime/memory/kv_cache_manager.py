"""Requests' block tables: which physical blocks hold which request's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.memory.block import KVCacheBlock
from runtime.memory.block_pool import BlockPool
from runtime.memory.hashing import BlockContent, extend_block_hashes
from runtime.request import Request


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one request in logical order; the first `num_published` of them are in the prefix cache."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(block.block_id for block in blocks)

    def replace(self, index: int, block: KVCacheBlock) -> None:
        self.blocks[index], self.block_ids[index] = block, block.block_id


class KVCacheManager:
    """Owns every request's block table over one `BlockPool` of `num_blocks` blocks of `block_size` tokens.

    Tables may share blocks. A block may be written only if one table holds it and it is not published; else the writer
    gets a new block in its place and the tokens already there are to be copied: *copy on write*. The copies of a step
    are `pending_copies`, to be run before its forward; a copy's source is held until `finish_copies`.

    Raises ValueError for a block size below 1 or a pool without a usable block.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not supported: a block holds at least 1 token")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self._tables: dict[str, _BlockTable] = {}
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
    def pending_copies(self) -> list[tuple[int, int]]:
        """(source, destination) block ids to copy before the next forward; no block is both, none destination twice."""
        return [(source.block_id, target.block_id) for source, target in self._copies]

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The longest cached prefix of `request` as (blocks, tokens); takes no reference.

        The last block may be usable in part only: then `tokens` ends inside it, and writing on means copying it. At
        least one token is left to compute, since the next token's logits come from a forward, not from the cache.
        """
        hits: list[KVCacheBlock] = []
        if not self.enable_prefix_caching:
            return hits, 0
        self._extend_hashes(request)
        limit = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:limit]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        num_tokens = len(hits) * self.block_size
        rest = request.token_ids[num_tokens : min(num_tokens + self.block_size, request.num_tokens - 1)]
        parent = request.block_hashes[len(hits) - 1] if hits else None
        partial, run = self.pool.longest_run(parent, request.extra_keys, rest)
        return (hits, num_tokens) if partial is None else ([*hits, partial], num_tokens + run)

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: Sequence[KVCacheBlock] = (),
        num_computed_tokens: int | None = None,
    ) -> list[KVCacheBlock] | None:
        """Make the table of `request` cover its first `num_tokens` tokens, all from the first one that is not computed
        on writable; returns the newly taken blocks, private copies first.

        `computed_blocks` and `num_computed_tokens`, from `get_computed_blocks`, begin a table that does not exist yet.
        All or nothing: None means that too few blocks are free and that nothing changed.
        """
        table = self._tables.get(request.request_id)
        assert table is None or not computed_blocks, "prefix hits can only begin a table"
        held = list(computed_blocks) if table is None else table.blocks
        start = request.num_computed_tokens if num_computed_tokens is None else num_computed_tokens
        shared = [i for i in range(start // self.block_size, len(held)) if not self._writable(held[i])]
        num_new = max(0, self.num_blocks_for(num_tokens) - len(held))
        num_revived = sum(block.ref_cnt == 0 for block in computed_blocks)
        if len(shared) + num_new + num_revived > self.pool.num_free_blocks:
            return None
        if table is None:
            table = self._tables[request.request_id] = _BlockTable(num_published=start // self.block_size)
            # Before anything is taken: a hit in the free list could otherwise be handed out as a new block.
            self.pool.touch(computed_blocks)
            table.extend(computed_blocks)
        new_blocks = self.pool.get_new_blocks(len(shared) + num_new)
        for index, block in zip(shared, new_blocks, strict=False):
            self._replace(table, index, block, copy=index * self.block_size < start)
        table.extend(new_blocks[len(shared) :])
        return new_blocks

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` a table that shares every block of `parent` that holds computed tokens, the tail included."""
        table = self._tables[parent.request_id]
        count = self.num_blocks_for(parent.num_computed_tokens)
        assert child.request_id not in self._tables, f"{child.request_id!r} has a table already"
        self._tables[child.request_id] = _BlockTable(
            table.blocks[:count], table.block_ids[:count], min(table.num_published, count)
        )
        self.pool.touch(table.blocks[:count])

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Offer the full blocks among the first `num_computed_tokens` tokens to other requests.

        Only for tokens whose forward was launched: until then the block holds someone else's keys and values.
        """
        table = self._tables[request.request_id]
        start, end = table.num_published, num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or end <= start:
            return
        self._extend_hashes(request)
        contents = [self._content(request, index) for index in range(start, end)]
        self.pool.cache_full_blocks(table.blocks[start:end], contents)
        table.num_published = end

    def free(self, request: Request) -> None:
        """Give back all blocks of `request`, the tail first so that prefixes live longest. No table: no effect."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))
            self._drop_copies([copy for copy in self._copies if copy[1].ref_cnt == 0])

    def finish_copies(self) -> None:
        """Let go of the sources of the pending copies: they have been run, or their step has failed."""
        self._drop_copies(list(self._copies))

    def block_ids(self, request_id: str) -> list[int]:
        """The live table of a request as physical block ids, not to be changed by the caller."""
        return self._tables[request_id].block_ids

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and no change, while any request holds a block."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check all tables, counts, the free queue and the map; AssertionError prints the arithmetic. O(pool)."""
        for request_id, table in self._tables.items():
            actual = [block.block_id for block in table.blocks]
            assert actual == table.block_ids, f"table of {request_id!r}: blocks {actual} != ids {table.block_ids}"
            hashed = [block.block_hash is not None for block in table.blocks]
            expected = [i < table.num_published for i in range(len(table.blocks))]
            assert hashed == expected, f"table of {request_id!r}: {table.num_published} published, but hashed={hashed}"
        sources, targets = {source for source, _ in self.pending_copies}, [target for _, target in self.pending_copies]
        assert len(set(targets)) == len(targets), f"destination twice in {self.pending_copies}"
        assert not sources & set(targets), f"source and destination in {self.pending_copies}"
        references = Counter(i for table in self._tables.values() for i in table.block_ids)
        self.pool.check_integrity(references + self._holds)

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

    def _drop_copies(self, copies: Sequence[tuple[KVCacheBlock, KVCacheBlock]]) -> None:
        for copy in copies:
            self._copies.remove(copy)
            self._holds[copy[0].block_id] -= 1
        self._holds += Counter()  # forgets the zeros
        self.pool.free_blocks(source for source, _ in copies)

    def _content(self, request: Request, index: int) -> BlockContent:
        hashes, start = request.block_hashes, index * self.block_size
        return BlockContent(
            block_hash=hashes[index],
            parent=hashes[index - 1] if index else None,
            token_ids=tuple(request.token_ids[start : start + self.block_size]),
            extra_keys=request.extra_keys,
        )

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
