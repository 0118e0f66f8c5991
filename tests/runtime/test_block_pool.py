"""Blocks, the free queue, and the pool's counts and map."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.memory.block import FreeKVCacheBlockQueue, KVCacheBlock
from runtime.memory.block_pool import BlockPool
from runtime.memory.hashing import BlockContent


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return ids(pool.free_queue.get_all_free_blocks())


def publish(pool: BlockPool, blocks: Sequence[KVCacheBlock], contents: Sequence[BlockContent]) -> None:
    for block, content in zip(blocks, contents, strict=True):
        pool.cache_full_block(block, content)


def contents(*hashes: bytes) -> list[BlockContent]:
    """Contents that differ in their hashes."""
    return [BlockContent(block_hash, None, (1, 2), ()) for block_hash in hashes]


def queue_of(n: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(i) for i in range(n)]
    return FreeKVCacheBlockQueue(blocks), blocks


def test_queue_hands_out_in_order_and_counts() -> None:
    queue, blocks = queue_of(5)
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == blocks[1:3]
    assert queue.num_free_blocks == 2
    assert queue.get_all_free_blocks() == blocks[3:]
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(2) == blocks[3:]
    assert queue.get_all_free_blocks() == []


def test_queue_pop_from_empty_raises_and_a_short_pop_takes_none() -> None:
    queue, blocks = queue_of(2)
    with pytest.raises(IndexError, match="3 blocks asked for, 2 are free"):
        queue.popleft_n(3)
    assert queue.get_all_free_blocks() == blocks
    queue.popleft_n(2)
    with pytest.raises(IndexError, match="0 are free"):
        queue.popleft()


def test_queue_append_and_prepend_of_many_keep_order() -> None:
    queue, blocks = queue_of(6)
    taken = queue.popleft_n(5)
    queue.append_n([taken[3], taken[1]])
    queue.prepend_n([taken[4], taken[0]])
    queue.append(taken[2])
    assert ids(queue.get_all_free_blocks()) == [4, 0, 5, 3, 1, 2]
    assert queue.num_free_blocks == 6
    queue.prepend_n([])
    queue.append_n([])
    assert queue.num_free_blocks == 6
    assert queue.popleft() is blocks[4]


@pytest.mark.parametrize("position", [0, 2, 4])
def test_queue_remove_unlinks_by_neighbours_alone(position: int) -> None:
    queue, blocks = queue_of(5)
    before, behind = blocks[position].prev_free, blocks[position].next_free
    queue.remove(blocks[position])
    assert before is not None
    assert before.next_free is behind
    assert blocks[position].prev_free is blocks[position].next_free is None
    assert ids(queue.get_all_free_blocks()) == [i for i in range(5) if i != position]
    assert queue.num_free_blocks == 4


def test_queue_refuses_a_block_twice() -> None:
    queue, blocks = queue_of(2)
    with pytest.raises(AssertionError, match="already in the free queue"):
        queue.append(blocks[0])
    queue.remove(blocks[0])
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(blocks[0])


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} .* at least 2"):
        BlockPool(num_blocks)


def test_null_block_is_never_free_and_its_count_never_moves() -> None:
    pool = BlockPool(4)
    assert (pool.num_usable_blocks, pool.num_free_blocks, free_ids(pool)) == (3, 3, [1, 2, 3])
    pool.touch([pool.null_block])
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    pool.free_blocks([pool.null_block, *pool.blocks[1:]])
    assert (pool.null_block.ref_cnt, pool.null_block.is_null, free_ids(pool)) == (0, True, [1, 2, 3])
    pool.check_integrity({})


def test_usage_is_the_share_of_usable_blocks() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    blocks = pool.get_new_blocks(1)
    assert pool.usage == 0.25
    blocks += pool.get_new_blocks(3)
    assert pool.usage == 1.0
    pool.free_blocks(blocks)
    assert pool.usage == 0.0


def test_unhashed_blocks_are_reused_first_and_hashed_ones_last() -> None:
    pool = BlockPool(7)
    blocks = pool.get_new_blocks(4)
    publish(pool, blocks[:2], contents(b"a", b"b"))
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [4, 3, 5, 6, 2, 1]


def test_touch_takes_a_free_block_out_of_the_queue_and_keeps_its_hash() -> None:
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    publish(pool, [block], contents(b"a"))
    pool.free_blocks([block])
    pool.touch([block])
    pool.touch([block])
    assert (block.ref_cnt, block.block_hash, free_ids(pool)) == (2, b"a", [2, 3])
    pool.free_blocks([block])
    assert free_ids(pool) == [2, 3]
    pool.check_integrity({1: 1})


def test_a_reused_block_leaves_the_map_and_its_duplicate_stays_findable() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    publish(pool, [first, second], contents(b"same", b"same"))
    assert pool.get_cached_block(b"same") is first
    pool.free_blocks([first])
    assert pool.get_new_blocks(1) == [first]
    assert first.block_hash is None
    assert pool.get_cached_block(b"same") is second
    pool.free_blocks([second])
    assert pool.get_new_blocks(1) == [second]
    assert pool.get_cached_block(b"same") is None
    pool.check_integrity({1: 1, 2: 1})


def test_reset_is_refused_while_a_block_is_in_use() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    publish(pool, blocks, contents(b"a", b"b"))
    pool.free_blocks(blocks[1:])
    assert pool.reset_prefix_cache() is False
    assert pool.get_cached_block(b"b") is blocks[1]
    pool.free_blocks(blocks[:1])
    assert pool.reset_prefix_cache() is True
    assert pool.get_cached_block(b"a") is None
    assert [block.block_hash for block in pool.blocks] == [None] * 4
    pool.check_integrity({})


def test_taking_too_many_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(IndexError, match="3 blocks asked for, 2 are free"):
        pool.get_new_blocks(3)
    assert free_ids(pool) == [1, 2]


def test_freeing_once_too_often_is_caught() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError, match="freed once too often"):
        pool.free_blocks([block])


def test_integrity_error_prints_the_arithmetic() -> None:
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(3)
    publish(pool, blocks[:1], contents(b"a"))
    pool.check_integrity({1: 1, 2: 1, 3: 1})
    with pytest.raises(AssertionError, match="block 3: 0 table references and holds != ref_cnt 1"):
        pool.check_integrity({1: 1, 2: 1})
    blocks[1].ref_cnt = 0
    with pytest.raises(AssertionError, match=r"\|free\| \+ \|used\| = 2 \+ 2 != 6 - 1"):
        pool.check_integrity({1: 1, 3: 1})
    with pytest.raises(AssertionError, match="block 2: ref_cnt 0 but free=False"):
        pool.check_integrity({1: 1, 3: 1})
    blocks[1].ref_cnt = 1
    blocks[0].content = contents(b"other")[0]
    with pytest.raises(AssertionError, match="map entry 61 -> 1 points at"):
        pool.check_integrity({1: 1, 2: 1, 3: 1})
    blocks[0].content = None
    with pytest.raises(AssertionError, match="1 map entries, 1 children, 0 blocks that bear a hash"):
        pool.check_integrity({1: 1, 2: 1, 3: 1})
    blocks[0].content = contents(b"a")[0]
    pool.free_queue.num_free_blocks = 1
    with pytest.raises(AssertionError, match="free queue: 2 linked, 2 distinct, counted as 1"):
        pool.check_integrity({1: 1, 2: 1, 3: 1})
    pool.free_queue.num_free_blocks = 2
    pool.null_block.ref_cnt = 1
    with pytest.raises(AssertionError, match="null block: free=False"):
        pool.check_integrity({1: 1, 2: 1, 3: 1})
