"""All tiers under one name, so that one suite holds for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from services.kvstore.tiers.shared_disk import SharedDiskTier
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES

MakeTier = Callable[[int], HostArena | DiskTier]


@pytest.fixture(params=["host", "disk", "shared"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """A started tier with room for that many blocks."""
    made: list[HostArena | DiskTier] = []

    def make(num_blocks: int) -> HostArena | DiskTier:
        tier: HostArena | DiskTier
        if request.param == "host":
            tier = HostArena(num_blocks * BLOCK_BYTES + 7, BLOCK_BYTES)
        elif request.param == "disk":
            tier = DiskTier(tmp_path / "blocks", num_blocks * (BLOCK_BYTES + HEADER_BYTES) + 7, BLOCK_BYTES)
        else:
            budget = num_blocks * (BLOCK_BYTES + HEADER_BYTES) + 7
            tier = SharedDiskTier(tmp_path / "shared", "store-0", budget, BLOCK_BYTES)
        tier.start()
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()
        tier.close()
