"""The hash chain: what two blocks share, and what keeps them apart."""

from __future__ import annotations

from itertools import combinations

from runtime.memory.hashing import extend_block_hashes, hash_block

SALT, ADAPTER = (("salt", "x"),), (("adapter", "x"),)


def test_hash_is_a_repeatable_32_byte_digest() -> None:
    value = hash_block(None, [1, 2, 3, 4], SALT)
    assert len(value) == 32
    assert value == hash_block(None, (1, 2, 3, 4), SALT)


def test_every_part_of_the_input_counts_and_none_runs_into_the_next() -> None:
    parent = hash_block(None, [1])
    variants = [
        hash_block(None, [1, 2]),
        hash_block(None, [2, 1]),
        hash_block(None, [1, 2, 0]),
        hash_block(None, []),
        hash_block(parent, [1, 2]),
        hash_block(None, [1, 2], SALT),
        hash_block(None, [1, 2], ADAPTER),
        hash_block(None, [1, 2], SALT + ADAPTER),
        hash_block(None, [1, 2], (("salt", ""),)),
        hash_block(None, [1, 2], (("salt", "xadapter"), ("", "x"))),
        hash_block(None, [1, 2], (("saltx", "adapterx"),)),
        hash_block(None, [258]),
        hash_block(None, [-1]),
        hash_block(parent[:16], [1, 2]),
    ]
    assert all(a != b for a, b in combinations(variants, 2))


def test_a_lone_surrogate_in_a_salt_is_hashed_too() -> None:
    assert hash_block(None, [1], (("salt", "\ud800"),)) != hash_block(None, [1], (("salt", "\ud801"),))


def test_same_tokens_after_another_first_block_hash_differently() -> None:
    left: list[bytes] = []
    right: list[bytes] = []
    extend_block_hashes(left, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    extend_block_hashes(right, [0, 2, 3, 4, 5, 6, 7, 8], 4)
    assert len(left) == len(right) == 2
    assert left[0] != right[0]
    assert left[1] != right[1]


def test_chain_grows_with_full_blocks_only_and_equals_the_one_made_at_once() -> None:
    tokens = list(range(100, 123))
    grown: list[bytes] = []
    lengths = []
    for length in range(len(tokens) + 1):
        extend_block_hashes(grown, tokens[:length], 4, SALT)
        lengths.append(len(grown))
    assert lengths == [length // 4 for length in range(24)]
    whole: list[bytes] = []
    extend_block_hashes(whole, tokens, 4, SALT)
    assert grown == whole
    assert whole[0] == hash_block(None, tokens[:4], SALT)
    assert whole[1] == hash_block(whole[0], tokens[4:8], SALT)
