"""Physical KV-cache blocks and the queue of the free ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.memory.hashing import BlockContent


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One physical block: room for `block_size` tokens' keys and values in every layer.

    `ref_cnt` is the number of block tables that hold it, and of copies that are still to read it. `content` is set
    while the block is published in the prefix cache, free or not. `generation` counts how often the block was handed
    out: with the id it names one filling of it. The links belong to `FreeKVCacheBlockQueue`; both are
    None while the block is in use.
    """

    block_id: int
    ref_cnt: int = 0
    content: BlockContent | None = None
    is_null: bool = False
    generation: int = 0
    prev_free: KVCacheBlock | None = field(default=None, repr=False)
    next_free: KVCacheBlock | None = field(default=None, repr=False)

    @property
    def block_hash(self) -> bytes | None:
        """The hash under which the block is published, or None."""
        return None if self.content is None else self.content.block_hash


class FreeKVCacheBlockQueue:
    """The free blocks as a doubly linked list threaded through the blocks; the head is the next to be reused.

    A plain deque would not do: a free block may still carry a reusable prefix, and a hit takes it out of the middle.
    Two sentinels stand before the head and behind the tail, so that no operation has a special case.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(block_id=-1)
        self._tail = KVCacheBlock(block_id=-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the head. Raises IndexError when no block is free."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks in order. Raises IndexError, and takes none, when fewer are free."""
        if n > self.num_free_blocks:
            raise IndexError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._head.next_free, block.prev_free = block, self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink `block` from wherever it is, in O(1)."""
        before, behind = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the free queue"
        assert behind is not None
        before.next_free, behind.prev_free = behind, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` at the tail: it is reused last."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the tail, keeping their order."""
        self._insert(blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the head, keeping their order: blocks[0] is reused next."""
        assert self._head.next_free is not None
        self._insert(blocks, self._head.next_free)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block from head to tail, by walking the links (O(n); for checks and tests)."""
        found: list[KVCacheBlock] = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            found.append(block)
            block = block.next_free
        return found

    def _insert(self, blocks: Sequence[KVCacheBlock], behind: KVCacheBlock) -> None:
        last = behind.prev_free
        assert last is not None
        for block in blocks:
            assert block.next_free is None, f"{block} is already in the free queue"
            last.next_free, block.prev_free = block, last
            last = block
        last.next_free, behind.prev_free = behind, last
        self.num_free_blocks += len(blocks)
