"""Blocks of the host's swap space, where preempted requests keep their keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from runtime.memory.block import KVCacheBlock


@dataclass(slots=True, eq=False)
class HostBlock:
    """A copy of the first `num_tokens` tokens of one filling of a device block.

    `ref_cnt` is the number of swapped-out tables that hold it; `origin` the device block's id and generation.
    """

    block_id: int
    num_tokens: int
    origin: tuple[int, int]
    ref_cnt: int = 0


class HostBlockPool:
    """`num_blocks` blocks of host memory. What several tables share on the device is copied, and held, once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Ids are made when first needed: a swap space can be far larger than what is ever used of it.
        self._num_made = 0
        self._free_ids: list[int] = []
        self._copies: dict[tuple[int, int], HostBlock] = {}  # by origin, the fullest

    @property
    def num_free_blocks(self) -> int:
        """How many blocks can be taken."""
        return self.num_blocks - self._num_made + len(self._free_ids)

    @property
    def num_used_blocks(self) -> int:
        """How many blocks are held."""
        return self.num_blocks - self.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of blocks that are held, in [0, 1]; 0 of a pool without blocks."""
        return self.num_used_blocks / max(1, self.num_blocks)

    def find(self, block: KVCacheBlock, num_tokens: int) -> HostBlock | None:
        """The copy of what is now in a held device block, if it has that many tokens."""
        copy = self._copies.get((block.block_id, block.generation))
        return copy if copy is not None and copy.num_tokens >= num_tokens else None

    def take(self, block: KVCacheBlock, num_tokens: int) -> HostBlock:
        """A block to copy a device block to, not yet held. Raises IndexError when none is free."""
        if not self.num_free_blocks:
            raise IndexError(f"all {self.num_blocks} blocks of the swap space are held")
        if self._free_ids:
            block_id = self._free_ids.pop()
        else:
            block_id, self._num_made = self._num_made, self._num_made + 1
        copy = HostBlock(block_id, num_tokens, (block.block_id, block.generation))
        self._copies[copy.origin] = copy
        return copy

    def touch(self, blocks: Iterable[HostBlock]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[HostBlock]) -> None:
        """Drop a reference to each block; what nobody holds any more is free."""
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is freed once too often"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free_ids.append(block.block_id)
                if self._copies.get(block.origin) is block:
                    del self._copies[block.origin]

    def check_integrity(self, references: Mapping[HostBlock, int]) -> None:
        """Compare all counts with `references`: how many tables hold each block. AssertionError has the arithmetic."""
        problems = list(self._problems(references))
        assert not problems, "swap space is inconsistent:\n  " + "\n  ".join(problems)

    def _problems(self, references: Mapping[HostBlock, int]) -> Iterator[str]:
        for block, count in references.items():
            if block.ref_cnt != count:
                yield f"host block {block.block_id}: {count} table references != ref_cnt {block.ref_cnt}"
        held = {block.block_id for block in references}
        if len(held) != len(references) or held & set(self._free_ids):
            yield f"held {sorted(block.block_id for block in references)}, free {sorted(self._free_ids)}"
        if len(held) != self.num_used_blocks:
            yield f"{len(held)} blocks are held, {self.num_used_blocks} counted"
        if unheld := [copy for copy in self._copies.values() if copy not in references]:
            yield f"copies that nobody holds: {unheld}"
