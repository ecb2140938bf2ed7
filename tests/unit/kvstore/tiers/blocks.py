"""Blocks for the tests of this folder."""

from __future__ import annotations

import numpy as np

from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.tier import BlockTier
from tests.integration.kvstore.workers import hashes

BLOCK_BYTES = 512
HASHES = hashes(12)


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


def put(tier: BlockTier, number: int) -> None:
    data = memoryview(block(number))
    tier.put(HASHES[number], data, block_checksum(data))


def read(tier: BlockTier, number: int) -> bytes | None:
    into = bytearray(BLOCK_BYTES)
    checksum = tier.read(HASHES[number], memoryview(into))
    assert checksum is None or checksum == block_checksum(memoryview(into))
    return bytes(into) if checksum is not None else None
