"""Requests' block tables: which physical blocks hold which request's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.memory.block import KVCacheBlock
from runtime.memory.block_pool import BlockPool
from runtime.memory.hashing import extend_block_hashes
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


class KVCacheManager:
    """Owns every request's block table over one `BlockPool` of `num_blocks` blocks of `block_size` tokens.

    Raises ValueError for a block size below 1 or a pool without a usable block.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not supported: a block holds at least 1 token")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self._tables: dict[str, _BlockTable] = {}

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks one request could hold if it were alone."""
        return self.pool.num_usable_blocks

    @property
    def usage(self) -> float:
        """The share of usable blocks that requests hold, in [0, 1]."""
        return self.pool.usage

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The longest cached prefix of `request` as (blocks, tokens), in whole blocks; takes no reference.

        At least one token is left to compute, since the next token's logits come from a forward, not from the cache.
        """
        hits: list[KVCacheBlock] = []
        if self.enable_prefix_caching:
            self._extend_hashes(request)
            limit = (request.num_tokens - 1) // self.block_size
            for block_hash in request.block_hashes[:limit]:
                block = self.pool.get_cached_block(block_hash)
                if block is None:
                    break
                hits.append(block)
        return hits, len(hits) * self.block_size

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[KVCacheBlock] | None:
        """Make the table of `request` cover its first `num_tokens` tokens; returns the newly taken blocks.

        `computed_blocks`, from `get_computed_blocks`, become the head of a table that does not exist yet. All or
        nothing: None means that too few blocks are free and that nothing changed.
        """
        table = self._tables.get(request.request_id)
        assert table is None or not computed_blocks, "prefix hits can only begin a table"
        num_held = len(table.blocks) if table is not None else len(computed_blocks)
        num_new = max(0, self.num_blocks_for(num_tokens) - num_held)
        num_revived = sum(block.ref_cnt == 0 for block in computed_blocks)
        if num_new + num_revived > self.pool.num_free_blocks:
            return None
        if table is None:
            table = self._tables[request.request_id] = _BlockTable(num_published=len(computed_blocks))
            # Before anything is taken: a hit in the free list could otherwise be handed out as a new block.
            self.pool.touch(computed_blocks)
            table.extend(computed_blocks)
        new_blocks = self.pool.get_new_blocks(num_new) if num_new else []
        table.extend(new_blocks)
        return new_blocks

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Offer the full blocks among the first `num_computed_tokens` tokens to other requests.

        Only for tokens whose forward was launched: until then the block holds someone else's keys and values.
        """
        table = self._tables[request.request_id]
        start, end = table.num_published, num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or end <= start:
            return
        self._extend_hashes(request)
        self.pool.cache_full_blocks(table.blocks[start:end], request.block_hashes[start:end])
        table.num_published = end

    def free(self, request: Request) -> None:
        """Give back all blocks of `request`, the tail first so that prefixes live longest. No table: no effect."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))

    def block_ids(self, request_id: str) -> list[int]:
        """The live table of a request as physical block ids: append-only, not to be changed by the caller."""
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
        self.pool.check_integrity(Counter(i for table in self._tables.values() for i in table.block_ids))

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.extra_keys)
