"""The pool of physical blocks: reference counts, reuse order, and the prefix cache's map."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from runtime.memory.block import FreeKVCacheBlockQueue, KVCacheBlock
from runtime.memory.hashing import BlockContent, ExtraKeys

Key = TypeVar("Key", bound=Hashable)
ChildKey = tuple[bytes | None, ExtraKeys, int]
_MAX_CANDIDATES = 32


class BlockPool:
    """`num_blocks` physical blocks, of which block 0, the null block, is never handed out.

    Padding reads and writes the null block, so a pool of n blocks offers n - 1. A freed block keeps its hash, and with
    it a reusable prefix, until it is handed out again: the free queue is the eviction order.
    Raises ValueError when `num_blocks` leaves no usable block.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks} leaves no usable KV-cache block (block 0 is reserved for padding); "
                "num_blocks must be at least 2: raise num_blocks or the KV cache's memory"
            )
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        # Two requests may fill equal blocks at the same time. Tables are append-only, so both stay, and while one of
        # them lives the prefix must stay findable: hence a set of blocks for each hash, in the order of publication.
        self._cached: dict[bytes, dict[int, KVCacheBlock]] = {}
        # The same blocks by what comes before them and by their first token: for prompts that end inside a block.
        self._children: dict[ChildKey, dict[int, KVCacheBlock]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks can be handed out in all: every block but the null one."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """How many blocks can be handed out now, cached ones that nobody uses included."""
        return self.free_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of usable blocks that some table holds, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Hand out `n` blocks with ref_cnt 1; their old contents leave the prefix cache.

        Raises IndexError, and changes nothing, when fewer are free.
        """
        blocks = self.free_queue.popleft_n(n)
        for block in blocks:
            if block.content is not None:
                self._evict(block)
            block.ref_cnt = 1
            block.generation += 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block; one that was free leaves the free queue with its contents."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block, the first to be reused first (a request's tail before its head).

        Blocks that nobody holds any more become free: those without a hash at the head of the queue, since nothing is
        lost by overwriting them, hashed ones at the tail, which makes eviction least-recently-freed.
        """
        plain: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block} is freed once too often"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (plain if block.block_hash is None else hashed).append(block)
        self.free_queue.prepend_n(plain)
        self.free_queue.append_n(hashed)

    def cache_full_block(self, block: KVCacheBlock, content: BlockContent) -> None:
        """Publish a full block with what it holds. Nothing may write to it afterwards."""
        assert self.enable_caching
        assert not block.is_null
        assert block.content is None, f"{block} is already published"
        block.content = content
        self._cached.setdefault(content.block_hash, {})[block.block_id] = block
        self._children.setdefault(_child_key(content), {})[block.block_id] = block

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The earliest published block with this hash, in use or free; None if there is none. Changes nothing."""
        candidates = self._cached.get(block_hash)
        return next(iter(candidates.values())) if candidates else None

    def longest_run(
        self, parent: bytes | None, extra_keys: ExtraKeys, token_ids: Sequence[int]
    ) -> tuple[KVCacheBlock | None, int]:
        """The published block after `parent` that begins with most of `token_ids`, and how many; (None, 0) if none.

        Looks at the 32 blocks that were published last among those with the same first token. Changes nothing.
        """
        best: tuple[KVCacheBlock | None, int] = (None, 0)
        candidates = self._children.get((parent, extra_keys, token_ids[0]), {}) if token_ids else {}
        for block in islice(reversed(candidates.values()), _MAX_CANDIDATES):
            assert block.content is not None
            pairs = zip(block.content.token_ids, token_ids, strict=False)
            run = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(block.content.token_ids), len(token_ids))
            )
            if run > best[1]:
                best = (block, run)
        return best

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Refused, with False and no change, while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for candidates in self._cached.values():
            for block in candidates.values():
                block.content = None
        self._cached.clear()
        self._children.clear()
        return True

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Compare all counts with `references`: block id -> number of table entries and holds that name it.

        Raises AssertionError with one line of arithmetic for each disagreement. O(num_blocks); changes nothing.
        """
        problems = [*self._count_problems(references), *self._cache_problems()]
        if problems:
            raise AssertionError("KV-cache block pool is inconsistent:\n  " + "\n  ".join(problems))

    def _evict(self, block: KVCacheBlock) -> None:
        assert block.content is not None
        _discard(self._cached, block.content.block_hash, block)
        _discard(self._children, _child_key(block.content), block)
        block.content = None

    def _count_problems(self, references: Mapping[int, int]) -> Iterator[str]:
        walked = [block.block_id for block in self.free_queue.get_all_free_blocks()]
        free = set(walked)
        used = sum(block.ref_cnt > 0 for block in self.blocks)
        if not len(walked) == len(free) == self.num_free_blocks:
            yield f"free queue: {len(walked)} linked, {len(free)} distinct, counted as {self.num_free_blocks}"
        if len(free) + used != self.num_usable_blocks:
            yield f"|free| + |used| = {len(free)} + {used} != {len(self.blocks)} - 1"
        if 0 in free or self.null_block.ref_cnt != 0 or self.null_block.block_hash is not None:
            yield f"null block: free={0 in free}, {self.null_block}"
        for block in self.blocks[1:]:
            held = references.get(block.block_id, 0)
            if held != block.ref_cnt:
                yield f"block {block.block_id}: {held} table references and holds != ref_cnt {block.ref_cnt}"
            if (block.block_id in free) != (block.ref_cnt == 0):
                yield f"block {block.block_id}: ref_cnt {block.ref_cnt} but free={block.block_id in free}"

    def _cache_problems(self) -> Iterator[str]:
        entries = 0
        for block_hash, candidates in self._cached.items():
            entries += len(candidates)
            for block_id, block in candidates.items():
                if block is not self.blocks[block_id] or block.block_hash != block_hash:
                    yield f"map entry {block_hash.hex()[:12]} -> {block_id} points at {block}"
        hashed = sum(block.block_hash is not None for block in self.blocks)
        children = sum(len(candidates) for candidates in self._children.values())
        if not entries == children == hashed:
            yield f"{entries} map entries, {children} children, {hashed} blocks that bear a hash: must be equal"


def _child_key(content: BlockContent) -> ChildKey:
    return content.parent, content.extra_keys, content.token_ids[0]


def _discard(index: dict[Key, dict[int, KVCacheBlock]], key: Key, block: KVCacheBlock) -> None:
    """Take a block out of an index, and its entry with the last one."""
    candidates = index[key]
    del candidates[block.block_id]
    if not candidates:
        del index[key]
