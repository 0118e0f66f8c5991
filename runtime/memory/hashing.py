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
    parent = parent or b""
    texts = [text.encode("utf-8", "surrogatepass") for pair in extra_keys for text in pair]
    # One pack and one digest: this runs in the step that fills a block.
    layout = f"<q{len(parent)}sq{len(token_ids)}q" + "".join(f"q{len(text)}s" for text in texts)
    rest = [value for text in texts for value in (len(text), text)]
    return blake2b(
        struct.pack(layout, len(parent), parent, 8 * len(token_ids), *token_ids, *rest), digest_size=32
    ).digest()


def extend_block_hashes(
    block_hashes: list[bytes], token_ids: Sequence[int], block_size: int, extra_keys: ExtraKeys = ()
) -> None:
    """Append to `block_hashes`, in place, the hashes of those full blocks of `token_ids` that it does not have yet."""
    parent = block_hashes[-1] if block_hashes else None
    for end in range((len(block_hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end], extra_keys)
        block_hashes.append(parent)
