"""Swapping block tables out to the host and in again: which blocks move, who holds them, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.memory.block import KVCacheBlock
from runtime.memory.host_pool import HostBlock, HostBlockPool
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request
from runtime.sampling import SamplingParams


class Cache:
    """A manager, and what its slots hold on the device and on the host: the token whose keys and values are there."""

    def __init__(
        self, num_blocks: int = 12, block_size: int = 4, *, caching: bool = True, host_blocks: int = 12
    ) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, caching, host_blocks)
        self.device: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}

    def start(self, name: str, tokens: Sequence[int]) -> Request:
        """Admit a new request and compute all its tokens."""
        params = SamplingParams(max_tokens=1000)
        request = Request(name, tokens, params, arrival=0, eos_token_ids=frozenset(), max_model_len=10_000)
        assert self.admit(request)
        self.compute(request)
        return request

    def admit(self, request: Request) -> bool:
        """Take the blocks of a waiting request as the scheduler does."""
        found, num_tokens = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens, found, num_tokens) is None:
            return False
        request.num_computed_tokens = num_tokens
        self.manager.check_integrity()
        return True

    def take(self, request: Request, *tokens: int) -> list[KVCacheBlock] | None:
        """Append tokens and take the blocks to write them to."""
        request.token_ids += tokens
        new = self.manager.allocate_slots(request, request.num_tokens)
        self.manager.check_integrity()
        return new

    def compute(self, request: Request, *tokens: int) -> None:
        """Append tokens and write all that is not computed, after what is pending has moved."""
        if tokens:
            assert self.take(request, *tokens) is not None
        self.move()
        slots, start = self.slots(request), request.num_computed_tokens
        assert all(self.manager._writable(self.manager.pool.blocks[block]) for block, _ in slots[start:])
        self.device.update(zip(slots[start:], request.token_ids[start:], strict=True))
        request.num_computed_tokens = request.num_tokens
        self.manager.publish(request, request.num_tokens)
        self.manager.check_integrity()

    def move(self) -> None:
        """Run what is pending, in its order."""
        self.copy(self.manager.pending_swap_outs, self.device, self.host)
        self.copy(self.manager.pending_swap_ins, self.host, self.device)
        self.copy(self.manager.pending_copies, self.device, self.device)
        self.manager.finish_transfers()
        self.manager.check_integrity()

    def copy(
        self, pairs: list[tuple[int, int]], source: dict[tuple[int, int], int], target: dict[tuple[int, int], int]
    ) -> None:
        before = dict(source)
        for here, there in pairs:
            for offset in range(self.manager.block_size):
                target[there, offset] = before.get((here, offset), -1)

    def table(self, request: Request) -> list[int]:
        return list(self.manager.block_ids(request))

    def slots(self, request: Request) -> list[tuple[int, int]]:
        table, size = self.table(request), self.manager.block_size
        return [(table[i // size], i % size) for i in range(request.num_tokens)]

    def holds(self, request: Request) -> bool:
        """Whether the blocks of a request hold its computed tokens."""
        held = [self.device.get(slot) for slot in self.slots(request)[: request.num_computed_tokens]]
        return held == request.token_ids[: request.num_computed_tokens]

    def fork(self, parent: Request, name: str) -> Request:
        child = parent.fork(name)
        self.manager.fork(parent, child)
        self.manager.check_integrity()
        return child

    def swap_out(self, *requests: Request) -> bool:
        """Swap requests out as a preemption does."""
        if not self.manager.swap_out(requests):
            return False
        for request in requests:
            request.num_computed_tokens = 0
        self.manager.check_integrity()
        return True

    def host_blocks(self, request: Request) -> list[HostBlock]:
        return self.manager._swapped[request].blocks

    def host_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self.host_blocks(request)]

    def overwrite_free_blocks(self) -> None:
        """Let another request have every free block for a while."""
        pool, size = self.manager.pool, self.manager.block_size
        filler = self.start("filler", range(5000, 5000 + pool.num_free_blocks * size))
        self.manager.free(filler)

    def state(self) -> tuple[object, ...]:
        """All that swapping could change."""
        manager = self.manager
        return (
            [(block.block_id, block.ref_cnt, block.content) for block in manager.pool.free_queue.get_all_free_blocks()],
            [(block.ref_cnt, block.generation) for block in manager.pool.blocks],
            {request: [block.block_id for block in blocks] for request, blocks in manager.tables().items()},
            (manager.pending_swap_outs, manager.pending_swap_ins, manager.pending_copies),
            {request: [(b.block_id, b.ref_cnt) for b in table.blocks] for request, table in manager._swapped.items()},
            manager.host_pool.num_used_blocks,
        )


def ids(blocks: Sequence[KVCacheBlock | HostBlock]) -> list[tuple[str, int]]:
    return [("host" if isinstance(block, HostBlock) else "device", block.block_id) for block in blocks]


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def caching(request: pytest.FixtureRequest) -> bool:
    return request.param


# --- out and in ---


def test_a_request_gives_all_blocks_back_and_goes_on_where_it_was(caching: bool) -> None:
    cache = Cache(caching=caching)
    manager = cache.manager
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    assert manager.is_swapped(request)
    assert manager.pending_swap_outs == [(1, 0), (2, 1), (3, 2)]
    assert (manager.usage, manager.host_pool.num_used_blocks) == (0.0, 3)
    cache.move()
    cache.overwrite_free_blocks()
    request.token_ids.append(10)
    found, num_tokens = manager.get_computed_blocks(request)
    assert (ids(found), num_tokens) == ([("host", 0), ("host", 1), ("host", 2)], 10)
    assert cache.admit(request)
    assert [host for host, _ in manager.pending_swap_ins] == [0, 1, 2]
    cache.compute(request)
    assert cache.holds(request)
    assert not manager.is_swapped(request)
    assert manager.host_pool.num_used_blocks == 0


def test_only_blocks_with_computed_tokens_move() -> None:
    cache = Cache()
    request = Request("a", range(16), SamplingParams(), arrival=0, eos_token_ids=frozenset(), max_model_len=100)
    assert cache.admit(request)
    for slot, token in zip(cache.slots(request)[:6], range(6), strict=True):
        cache.device[slot] = token
    request.num_computed_tokens = 6
    assert len(cache.table(request)) == 4
    assert cache.manager.swap_cost([request]) == (2, 2, 6)
    assert cache.swap_out(request)
    assert cache.manager.pending_swap_outs == [(1, 0), (2, 1)]
    cache.move()
    assert cache.manager.get_computed_blocks(request)[1] == 6
    assert cache.admit(request)
    cache.move()
    assert cache.holds(request)
    assert len(cache.table(request)) == 4


def test_blocks_of_one_token() -> None:
    cache = Cache(block_size=1)
    request = cache.start("a", range(3))
    assert cache.swap_out(request)
    cache.move()
    cache.overwrite_free_blocks()
    request.token_ids.append(3)
    assert cache.admit(request)
    cache.compute(request)
    assert cache.holds(request)


@pytest.mark.parametrize("host_blocks", [2, 0])
def test_a_space_that_is_too_small_changes_nothing(caching: bool, host_blocks: int) -> None:
    cache = Cache(caching=caching, host_blocks=host_blocks)
    request = cache.start("a", range(10))
    child = cache.fork(request, "b")
    cache.take(child, 10)
    before = cache.state()
    assert not cache.swap_out(request)
    assert not cache.swap_out(request, child)
    assert cache.state() == before
    assert cache.manager.pending_copies == [(3, 4)]


def test_exactly_enough_room_is_enough(caching: bool) -> None:
    """Three blocks for the parent and one for the tail that its child has of its own."""
    cache = Cache(caching=caching, host_blocks=4)
    parent = cache.start("a", range(10))
    child = cache.fork(parent, "b")
    cache.compute(child, 10)
    assert cache.manager.swap_cost([parent, child]) == (4, 4, 4 + 4 + 2 + 3)
    assert cache.swap_out(parent, child)
    assert cache.manager.host_pool.num_free_blocks == 0


def test_nothing_computed_is_nothing_to_swap_out() -> None:
    cache = Cache()
    request = Request("a", range(10), SamplingParams(), arrival=0, eos_token_ids=frozenset(), max_model_len=100)
    assert cache.admit(request)
    before = cache.state()
    assert cache.manager.swap_cost([request]) == (0, 0, 0)
    assert not cache.swap_out(request)
    assert cache.state() == before


def test_the_cost_leaves_out_what_is_on_the_host_and_what_others_keep_in_the_prefix_cache() -> None:
    for caching in (True, False):
        cache = Cache(caching=caching)
        parent = cache.start("0", range(10))
        child = cache.fork(parent, "1")
        cache.compute(child, 10)
        kept = 2 if caching else 0
        assert cache.manager.swap_cost([child]) == (3, 3 - kept, 11 - 4 * kept)
        assert cache.manager.swap_cost([parent, child]) == (4, 4, 13)
        assert cache.swap_out(parent)
        assert cache.manager.swap_cost([child]) == (1, 3, 11), "the full blocks have been copied, and nobody else's now"


# --- what several tables share ---


def family_of_three(cache: Cache) -> list[Request]:
    """Two full blocks that all share, and a tail of its own for each."""
    parent = cache.start("0", range(10))
    family = [parent, cache.fork(parent, "1"), cache.fork(parent, "2")]
    for index, member in enumerate(family):
        cache.compute(member, 100 + index)
    return family


def test_what_is_shared_moves_once(caching: bool) -> None:
    cache = Cache(caching=caching)
    family = family_of_three(cache)
    assert cache.swap_out(*family)
    assert cache.manager.pending_swap_outs == [(1, 0), (2, 1), (4, 2), (5, 3), (3, 4)]
    assert [cache.host_ids(member) for member in family] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert [block.ref_cnt for block in cache.host_blocks(family[0])] == [3, 3, 1]
    assert cache.manager.host_pool.num_used_blocks == 5


def test_what_is_shared_moves_once_in_different_steps_too(caching: bool) -> None:
    cache = Cache(caching=caching)
    family = family_of_three(cache)
    moved = []
    for member in reversed(family):
        assert cache.swap_out(member)
        moved.append(cache.manager.pending_swap_outs)
        cache.move()
    assert moved == [[(1, 0), (2, 1), (3, 2)], [(5, 3)], [(4, 4)]]
    assert [block.ref_cnt for block in cache.host_blocks(family[0])] == [3, 3, 1]


def test_what_is_on_the_host_already_needs_no_room(caching: bool) -> None:
    cache = Cache(caching=caching, host_blocks=4)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    cache.compute(child, 10)
    for member in (parent, child):
        assert cache.swap_out(member)
        cache.move()
    assert cache.manager.host_pool.num_free_blocks == 0


@pytest.mark.parametrize("is_child_first", [False, True])
def test_a_shared_tail_moves_with_the_most_that_any_has_in_it(caching: bool, is_child_first: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    child = parent.fork("1")
    child.token_ids.pop()
    child.num_computed_tokens = 9
    cache.manager.fork(parent, child, 9)
    assert cache.swap_out(*((child, parent) if is_child_first else (parent, child)))
    assert [block.num_tokens for block in cache.host_blocks(parent)] == [4, 4, 2]
    assert cache.host_ids(parent) == cache.host_ids(child)
    cache.move()
    cache.overwrite_free_blocks()
    for member in (child, parent):
        member.token_ids.append(77)
        assert cache.admit(member)
        cache.compute(member)
        assert cache.holds(member)


def test_a_family_comes_back_sharing_what_it_shared(caching: bool) -> None:
    cache = Cache(caching=caching)
    manager = cache.manager
    family = family_of_three(cache)
    assert cache.swap_out(*family)
    cache.move()
    cache.overwrite_free_blocks()
    for member in family:
        assert cache.admit(member)
    assert [host for host, _ in manager.pending_swap_ins] == [0, 1, 2, 3, 4], "each block is loaded once"
    first, second, tail = (manager.pool.blocks[i] for i in cache.table(family[0]))
    assert [first.ref_cnt, second.ref_cnt, tail.ref_cnt] == [3, 3, 1]
    assert manager.host_pool.num_used_blocks == 5
    cache.move()
    assert manager.host_pool.num_used_blocks == 0
    assert all(cache.holds(member) for member in family)
    for member in family:
        cache.compute(member, 7, 8, 9)
    assert all(cache.holds(member) for member in family)


def test_one_of_a_family_comes_back_alone_and_the_host_keeps_the_others(caching: bool) -> None:
    cache = Cache(caching=caching)
    family = family_of_three(cache)
    assert cache.swap_out(*family)
    cache.move()
    cache.overwrite_free_blocks()
    assert cache.admit(family[1])
    cache.compute(family[1], 7)
    assert cache.holds(family[1])
    assert [block.ref_cnt for block in cache.host_blocks(family[0])] == [2, 2, 1]
    assert cache.manager.host_pool.num_used_blocks == 4
    assert cache.swap_out(family[1]), "it is not on the host any more, nor at the places of before"
    cache.move()
    assert cache.manager.host_pool.num_used_blocks == 7
    cache.overwrite_free_blocks()
    for member in family:
        assert cache.admit(member)
    cache.move()
    assert all(cache.holds(member) for member in family)


def test_a_shared_tail_that_grew_meanwhile_has_a_copy_of_its_own(caching: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    assert cache.swap_out(child)
    cache.move()
    cache.compute(parent, 99)
    assert cache.table(parent) == [1, 2, 3], "alone again, it wrote in place"
    assert cache.swap_out(parent)
    assert cache.manager.pending_swap_outs == [(3, 3)]
    assert (cache.host_ids(child), cache.host_ids(parent)) == ([0, 1, 2], [0, 1, 3])
    cache.move()
    cache.overwrite_free_blocks()
    for member in (child, parent):
        assert cache.admit(member)
    cache.compute(child, 77)
    assert cache.holds(child)
    assert cache.holds(parent)


def test_a_shared_tail_that_did_not_grow_is_shared_and_copied_on_write(caching: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    assert cache.swap_out(parent, child)
    assert cache.host_ids(parent) == cache.host_ids(child) == [0, 1, 2]
    cache.move()
    cache.overwrite_free_blocks()
    parent.token_ids.append(77)
    child.token_ids.append(88)
    assert cache.admit(parent)
    assert cache.admit(child)
    loaded = dict(cache.manager.pending_swap_ins)
    assert list(loaded) == [0, 1, 2]
    own = cache.table(child)[2]
    assert cache.manager.pending_copies == [(loaded[2], own)], "loaded for the parent, then copied for the child"
    cache.move()
    for member in (parent, child):
        cache.compute(member)
        assert cache.holds(member)


def test_a_block_that_was_handed_out_again_is_not_taken_for_its_old_copy() -> None:
    """The same device block, another filling."""
    cache = Cache(num_blocks=4, caching=False)
    first = cache.start("a", range(10))
    assert cache.swap_out(first)
    cache.move()
    second = cache.start("b", range(100, 110))
    assert sorted(cache.table(second)) == [1, 2, 3]
    assert cache.swap_out(second)
    assert cache.manager.host_pool.num_used_blocks == 6
    cache.move()
    for request in (first, second):
        assert cache.admit(request)
        cache.move()
        assert cache.holds(request)
        cache.manager.free(request)


# --- swapping in ---


def test_the_prefix_cache_is_asked_first() -> None:
    cache = Cache()
    request = cache.start("a", range(14))
    assert cache.swap_out(request)
    cache.move()
    found, num_tokens = cache.manager.get_computed_blocks(request)
    assert (ids(found), num_tokens) == ([("device", 1), ("device", 2), ("device", 3), ("host", 3)], 14)
    other = cache.start("b", range(5))  # holds the first block
    cache.overwrite_free_blocks()
    found, num_tokens = cache.manager.get_computed_blocks(request)
    assert (ids(found), num_tokens) == ([("device", 1), ("host", 1), ("host", 2), ("host", 3)], 14)
    request.token_ids.append(14)
    assert cache.admit(request)
    assert [host for host, _ in cache.manager.pending_swap_ins] == [1, 2, 3]
    assert cache.manager.pool.blocks[1].ref_cnt == 2
    cache.compute(request)
    assert cache.holds(request)
    assert cache.holds(other)
    assert cache.manager.host_pool.num_used_blocks == 0


def test_nothing_is_swapped_in_where_the_prefix_cache_has_it_all() -> None:
    """Even more than was swapped out: another request has computed the same tokens and some that come next."""
    cache = Cache()
    request = cache.start("a", range(8))
    assert cache.swap_out(request)
    cache.move()
    request.token_ids.append(8)
    assert cache.manager.get_computed_blocks(request)[1] == 8
    assert cache.admit(request)
    assert cache.manager.pending_swap_ins == []
    cache.compute(request)
    assert cache.swap_out(request)
    cache.move()
    cache.start("b", range(12))
    request.token_ids += [9, 10, 11, 12]
    found, num_tokens = cache.manager.get_computed_blocks(request)
    assert (ids(found), num_tokens) == ([("device", 1), ("device", 2), ("device", 3)], 12)
    assert cache.admit(request)
    assert cache.manager.pending_swap_ins == []
    cache.compute(request)
    assert cache.holds(request)
    assert cache.manager.host_pool.num_used_blocks == 0


def test_a_hit_inside_a_block_gives_way_to_the_host_block_that_has_more() -> None:
    cache = Cache()
    request = cache.start("a", range(11))
    assert cache.swap_out(request)
    cache.move()
    cache.overwrite_free_blocks()
    other = cache.start("b", [*range(9), 50, 51, 52])
    found, num_tokens = cache.manager.get_computed_blocks(request)
    assert ids(found) == [*(("device", i) for i in cache.table(other)[:2]), ("host", 2)]
    assert num_tokens == 11
    assert cache.admit(request)
    cache.move()
    assert cache.holds(request)


def test_host_blocks_are_held_until_they_were_loaded() -> None:
    cache = Cache(num_blocks=4, caching=False, host_blocks=3)
    request, pool = cache.start("a", range(10)), cache.manager.host_pool
    assert cache.swap_out(request)
    cache.move()
    assert cache.admit(request)
    assert not cache.manager.is_swapped(request)
    assert pool.num_used_blocks == 3
    cache.manager.finish_transfers()
    assert pool.num_used_blocks == 0


def test_an_admission_that_is_taken_back_leaves_it_swapped_out(caching: bool) -> None:
    cache = Cache(caching=caching)
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.move()
    cache.overwrite_free_blocks()
    before = cache.manager.host_pool.num_used_blocks
    assert cache.admit(request)
    cache.manager.retract(request)
    cache.manager.check_integrity()
    assert (cache.manager.pending_swap_ins, cache.manager.usage) == ([], 0.0)
    cache.move()
    assert cache.manager.is_swapped(request)
    assert cache.manager.host_pool.num_used_blocks == before
    assert cache.admit(request)
    cache.move()
    assert cache.holds(request)


def test_too_few_free_blocks_to_load_to_change_nothing(caching: bool) -> None:
    cache = Cache(num_blocks=6, caching=caching)
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.move()
    cache.start("b", range(100, 110))
    before = cache.state()
    assert not cache.admit(request)
    assert cache.state() == before


def test_a_block_loaded_for_two_tables_is_published_once() -> None:
    cache = Cache()
    family = family_of_three(cache)[:2]
    assert cache.swap_out(*family)
    cache.move()
    cache.overwrite_free_blocks()
    for member in family:
        assert cache.admit(member)
    for member in family:
        cache.compute(member, 7)
        assert cache.holds(member)
    shared = cache.table(family[0])[:2]
    assert shared == cache.table(family[1])[:2]
    assert [list(cache.manager.pool._cached[key]) for key in family[0].block_hashes[:2]] == [[i] for i in shared]


# --- blocks that wait for a copy ---


@pytest.mark.parametrize("is_source_freed", [False, True])
def test_the_destination_of_a_pending_copy_is_read_from_its_source(caching: bool, is_source_freed: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    cache.take(child, 77)
    assert cache.manager.pending_copies == [(3, 4)]
    if is_source_freed:
        cache.manager.free(parent)
    assert cache.swap_out(child)
    assert cache.manager.pending_swap_outs == [(1, 0), (2, 1), (3, 2)]
    assert cache.manager.pending_copies == []
    if not is_source_freed:
        cache.compute(parent, 88)  # in the same step, in place
        assert cache.holds(parent)
    cache.move()
    cache.overwrite_free_blocks()
    assert cache.admit(child)
    cache.compute(child)
    assert cache.holds(child)


def test_a_copy_within_a_swapped_out_family_is_read_twice() -> None:
    cache = Cache(caching=False)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    cache.take(child, 77)
    assert cache.swap_out(parent, child)
    assert cache.manager.pending_swap_outs == [(1, 0), (2, 1), (3, 2), (3, 3)]
    cache.move()
    cache.overwrite_free_blocks()
    for member in (parent, child):
        assert cache.admit(member)
        cache.compute(member, 88)
        assert cache.holds(member)


def test_the_source_of_a_pending_copy_may_be_swapped_out(caching: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    child = cache.fork(parent, "1")
    cache.take(child, 77)
    assert cache.swap_out(parent)
    assert cache.manager.pending_copies == [(3, 4)]
    assert cache.manager.pool.blocks[3].ref_cnt == 1, "held for the copy"
    cache.compute(child)
    assert cache.manager.pool.blocks[3].ref_cnt == 0
    assert cache.holds(child)
    cache.overwrite_free_blocks()
    assert cache.admit(parent)
    cache.compute(parent, 88)
    assert cache.holds(parent)


def test_a_block_is_swapped_out_before_its_next_owner_is_loaded_to_it() -> None:
    """Two requests change places in one step, in a pool that holds one of them."""
    cache = Cache(num_blocks=4, caching=False, host_blocks=6)
    first = cache.start("a", range(10))
    assert cache.swap_out(first)
    cache.move()
    second = cache.start("b", range(100, 110))
    assert cache.swap_out(second)
    assert cache.admit(first)
    outs, ins = cache.manager.pending_swap_outs, cache.manager.pending_swap_ins
    assert {device for device, _ in outs} == {device for _, device in ins} == {1, 2, 3}
    cache.move()
    assert cache.holds(first)
    cache.manager.free(first)
    assert cache.admit(second)
    cache.move()
    assert cache.holds(second)


# --- steps that were interrupted before anything moved ---


def loading(cache: Cache) -> Request:
    """A request that was admitted in a step of which nothing has run."""
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.move()
    cache.overwrite_free_blocks()
    request.token_ids.append(10)
    assert cache.admit(request)
    assert len(cache.manager.pending_swap_ins) == 3
    return request


def test_what_was_not_yet_swapped_in_is_still_on_the_host(caching: bool) -> None:
    cache = Cache(caching=caching)
    request = loading(cache)
    assert cache.swap_out(request)
    assert (cache.manager.pending_swap_outs, cache.manager.pending_swap_ins) == ([], [])
    assert cache.manager.host_pool.num_used_blocks == 3
    cache.move()
    cache.overwrite_free_blocks()
    assert cache.admit(request)
    cache.compute(request)
    assert cache.holds(request)
    assert cache.manager.host_pool.num_used_blocks == 0


@pytest.mark.parametrize("is_parent_aborted", [False, True])
def test_a_fork_of_what_is_not_yet_swapped_in_waits_for_the_same_blocks(is_parent_aborted: bool) -> None:
    cache = Cache(caching=False, host_blocks=3)
    other = cache.start("c", range(100, 104))
    parent = loading(cache)
    child = cache.fork(parent, "b")
    assert cache.table(child) == cache.table(parent)
    if is_parent_aborted:
        cache.manager.free(parent)
        assert not cache.swap_out(other), "all of the host's blocks are still to be read"
    assert cache.take(child) is not None
    cache.compute(child)
    assert cache.holds(child)
    cache.manager.free(parent)
    assert cache.manager.host_pool.num_used_blocks == 0


# --- failures, forks, aborts ---


def test_a_failed_step_loses_what_it_swapped_out_and_no_more() -> None:
    cache = Cache(caching=False)
    family = family_of_three(cache)
    other = cache.start("other", range(200, 206))
    assert cache.swap_out(family[0])
    cache.move()
    assert cache.swap_out(family[1])
    assert cache.swap_out(other)
    assert len(cache.manager.pending_swap_outs) == 1 + 2
    cache.manager.abandon_transfers()
    cache.manager.check_integrity()
    assert [cache.manager.is_swapped(one) for one in (*family, other)] == [True, False, False, False]
    assert cache.manager.pending_swap_outs == []
    assert cache.manager.host_pool.num_used_blocks == 3
    assert cache.manager.get_computed_blocks(family[1]) == ([], 0)
    cache.manager.free(family[2])
    cache.overwrite_free_blocks()
    assert cache.admit(family[0])
    cache.move()
    assert cache.holds(family[0])


def test_a_failed_step_loses_all_that_share_what_it_swapped_out() -> None:
    cache = Cache()
    family = family_of_three(cache)
    assert cache.swap_out(*family[:2])
    swapped_fork = cache.fork(family[0], "fork")
    cache.manager.abandon_transfers()
    cache.manager.check_integrity()
    assert not any(map(cache.manager.is_swapped, [*family, swapped_fork]))
    assert cache.manager.host_pool.num_used_blocks == 0


def test_a_failed_step_lets_go_of_host_blocks_that_it_loaded() -> None:
    """Their requests end with it."""
    cache = Cache(caching=False)
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.move()
    assert cache.admit(request)
    cache.manager.abandon_transfers()
    cache.manager.free(request)
    cache.manager.check_integrity()
    assert cache.manager.host_pool.num_used_blocks == 0
    assert cache.manager.pending_swap_ins == []


def test_a_fork_of_what_is_swapped_out_holds_the_same_host_blocks(caching: bool) -> None:
    cache = Cache(caching=caching)
    parent = cache.start("0", range(10))
    assert cache.swap_out(parent)
    child = cache.fork(parent, "1")
    assert cache.manager.is_swapped(child)
    assert cache.host_ids(child) == cache.host_ids(parent) == [0, 1, 2]
    assert [block.ref_cnt for block in cache.host_blocks(child)] == [2, 2, 2]
    assert len(cache.manager.pending_swap_outs) == 3
    cache.move()
    cache.overwrite_free_blocks()
    assert cache.admit(child)
    cache.compute(child, 77)
    assert cache.manager.host_pool.num_used_blocks == 3
    assert cache.admit(parent)
    cache.compute(parent, 88)
    assert cache.holds(parent)
    assert cache.holds(child)


def test_freeing_one_of_a_family_keeps_what_the_others_need(caching: bool) -> None:
    cache = Cache(caching=caching)
    pool, family = cache.manager.host_pool, family_of_three(cache)
    assert cache.swap_out(*family)
    cache.move()
    cache.manager.free(family[0])
    cache.manager.check_integrity()
    assert pool.num_used_blocks == 4
    cache.overwrite_free_blocks()
    for member in family[1:]:
        assert cache.admit(member)
        cache.move()
        assert cache.holds(member)
        cache.manager.free(member)
        cache.manager.free(member)
    assert pool.num_used_blocks == 0


def test_what_nobody_will_read_is_not_swapped_out() -> None:
    """Its host blocks may be taken again in the same step."""
    cache = Cache(caching=False, host_blocks=3)
    aborted, kept = cache.start("a", range(10)), cache.start("b", range(100, 110))
    assert cache.swap_out(aborted)
    cache.manager.free(aborted)
    assert cache.manager.pending_swap_outs == []
    assert cache.swap_out(kept)
    assert sorted(host for _, host in cache.manager.pending_swap_outs) == [0, 1, 2]
    cache.move()
    cache.overwrite_free_blocks()
    assert cache.admit(kept)
    cache.move()
    assert cache.holds(kept)


def test_the_prefix_cache_may_be_reset_while_requests_are_swapped_out() -> None:
    cache = Cache()
    request = cache.start("a", range(10))
    assert cache.manager.reset_prefix_cache() is False
    assert cache.swap_out(request)
    cache.move()
    assert cache.manager.reset_prefix_cache() is True
    assert ids(cache.manager.get_computed_blocks(request)[0]) == [("host", 0), ("host", 1), ("host", 2)]
    assert cache.admit(request)
    cache.move()
    assert cache.holds(request)


def test_all_that_is_swapped_out_can_be_forgotten(caching: bool) -> None:
    cache = Cache(caching=caching)
    moved, pending = cache.start("a", range(10)), cache.start("b", range(100, 110))
    assert cache.swap_out(moved)
    cache.move()
    assert cache.swap_out(pending)
    cache.manager.forget_swapped()
    cache.manager.check_integrity()
    assert cache.manager.reset_prefix_cache() is True
    for request in (moved, pending):
        assert not cache.manager.is_swapped(request)
        assert cache.manager.get_computed_blocks(request) == ([], 0)
    assert cache.manager.pending_swap_outs == []
    assert cache.manager.host_pool.num_used_blocks == 0


# --- the host's pool ---


def test_ids_are_made_when_needed_and_used_again() -> None:
    pool = HostBlockPool(10**12)
    blocks = [pool.take(KVCacheBlock(i), 4) for i in (7, 8)]
    pool.touch(blocks)
    assert [block.block_id for block in blocks] == [0, 1]
    assert (pool.num_used_blocks, pool.num_free_blocks) == (2, 10**12 - 2)
    pool.free_blocks(blocks[:1])
    assert pool.take(KVCacheBlock(9), 4).block_id == 0


def test_a_full_pool_says_so() -> None:
    pool = HostBlockPool(1)
    pool.take(KVCacheBlock(3), 4)
    assert pool.usage == 1.0
    with pytest.raises(IndexError, match="all 1 blocks of the swap space are held"):
        pool.take(KVCacheBlock(4), 4)
    assert HostBlockPool(0).usage == 0.0


def test_a_copy_is_found_by_the_filling_of_its_block_and_by_what_it_holds() -> None:
    pool, block = HostBlockPool(4), KVCacheBlock(3, generation=1)
    assert pool.find(block, 1) is None
    short = pool.take(block, 2)
    pool.touch([short])
    assert pool.find(block, 2) is pool.find(block, 1) is short
    assert pool.find(block, 3) is None
    longer = pool.take(block, 3)
    pool.touch([longer])
    assert pool.find(block, 2) is pool.find(block, 3) is longer
    pool.free_blocks([short])
    assert pool.find(block, 2) is longer
    block.generation += 1
    assert pool.find(block, 1) is None
    with pytest.raises(AssertionError, match=r"block_id=0, .* is freed once too often"):
        pool.free_blocks([short])


@pytest.mark.parametrize(
    ("change", "arithmetic"),
    [
        (lambda pool, block: setattr(block, "ref_cnt", 2), "host block 1: 1 table references != ref_cnt 2"),
        (lambda pool, block: pool._free_ids.append(1), r"held \[0, 1, 2\], free \[1\]\n  3 blocks are held, 2 counted"),
        (lambda pool, block: pool.take(KVCacheBlock(9), 4), "3 blocks are held, 4 counted\n  copies that nobody holds"),
        (lambda pool, block: setattr(block, "block_id", 0), r"held \[0, 0, 2\], free \[\]\n  2 blocks are held, 3"),
    ],
)
def test_integrity_notices_host_counts_that_disagree(change: object, arithmetic: str) -> None:
    cache = Cache()
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.move()
    assert callable(change)
    change(cache.manager.host_pool, cache.host_blocks(request)[1])
    with pytest.raises(AssertionError, match=f"swap space is inconsistent:\n  {arithmetic}"):
        cache.manager.check_integrity()


def test_integrity_notices_a_table_that_lost_a_host_block() -> None:
    cache = Cache()
    request = cache.start("a", range(10))
    assert cache.swap_out(request)
    cache.host_blocks(request).pop()
    with pytest.raises(AssertionError, match="2 blocks are held, 3 counted"):
        cache.manager.check_integrity()
