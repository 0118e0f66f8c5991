"""Three ways to give requests room in one KV cache: two that reserve one contiguous region, and the paged one.

Sizes are in slots; a slot holds the keys and values of one token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()


class Allocator(Protocol):
    """Room for requests in a pool of `slots` slots."""

    slots: int

    @property
    def free_slots(self) -> int:
        """Slots that could be handed out."""

    def demand(self, request: Request) -> int:
        """The slots that a request which has none yet asks for."""

    def allocate(self, request: Request) -> bool:
        """Make room for all `request.num_tokens` tokens. False means that there is none and that nothing changed."""

    def num_allocated(self, request: Request) -> int:
        """The slots that a request holds."""

    def fragmented_slots(self, request: Request) -> int:
        """External fragmentation: free slots in holes that are too small for this waiting request."""

    def free(self, request: Request) -> None:
        """Give back all slots of a request."""


class Region(NamedTuple):
    """`size` consecutive slots from `start` on."""

    start: int
    size: int


class ContiguousAllocator:
    """Reserves one region of `size_of(request)` slots when a request begins, in the first hole that is large enough.

    Holes that touch are merged. A region never grows or moves, so `size_of` must bound the request's length.
    """

    def __init__(self, slots: int, size_of: Callable[[Request], int]) -> None:
        self.slots = slots
        self._size_of = size_of
        self.holes = [Region(0, slots)]  # by start; no two touch
        self._regions: dict[str, Region] = {}

    @property
    def free_slots(self) -> int:
        """Slots in holes of any size."""
        return sum(hole.size for hole in self.holes)

    def demand(self, request: Request) -> int:
        """The size of the region for this request."""
        return self._size_of(request)

    def allocate(self, request: Request) -> bool:
        """Take a region at the first call; later calls only check that the request has not outgrown it."""
        region = self._regions.get(request.request_id)
        if region is None:
            region = self._first_fit(self.demand(request))
            if region is None:
                return False
            self._regions[request.request_id] = region
        assert request.num_tokens <= region.size, f"{request.request_id!r} has outgrown its {region.size} slots"
        return True

    def region(self, request: Request) -> Region:
        """Where a request's slots are."""
        return self._regions[request.request_id]

    def num_allocated(self, request: Request) -> int:
        """The size of the request's region."""
        return self.region(request).size

    def fragmented_slots(self, request: Request) -> int:
        """Slots in holes smaller than the region that the request asks for."""
        demand = self.demand(request)
        return sum(hole.size for hole in self.holes if hole.size < demand)

    def free(self, request: Request) -> None:
        """Turn the request's region into a hole, merged with its neighbours."""
        holes = sorted([*self.holes, self._regions.pop(request.request_id)])
        self.holes = holes[:1]
        for hole in holes[1:]:
            last = self.holes[-1]
            if last.start + last.size == hole.start:
                self.holes[-1] = Region(last.start, last.size + hole.size)
            else:
                self.holes.append(hole)

    def _first_fit(self, size: int) -> Region | None:
        for index, hole in enumerate(self.holes):
            if hole.size >= size:
                rest = Region(hole.start + size, hole.size - size)
                self.holes[index : index + 1] = [rest] if rest.size else []
                return Region(hole.start, size)
        return None


class PagedAllocator:
    """pagegraph's own `KVCacheManager` over the same slots: blocks of `block_size` slots, taken as tokens come.

    Its null block, which is never handed out, is one of the pool's. No prefix is shared.
    Raises ValueError when the pool is no whole number of blocks.
    """

    def __init__(self, slots: int, block_size: int) -> None:
        if slots % block_size:
            raise ValueError(f"slots={slots} is no multiple of block_size={block_size}: change one of them")
        self.slots = slots
        self.manager = KVCacheManager(slots // block_size, block_size, enable_prefix_caching=False)
        self._num_blocks: Counter[str] = Counter()

    @property
    def free_slots(self) -> int:
        """Slots of free blocks."""
        return self.manager.pool.num_free_blocks * self.manager.block_size

    def demand(self, request: Request) -> int:
        """Whole blocks for the tokens that the request has now."""
        return self.manager.num_blocks_for(request.num_tokens) * self.manager.block_size

    def allocate(self, request: Request) -> bool:
        """Take the blocks that are missing for the request's tokens."""
        blocks = self.manager.allocate_slots(request, request.num_tokens)
        if blocks is None:
            return False
        self._num_blocks[request.request_id] += len(blocks)
        return True

    def num_allocated(self, request: Request) -> int:
        """The slots of the request's blocks."""
        return self._num_blocks[request.request_id] * self.manager.block_size

    def fragmented_slots(self, request: Request) -> int:
        """None: a request's blocks may lie anywhere."""
        return 0

    def free(self, request: Request) -> None:
        """Free the request's blocks."""
        self.manager.free(request)
        del self._num_blocks[request.request_id]
