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


def table_of(manager: KVCacheManager, name: str) -> list[int]:
    return list(manager.block_ids({request.request_id: request for request in manager.tables()}[name]))


def admit(manager: KVCacheManager, request: Request) -> tuple[list[int], list[int]]:
    """Admit and compute a request as one step would: (hit block ids, new block ids)."""
    hits, num_tokens = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, request.num_tokens, hits, num_tokens)
    assert new is not None
    manager.check_integrity()
    manager.finish_transfers()
    compute(manager, request)
    manager.check_integrity()
    return ids(hits), ids(new)


def compute(manager: KVCacheManager, request: Request) -> None:
    """The forward of all its tokens was launched."""
    request.num_computed_tokens = request.num_tokens
    manager.publish(request, request.num_tokens)


def test_prompts_share_blocks_and_give_them_back_tail_first() -> None:
    manager = KVCacheManager(11, 16)
    blocks = manager.pool.blocks
    first = make_request("first", COMMON + list(range(7)))
    assert admit(manager, first) == ([], [1, 2, 3, 4])
    assert table_of(manager, "first") == [1, 2, 3, 4]
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
    table = manager.block_ids(request)
    request.token_ids += range(4)
    assert manager.allocate_slots(request, 59) == []
    request.token_ids += range(19)
    new = manager.allocate_slots(request, 78)
    assert new is not None
    assert ids(new) == [5]
    assert manager.block_ids(request) is table
    assert list(table) == [1, 2, 3, 4, 5]
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
    assert table_of(manager, "a") == [1, 2, 3, 4]
    second = make_request("b", range(10))
    assert manager.get_computed_blocks(second) == ([], 0)
    assert manager.allocate_slots(second, 1) is None
    with pytest.raises(KeyError):
        table_of(manager, "b")
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
    assert manager.allocate_slots(request, 16, hits, 8) is None
    assert free_ids(manager) == before
    assert [block.ref_cnt for block in hits] == [0, 0]
    manager.check_integrity()
    assert ids(manager.allocate_slots(request, 12, hits, 8) or []) == [4]
    assert table_of(manager, "request") == [1, 2, 4]


def test_hits_are_kept_while_the_last_free_blocks_are_taken() -> None:
    manager = KVCacheManager(4, 4)
    cached = make_request("cached", range(12))
    admit(manager, cached)
    manager.free(cached)
    request = make_request("request", [*range(8), 99])
    assert admit(manager, request) == ([1, 2], [3])
    assert table_of(manager, "request") == [1, 2, 3]


def test_a_wholly_cached_prompt_copies_its_last_block_and_computes_one_token() -> None:
    manager = KVCacheManager(11, 16)
    first = make_request("a", COMMON)
    admit(manager, first)
    second = make_request("b", COMMON)
    hits, num_tokens = manager.get_computed_blocks(second)
    assert (ids(hits), num_tokens) == ([1, 2, 3], 47)
    new = manager.allocate_slots(second, 48, hits, 47)
    assert new is not None
    assert ids(new) == [4]
    assert table_of(manager, "b") == [1, 2, 4]
    assert manager.pending_copies == [(3, 4)]
    assert manager.pool.blocks[3].ref_cnt == 2, "held for the copy"
    manager.check_integrity()
    manager.finish_transfers()
    assert (manager.pending_copies, manager.pool.blocks[3].ref_cnt) == ([], 1)
    compute(manager, second)
    assert manager.pool.blocks[3].block_hash == manager.pool.blocks[4].block_hash
    salted = make_request("c", COMMON[:10], salt="other")
    assert manager.get_computed_blocks(salted) == ([], 0)
    manager.check_integrity()


def test_a_hit_inside_a_block_is_the_longest_run_with_the_same_past_and_salt() -> None:
    manager = KVCacheManager(40, 8)
    common = list(range(100, 108))
    for name, tail in (("a", [1, 2, 3, 4, 5, 6, 7, 8]), ("b", [1, 2, 3, 9, 9, 9, 9, 9]), ("c", [7] * 8)):
        admit(manager, make_request(name, common + tail))
    admit(manager, make_request("other past", [5] * 8 + [1, 2, 3, 4, 5, 6, 7, 8]))
    admit(manager, make_request("other salt", [*common, 1, 2, 3, 4, 5, 9, 9, 9], salt="s"))

    def hit(tail: list[int], salt: str | None = None) -> tuple[list[int], int]:
        hits, num_tokens = manager.get_computed_blocks(make_request("r", common + tail, salt))
        return ids(hits), num_tokens

    second = table_of(manager, "a")[1], table_of(manager, "b")[1]
    first = table_of(manager, "a")[0]
    assert hit([1, 2, 3, 4, 5, 9, 9]) == ([first, second[0]], 13)
    assert hit([1, 2, 3, 9, 9]) == ([first, second[1]], 12), "the last token is left to compute"
    assert hit([2, 2]) == ([first], 8)
    assert hit([1, 2, 3, 4, 5, 9, 9, 9, 9], "s")[1] == 16
    assert hit([1, 2], "t") == ([], 0)


def test_a_hit_inside_a_block_needs_a_block_for_the_copy() -> None:
    manager = KVCacheManager(4, 4)
    cached = make_request("cached", range(12))
    admit(manager, cached)
    manager.free(cached)
    request = make_request("request", range(12))
    hits, num_tokens = manager.get_computed_blocks(request)
    assert (ids(hits), num_tokens) == ([1, 2, 3], 11)
    before = free_ids(manager)
    assert manager.allocate_slots(request, 12, hits, 11) is None, "3 blocks hit and no fourth for the copy"
    assert free_ids(manager) == before
    assert ids(manager.allocate_slots(request, 12, hits[:2], 8) or []) == [3]


def fork(manager: KVCacheManager, parent: Request, name: str) -> Request:
    child = make_request(name, parent.token_ids)
    child.num_computed_tokens = parent.num_computed_tokens
    manager.fork(parent, child)
    manager.check_integrity()
    return child


def test_three_children_copy_the_tail_twice_and_the_last_writes_in_place() -> None:
    manager = KVCacheManager(11, 4)
    parent = make_request("0", range(10))
    admit(manager, parent)
    family = [parent, fork(manager, parent, "1"), fork(manager, parent, "2")]
    blocks = manager.pool.blocks
    assert [blocks[i].ref_cnt for i in (1, 2, 3)] == [3, 3, 3]
    assert manager.usage == pytest.approx(0.3)
    taken = [ids(manager.allocate_slots(request, 11) or []) for request in family]
    assert taken == [[4], [5], []]
    assert manager.pending_copies == [(3, 4), (3, 5)]
    assert [table_of(manager, name) for name in "012"] == [[1, 2, 4], [1, 2, 5], [1, 2, 3]]
    manager.check_integrity()
    manager.finish_transfers()
    assert [blocks[i].ref_cnt for i in (1, 2, 3, 4, 5)] == [3, 3, 1, 1, 1]
    for request in family:
        manager.free(request)
    assert [block.ref_cnt for block in blocks] == [0] * 11
    manager.check_integrity()


def test_a_first_write_without_a_free_block_changes_nothing() -> None:
    manager = KVCacheManager(4, 4)
    parent = make_request("0", range(10))
    admit(manager, parent)
    child = fork(manager, parent, "1")
    assert manager.allocate_slots(child, 11) is None
    assert manager.pending_copies == []
    assert table_of(manager, "1") == [1, 2, 3]
    manager.check_integrity()
    manager.free(parent)
    assert manager.allocate_slots(child, 11) == [], "alone again, it writes in place"


def test_a_fork_in_mid_prefill_shares_what_is_computed() -> None:
    manager = KVCacheManager(11, 4)
    parent = make_request("0", range(12))
    manager.allocate_slots(parent, 12)
    parent.num_computed_tokens = 6
    manager.publish(parent, 6)
    child = fork(manager, parent, "1")
    assert table_of(manager, "1") == [1, 2]
    assert ids(manager.allocate_slots(child, 12) or []) == [4, 5]
    assert manager.pending_copies == [(2, 4)]
    assert manager.allocate_slots(parent, 12) == []
    manager.check_integrity()


def test_a_block_written_at_a_boundary_is_replaced_without_a_copy() -> None:
    manager = KVCacheManager(11, 4)
    parent = make_request("0", range(8))
    admit(manager, parent)
    child = fork(manager, parent, "1")
    assert ids(manager.allocate_slots(child, 9) or []) == [3]
    assert ids(manager.allocate_slots(parent, 9) or []) == [4]
    assert manager.pending_copies == []
    assert table_of(manager, "0")[:2] == table_of(manager, "1")[:2] == [1, 2]


def test_freeing_the_writer_takes_its_copy_back() -> None:
    manager = KVCacheManager(11, 4)
    parent = make_request("0", range(6))
    admit(manager, parent)
    child = fork(manager, parent, "1")
    assert ids(manager.allocate_slots(child, 7) or []) == [3]
    manager.free(child)
    assert manager.pending_copies == []
    assert manager.pool.blocks[2].ref_cnt == 1
    manager.check_integrity()


def test_a_fork_of_a_table_whose_copy_has_not_run_reads_the_copys_source() -> None:
    manager = KVCacheManager(11, 4)
    parent = make_request("0", range(6))
    admit(manager, parent)
    child = fork(manager, parent, "1")
    manager.allocate_slots(child, 7)
    grandchild = fork(manager, child, "2")
    assert ids(manager.allocate_slots(grandchild, 7) or []) == [4]
    assert manager.pending_copies == [(2, 3), (2, 4)]
    manager.check_integrity()
    manager.free(parent)
    assert manager.pool.blocks[2].ref_cnt == 2, "held for both copies"
    manager.finish_transfers()
    manager.check_integrity()
    assert manager.pool.blocks[2].ref_cnt == 0


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
    assert manager.get_computed_blocks(second)[1] == 11
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
    manager.block_ids(request).append(4)
    with pytest.raises(AssertionError, match=r"'a': blocks \[1, 2\] != ids \[1, 2, 4\]"):
        manager.check_integrity()
    manager.block_ids(request).pop()
    manager.pool.blocks[2].ref_cnt = 2
    with pytest.raises(AssertionError, match="block 2: 1 table references and holds != ref_cnt 2"):
        manager.check_integrity()
