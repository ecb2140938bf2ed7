"""Blocks of one adapter are never another's, nor the base model's: every hash begins with its digest."""

from __future__ import annotations

import random

import pytest

from shared.kv.hashing import ChainRoots, chain
from shared.kv.pool import BlockPool

ROOTS = ChainRoots("a model", "float32", 1, rope_trained_len=12)
DIGESTS = ("", "a" * 32, "b" * 32, "a" * 31 + "c")
"""The base model, two adapters, and one of them reloaded."""
SALTS = ("", "t", "a" * 32)


@pytest.mark.parametrize("count", [4000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_lookup_finds_a_block_of_another_adapter_or_salt(count: int) -> None:
    """The same few prompts under all of them, in a pool that evicts, with blocks fetched and handed over by hash."""
    draw, pools = random.Random(7), [BlockPool(64, 4) for _ in range(2)]
    owners: dict[bytes, tuple[str, str]] = {}
    held: list[tuple[BlockPool, list[int]]] = []
    num_hits = 0
    for _ in range(count):
        digest, salt, pool = draw.choice(DIGESTS), draw.choice(SALTS), draw.choice(pools)
        prompt = [token for _ in range(draw.randint(1, 4)) for token in [draw.randrange(2)] * 4]
        hashes = chain(ROOTS.of(salt, len(prompt), digest), prompt, 4)
        found = pool.match(hashes)
        for block_id in found:
            block_hash = pool.hash_of(block_id)
            assert block_hash is not None
            assert owners[block_hash] == (digest, salt)
        num_hits += len(found)
        pool.acquire(found)
        missing = hashes[len(found) :]
        if len(missing) > pool.num_free:
            pool.release(found)
        else:
            new = pool.allocate(len(missing))
            for block_id, block_hash in zip(new, missing, strict=True):
                assert owners.setdefault(block_hash, (digest, salt)) == (digest, salt)
                pool.seal(block_id, block_hash)
            held.append((pool, found + new))
        while len(held) > draw.randint(0, 3):
            owner, block_ids = held.pop(draw.randrange(len(held)))
            owner.release(block_ids)
    assert num_hits > count / 20


def test_a_root_follows_adapter_and_salt_wherever_their_border_lies() -> None:
    roots = [ROOTS.of(salt, 5, digest) for salt in (*SALTS, "ab") for digest in (*DIGESTS, "b", "ab")]
    assert len(set(roots)) == len(roots)
    assert ROOTS.of("t", 5) == ROOTS.of("t", 5, "")
