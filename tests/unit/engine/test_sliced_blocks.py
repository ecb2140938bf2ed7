"""Two orders that a leader's commands to its ranks' pools have to keep, and their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from shared.collectives.rank_links import RankLinks, Ways
from shared.engine.group.own_slices import SliceForm
from shared.engine.group.slice_server import SliceServer
from shared.engine.group.sliced_blocks import SlicedBlocks
from shared.engine.plan import BlockCopy
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.pool_memory import HostArena
from shared.errors import RankLost
from shared.kv.layout import BlockLayout, KVFormat
from shared.model.config.model_config import ModelConfig
from shared.model.ranks.block_slices import block_slices
from shared.model.ranks.shard import Degrees
from tests.unit.collectives.in_threads import joined, needs_library

pytestmark = needs_library

DEADLINE_S = 300.0
NUM_BLOCKS = 5
LAYOUT = BlockLayout(2, 16, KVFormat("float32", 2, 8))
OWN = BlockLayout(2, 16, KVFormat("float32", 1, 8))
OUT = (BlockCopy(1, 0, True),)


class WatchedArena(HostArena):
    """An arena with an event that is set when a thread begins to wait for it."""

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__(OWN, 2, pool, DeviceLink(pool.device))
        self.is_awaited = threading.Event()

    def wait_for_run(self, number: int) -> None:
        if number > self.num_runs:
            self.is_awaited.set()
        super().wait_for_run(number)


class Side:
    """A rank's pool, and what copies its blocks."""

    def __init__(self, links: RankLinks) -> None:
        self.links = links
        self.pool = torch.randint(256, OWN.shape(NUM_BLOCKS), dtype=torch.uint8)
        self.arena = WatchedArena(self.pool)


@pytest.fixture
def sides() -> Iterator[tuple[SlicedBlocks, Side, Side]]:
    """The leader's blocks, then each rank's side; the second rank's server runs."""
    config = cast(ModelConfig, SimpleNamespace(num_layers=2, num_kv_heads=2))
    form = SliceForm(LAYOUT, block_slices(config, Degrees(2)))
    link = DeviceLink(torch.device("cpu"))
    with joined(Ways(2, 1, senders=(0, 1))) as links:
        leader, follower = map(Side, links)
        blocks = SlicedBlocks(form, leader.links, leader.pool, link, leader.arena)
        server = SliceServer(form, follower.links, follower.pool, link, follower.arena)
        server.start()
        yield blocks, leader, follower
        for each in links:
            each.fail(0)  # ends what a test that failed has left waiting
        server.join()


def whole(leader: Side, follower: Side, block_id: int) -> torch.Tensor:
    return torch.cat([leader.pool[block_id], follower.pool[block_id]], dim=2)


def read(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(LAYOUT.shape(1)[1:])


def test_a_command_waits_for_the_copies_of_the_plans_before_it(sides: tuple[SlicedBlocks, Side, Side]) -> None:
    """A block swapped in by a plan is asked for at once, when a follower has yet to see the plan."""
    blocks, leader, follower = sides
    for side in (leader, follower):
        side.arena.run(OUT)
        side.pool[2] = 0
    leader.arena.run((BlockCopy(2, 0, False),))
    with ThreadPoolExecutor(1) as loop:
        asked = loop.submit(blocks.outgoing, [2])
        assert follower.arena.is_awaited.wait(DEADLINE_S)
        follower.arena.run((BlockCopy(2, 0, False),))
        found = read(asked.result(DEADLINE_S)[0])
    assert torch.equal(found, whole(leader, follower, 1))


def test_blocks_are_stored_on_every_rank_when_the_leader_goes_on(sides: tuple[SlicedBlocks, Side, Side]) -> None:
    blocks, leader, follower = sides
    for _ in range(20):
        arrived = list(zip((4, 0), blocks.incoming((4, 0)), strict=True))
        for _, memory in arrived:
            read(memory).random_()
        blocks.store(arrived)
        for block_id, memory in arrived:
            assert torch.equal(read(memory), whole(leader, follower, block_id))


def test_who_wants_a_block_of_a_group_that_has_ended_is_told(sides: tuple[SlicedBlocks, Side, Side]) -> None:
    blocks, _, _ = sides
    blocks.close()
    blocks.close()
    with pytest.raises(RankLost):
        blocks.outgoing([0])
    with pytest.raises(RankLost):
        blocks.checksums([0])


def test_a_lost_rank_ends_the_wait_for_its_slice(sides: tuple[SlicedBlocks, Side, Side]) -> None:
    blocks, leader, follower = sides
    leader.arena.run(OUT)  # which the follower will never see
    with ThreadPoolExecutor(1) as loop:
        asked = loop.submit(blocks.outgoing, [2])
        assert follower.arena.is_awaited.wait(DEADLINE_S)
        leader.links.fail(1)
        with pytest.raises(RankLost) as lost:
            asked.result(DEADLINE_S)
        assert lost.value.details["rank"] == 1
        follower.arena.run(OUT)  # lets its thread go
