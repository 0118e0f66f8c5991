"""The chain of block hashes by which equal prefixes find each other.

A block's hash covers its own tokens and, through its parent's hash, everything before it, because keys and values
depend on the whole prefix. The hash is cryptographic: a collision would hand one user's cache to another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

ExtraKeys = tuple[tuple[str, str], ...]
"""What else a prefix depends on, as (kind, value) pairs such as ("salt", "tenant-7")."""


class BlockContent(NamedTuple):
    """What a published block holds: its tokens, after the prefix whose last block hashes to `parent`."""

    block_hash: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> bytes:
    """The 32-byte hash of a block: BLAKE2b over `parent` (None for the first block), its tokens and its extra keys.

    Every part is written with its length and every key with its kind, so no two different inputs share an encoding: an
    adapter named like a salt is another key.
    """
    texts = [text.encode("utf-8", "surrogatepass") for pair in extra_keys for text in pair]
    parts = [parent or b"", struct.pack(f"<{len(token_ids)}q", *token_ids), *texts]
    digest = blake2b(digest_size=32)
    for part in parts:
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def extend_block_hashes(
    block_hashes: list[bytes], token_ids: Sequence[int], block_size: int, extra_keys: ExtraKeys = ()
) -> None:
    """Append to `block_hashes`, in place, the hashes of those full blocks of `token_ids` that it does not have yet."""
    parent = block_hashes[-1] if block_hashes else None
    for end in range((len(block_hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end], extra_keys)
        block_hashes.append(parent)
