"""Block tables: paging, prefix hits, and the order in which blocks come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.memory.block import KVCacheBlock
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request
from runtime.sampling import SamplingParams

COMMON = list(range(1000, 1048))


def make_request(name: str, tokens: Sequence[int], salt: str | None = None) -> Request:
    params = SamplingParams(max_tokens=1000)
    return Request(name, tokens, params, arrival=0, eos_token_ids=frozenset(), max_model_len=10_000, cache_salt=salt)


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(manager: KVCacheManager) -> list[int]:
    return ids(manager.pool.free_queue.get_all_free_blocks())


def admit(manager: KVCacheManager, request: Request) -> tuple[list[int], list[int]]:
    """Admit and compute a request as one step would: (hit block ids, new block ids)."""
    hits, num_tokens = manager.get_computed_blocks(request)
    assert num_tokens == len(hits) * manager.block_size
    new = manager.allocate_slots(request, request.num_tokens, hits)
    assert new is not None
    manager.publish(request, request.num_tokens)
    manager.check_integrity()
    return ids(hits), ids(new)


def test_prompts_share_blocks_and_give_them_back_tail_first() -> None:
    manager = KVCacheManager(11, 16)
    blocks = manager.pool.blocks
    first = make_request("first", COMMON + list(range(7)))
    assert admit(manager, first) == ([], [1, 2, 3, 4])
    assert manager.block_ids("first") == [1, 2, 3, 4]
    assert [blocks[i].block_hash is not None for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert [blocks[i].ref_cnt for i in (1, 2, 3, 4)] == [1, 1, 1, 1]

    second = make_request("second", COMMON + list(range(50, 55)))
    assert admit(manager, second) == ([1, 2, 3], [5])
    assert [blocks[i].ref_cnt for i in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    assert manager.usage == 0.5

    manager.free(first)
    manager.free(second)
    assert free_ids(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    manager.check_integrity()

    third = make_request("third", COMMON + list(range(60, 66)))
    assert admit(manager, third) == ([1, 2, 3], [5])
    manager.free(third)
    assert manager.usage == 0.0
    assert manager.pool.num_free_blocks == 10


def test_decode_takes_a_block_only_at_a_boundary_and_publishes_the_old_tail() -> None:
    manager = KVCacheManager(11, 16)
    request = make_request("a", range(55))
    admit(manager, request)
    table = manager.block_ids("a")
    request.token_ids += range(4)
    assert manager.allocate_slots(request, 59) == []
    request.token_ids += range(19)
    new = manager.allocate_slots(request, 78)
    assert new is not None
    assert ids(new) == [5]
    assert manager.block_ids("a") is table == [1, 2, 3, 4, 5]
    assert manager.pool.blocks[4].block_hash is None
    manager.publish(request, 78)
    assert manager.pool.blocks[4].block_hash == request.block_hashes[3]
    assert manager.pool.blocks[5].block_hash is None
    manager.check_integrity()


def test_worked_example_of_paging() -> None:
    manager = KVCacheManager(8, 4)
    request = make_request("a", range(9))
    assert len(manager.allocate_slots(request, 9) or []) == 3
    assert [manager.allocate_slots(request, n) for n in (10, 11, 12)] == [[], [], []]
    assert ids(manager.allocate_slots(request, 13) or []) == [4]
    assert [manager.num_blocks_for(n) for n in (0, 1, 4, 5, 9, 12, 13)] == [0, 1, 1, 2, 3, 3, 4]


def test_without_caching_nothing_hits_and_a_full_pool_says_none() -> None:
    manager = KVCacheManager(5, 4, enable_prefix_caching=False)
    first = make_request("a", range(10))
    assert len(manager.allocate_slots(first, 10) or []) == 3
    manager.publish(first, 10)
    assert len(manager.allocate_slots(first, 16) or []) == 1
    assert manager.block_ids("a") == [1, 2, 3, 4]
    second = make_request("b", range(10))
    assert manager.get_computed_blocks(second) == ([], 0)
    assert manager.allocate_slots(second, 1) is None
    with pytest.raises(KeyError):
        manager.block_ids("b")
    manager.check_integrity()
    manager.free(first)
    assert manager.get_computed_blocks(second) == ([], 0)
    assert free_ids(manager) == [4, 3, 2, 1]


def test_none_changes_nothing_even_when_hits_sit_in_the_free_list() -> None:
    manager = KVCacheManager(5, 4)
    cached = make_request("cached", range(8))
    admit(manager, cached)
    manager.free(cached)
    other = make_request("other", range(100, 104))
    admit(manager, other)
    before = free_ids(manager)
    assert len(before) == 3
    # 8 tokens are cached in two of the three free blocks, so two more blocks do not fit beside them.
    request = make_request("request", list(range(8)) + list(range(200, 208)))
    hits, num_tokens = manager.get_computed_blocks(request)
    assert (ids(hits), num_tokens) == ([1, 2], 8)
    assert manager.allocate_slots(request, 16, hits) is None
    assert free_ids(manager) == before
    assert [block.ref_cnt for block in hits] == [0, 0]
    manager.check_integrity()
    assert ids(manager.allocate_slots(request, 12, hits) or []) == [4]
    assert manager.block_ids("request") == [1, 2, 4]


def test_hits_are_kept_while_the_last_free_blocks_are_taken() -> None:
    manager = KVCacheManager(4, 4)
    cached = make_request("cached", range(12))
    admit(manager, cached)
    manager.free(cached)
    request = make_request("request", [*range(8), 99])
    assert admit(manager, request) == ([1, 2], [3])
    assert manager.block_ids("request") == [1, 2, 3]


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    manager = KVCacheManager(11, 16)
    first = make_request("a", COMMON)
    admit(manager, first)
    second = make_request("b", COMMON)
    hits, num_tokens = manager.get_computed_blocks(second)
    assert (ids(hits), num_tokens) == ([1, 2], 32)
    assert admit(manager, second) == ([1, 2], [4])
    assert manager.pool.blocks[3].block_hash == manager.pool.blocks[4].block_hash
    salted = make_request("c", COMMON[:10], salt="other")
    assert manager.get_computed_blocks(salted) == ([], 0)


def test_block_size_1_leaves_one_token_to_compute() -> None:
    manager = KVCacheManager(10, 1)
    first = make_request("a", [7, 8, 9])
    assert admit(manager, first) == ([], [1, 2, 3])
    second = make_request("b", [7, 8, 9])
    assert admit(manager, second) == ([1, 2], [4])
    assert manager.get_computed_blocks(make_request("c", [7])) == ([], 0)


def test_salts_keep_requests_apart() -> None:
    manager = KVCacheManager(20, 4)
    tokens = list(range(9))
    admit(manager, make_request("a", tokens, salt="tenant"))
    hits = {
        salt: manager.get_computed_blocks(make_request("b", tokens, salt=salt))[1]
        for salt in ("tenant", "other", "", None)
    }
    assert hits == {"tenant": 8, "other": 0, "": 0, None: 0}


def test_an_unpublished_block_is_no_hit() -> None:
    manager = KVCacheManager(20, 4)
    first = make_request("a", range(12))
    manager.allocate_slots(first, 12)
    second = make_request("b", range(12))
    assert manager.get_computed_blocks(second) == ([], 0)
    manager.publish(first, 7)
    assert manager.get_computed_blocks(second)[1] == 4
    manager.publish(first, 12)
    manager.publish(first, 12)
    assert manager.get_computed_blocks(second)[1] == 8
    manager.check_integrity()


def test_a_duplicate_is_found_after_the_first_copy_was_overwritten() -> None:
    manager = KVCacheManager(5, 4)
    first, second = make_request("a", range(4)), make_request("b", range(4))
    for request in (first, second):
        manager.allocate_slots(request, 4)
    for request in (first, second):
        manager.publish(request, 4)
    manager.free(first)
    filler = make_request("filler", range(100, 112))
    assert ids(manager.allocate_slots(filler, 12) or []) == [3, 4, 1]
    hits, _ = manager.get_computed_blocks(make_request("c", range(5)))
    assert ids(hits) == [2]
    manager.check_integrity()


def test_reset_waits_for_the_last_block() -> None:
    manager = KVCacheManager(11, 4)
    request = make_request("a", range(9))
    admit(manager, request)
    assert manager.reset_prefix_cache() is False
    assert manager.get_computed_blocks(make_request("b", range(9)))[1] == 8
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(make_request("b", range(9))) == ([], 0)
    manager.check_integrity()


def test_free_without_a_table_has_no_effect() -> None:
    manager = KVCacheManager(3, 4)
    manager.free(make_request("a", [1]))
    assert free_ids(manager) == [1, 2]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size=0 .* at least 1 token"):
        KVCacheManager(10, 0)
    with pytest.raises(ValueError, match=r"num_blocks=1 .* at least 2"):
        KVCacheManager(1, 16)


def test_integrity_names_a_table_that_disagrees() -> None:
    manager = KVCacheManager(5, 4)
    request = make_request("a", range(8))
    admit(manager, request)
    manager.block_ids("a").append(4)
    with pytest.raises(AssertionError, match=r"table of 'a': blocks \[1, 2\] != ids \[1, 2, 4\]"):
        manager.check_integrity()
    manager.block_ids("a").pop()
    manager.pool.blocks[2].ref_cnt = 2
    with pytest.raises(AssertionError, match="block 2: 1 table references != ref_cnt 2"):
        manager.check_integrity()
