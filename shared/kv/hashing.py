"""Content addresses of KV blocks: chained hashes over token ids.

A sealed block is named by `block_hash(parent, its tokens)`; the parent of the first block is a root that stands for
everything else that the KV depends on. So equal hashes mean equal prefixes under the same model, and the longest
shared prefix of two sequences is the longest common prefix of their chains.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shared.errors import InvalidRequest

HASH_BYTES = 16
"""Length of every root and block hash."""

_ROOT_PERSON = b"tandem-kv-root"
"""Separates roots from block hashes: no token sequence can produce a root."""
_GROUP_PERSON = b"tandem-kv-group"
"""Separates likewise the names of blocks of the KV groups behind the first."""


@dataclass(frozen=True, slots=True)
class ChainRoots:
    """The rule by which workers, routers and `tandem cache` compute a prompt's chain root. One rule for each model and
    KV format."""

    model_fingerprint: str
    kv_format: str
    """A `KVFormat.name`."""
    layout_version: int
    rope_trained_len: int = 0
    """Dynamic-NTK rope: the trained length in tokens. The rotation of a longer prompt depends on its length, so such
    prompts share blocks only with prompts of the same length. 0 = prompts of every length share."""

    def of(self, salt: str, num_prompt_tokens: int, adapter: str = "") -> bytes:
        """The root for a client's prompt of this length; generated tokens do not count."""
        is_stretched = 0 < self.rope_trained_len < num_prompt_tokens
        rope_len = num_prompt_tokens if is_stretched else 0
        return root_hash(self.model_fingerprint, self.kv_format, self.layout_version, adapter, salt, rope_len)


def root_hash(
    model_fingerprint: str, kv_format: str, layout_version: int, adapter: str = "", salt: str = "", rope_len: int = 0
) -> bytes:
    """The 16-byte root of all chains of one (model, KV format, layout, adapter, tenant salt, rope length).

    Every field is length-prefixed, so no two different tuples hash the same bytes. Callers use `ChainRoots`.
    """
    state = blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    fields = [model_fingerprint, kv_format, str(layout_version), adapter, salt]
    if rope_len:
        fields.append(str(rope_len))
    for field in fields:
        data = field.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """`blake2b(parent ‖ token ids as little-endian u32, digest_size=16)`.

    Raises InvalidRequest when a token id is not an integer in [0, 2^32).
    """
    return blake2b(parent + _little_endian_u32(token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def group_hash(block_hash: bytes, group: int) -> bytes:
    """The name of the block of a KV group behind the first, whose own is `block_hash`."""
    return blake2b(block_hash + group.to_bytes(2, "little"), digest_size=HASH_BYTES, person=_GROUP_PERSON).digest()


def chain(root: bytes, token_ids: Sequence[int], block_size: int, num_groups: int = 1) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, first block first; a last partial block has none. Blocks of several KV
    groups take turns.

    Raises InvalidRequest when a token id is not an integer in [0, 2^32).
    """
    hashes: list[bytes] = []
    extend_chain(hashes, root, token_ids, block_size, num_groups)
    return hashes


def extend_chain(
    hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_groups: int = 1
) -> None:
    """Append to `hashes` the hashes of the blocks of `token_ids` that it does not cover yet.

    `hashes` is the chain of the first `len(hashes) // num_groups * block_size` tokens; those tokens are not read again.
    So a call after every generated token costs almost nothing until a block fills up.
    """
    num_known = len(hashes) // num_groups
    start = num_known * block_size
    num_new = len(token_ids) // block_size - num_known
    if num_new <= 0:
        return
    tokens = memoryview(_little_endian_u32(token_ids[start : start + num_new * block_size])).cast("B")
    block_bytes = 4 * block_size
    parent = hashes[-num_groups] if hashes else root
    for offset in range(0, num_new * block_bytes, block_bytes):
        parent = blake2b(parent + tokens[offset : offset + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
        hashes += [group_hash(parent, group) for group in range(1, num_groups)]


def _little_endian_u32(token_ids: Sequence[int]) -> array[int]:
    """The ids as an array of 4-byte little-endian words, converted in C, not one by one."""
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(
            f"token_ids: every id must be an integer in [0, 2^32): {error}", field="token_ids"
        ) from error
    if sys.byteorder == "big":
        words.byteswap()
    return words
