"""Blocks given to a store and had from it, against the real pool; checksums are plain numbers here."""

from __future__ import annotations

import pytest

from shared.engine.block_exchange import BlockExchange
from shared.kv.pool import BlockPool

CHAIN = tuple(bytes([i]) * 16 for i in range(6))


class Rig:
    """A pool of 8 blocks whose checksums are what `bytes_in` says."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 4)
        self.bytes_in: dict[int, int] = {}
        self.exchange = BlockExchange(self.pool, lambda ids: [self.bytes_in[block_id] for block_id in ids])

    def cache(self, *hashes: bytes) -> None:
        ids = self.pool.allocate(len(hashes))
        for block_id, name in zip(ids, hashes, strict=True):
            self.pool.seal(block_id, name)
        self.pool.release(ids)


def test_what_arrived_sound_is_found_and_the_rest_is_given_back():
    rig = Rig()
    rig.cache(*CHAIN[:2])
    missing = dict(rig.exchange.prepare("f", CHAIN[:5], num_spare=0))
    assert sorted(missing) == [2, 3, 4]
    assert rig.pool.num_free == 3
    rig.bytes_in = {missing[3]: 30, missing[4]: 41}
    rig.exchange.adopt("f", {4: 40, 3: 30})
    rig.exchange.end("f")
    assert rig.exchange.num_bad_blocks == 1
    assert rig.pool.num_free == 8
    assert len(rig.pool.match(CHAIN)) == 2  # block 2 never came …
    (third,) = rig.pool.match(CHAIN[3:])  # … 3 did, 4 was damaged
    assert rig.pool.checksum_of(third) == 30
    rig.pool.check_integrity()


def test_nothing_is_taken_where_running_sequences_need_the_room():
    rig = Rig()
    rig.cache(*CHAIN[:2])
    assert rig.exchange.prepare("f", CHAIN, num_spare=3) == ()
    assert rig.pool.num_free == 8
    rig.exchange.end("f")
    assert rig.exchange.prepare("f", CHAIN, num_spare=0, times=2) == ()
    assert len(rig.exchange.prepare("g", CHAIN, num_spare=2)) == 4


def test_blocks_that_may_still_be_written_to_stay_taken_until_they_cannot():
    rig = Rig()
    rig.cache(*CHAIN[:1])
    missing = dict(rig.exchange.prepare("f", CHAIN[:5], num_spare=0))
    rig.bytes_in = {missing[1]: 10}
    rig.exchange.adopt("f", {1: 10})
    rig.exchange.end("f", lost={missing[1], missing[2], missing[3]})  # the first one of them came before
    assert rig.pool.num_free == 8 - 2
    rig.exchange.end("f", lost={missing[3]})
    assert rig.pool.num_free == 8 - 1
    rig.exchange.end("f")
    rig.exchange.end("f")
    assert rig.pool.num_free == 8
    rig.pool.check_integrity()


def test_held_blocks_stay_until_they_are_released():
    rig = Rig()
    rig.cache(*CHAIN[:2], CHAIN[4])
    held = rig.exchange.hold("h", CHAIN)
    assert [ship.index for ship in held] == [0, 1, 4]
    assert len(rig.pool.allocate(5)) == 5
    with pytest.raises(Exception, match="needed 1 blocks"):
        rig.pool.allocate(1)
    rig.pool.release([ship.block_id for ship in held])
    assert len(rig.pool.match(CHAIN)) == 2
