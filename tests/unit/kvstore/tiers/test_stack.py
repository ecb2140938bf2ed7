"""Several tiers as one: what a failing tier costs, and what a read copies upwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvstore.tiers import stack as stack_module
from services.kvstore.tiers.accounts import OTHER, Accounts, Quotas
from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from services.kvstore.tiers.lru import MIN_OFFERS, OFFERS_PER_BLOCK, BlockLru
from services.kvstore.tiers.pins import Pin, PinBook
from services.kvstore.tiers.stack import READ_RETRY_S, TierStack
from shared.errors import StoreUnavailable
from shared.kv_index.holders import Tier
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block, put

NOW_S = 1000.0


class Rig:
    """A host tier of two blocks over a disk tier of six, and a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = HostArena(2 * BLOCK_BYTES, BLOCK_BYTES)
        self.disk = DiskTier(folder / "blocks", 6 * (BLOCK_BYTES + HEADER_BYTES), BLOCK_BYTES)
        self.stack = TierStack([self.host, self.disk])
        self.now_s = NOW_S
        monkeypatch.setattr(stack_module.time, "monotonic", lambda: self.now_s)
        for tier in (self.host, self.disk):
            tier.start()

    def read(self, number: int) -> Tier | None:
        """The tier that the block came from."""
        into = bytearray(BLOCK_BYTES)
        found = self.stack.read(HASHES[number], memoryview(into))
        assert found is None or bytes(into) == block(number)
        return None if found is None else found.tier

    def break_disk(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        def fail(*_: object) -> None:
            raise StoreUnavailable("the disk is gone", tier="disk")

        for name in names:
            monkeypatch.setattr(self.disk, name, fail)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    yield made
    made.stack.close()


def test_what_a_slower_tier_gives_is_kept_in_the_faster_one(rig: Rig) -> None:
    put(rig.disk, 0)
    assert [rig.read(0), rig.read(0), rig.read(1)] == [Tier.DISK, Tier.HOST, None]
    assert [(tier.counters.num_hits, tier.counters.num_misses) for tier in rig.stack.tiers] == [(1, 2), (1, 1)]


def test_a_tier_that_cannot_be_read_is_left_alone_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig.disk, 0)
    with monkeypatch.context() as broken:
        rig.break_disk(broken, "read")
        assert rig.read(0) is None
    assert rig.stack.failed.keys() == {Tier.DISK}
    for later_s, found in ((0.0, None), (READ_RETRY_S - 0.001, None), (READ_RETRY_S, Tier.DISK)):
        rig.now_s = NOW_S + later_s
        assert rig.stack.holds(HASHES[0]) is (found is not None)
        assert rig.read(0) is found
    assert rig.stack.failed == {}


def test_a_tier_that_cannot_be_written_costs_the_others_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(block(0))
    with monkeypatch.context() as broken:
        rig.break_disk(broken, "put")
        rig.stack.put(HASHES[0], data, block_checksum(data), [rig.disk, rig.host])
    assert (rig.read(0), rig.stack.failed.keys()) == (Tier.HOST, {Tier.DISK})
    rig.stack.put(HASHES[0], data, block_checksum(data), [rig.disk])
    assert rig.stack.failed == {}


def test_a_block_that_one_tier_holds_is_wanted_by_none(rig: Rig) -> None:
    assert rig.stack.wanting(HASHES[0], BLOCK_BYTES) == (rig.host, rig.disk)
    put(rig.disk, 0)
    assert rig.stack.wanting(HASHES[0], BLOCK_BYTES) == ()


def test_a_pin_names_what_is_held_and_by_whom(rig: Rig) -> None:
    put(rig.disk, 0)
    rig.host.blocks.pins.budget_bytes = BLOCK_BYTES  # room for one
    rig.disk.blocks.pins.budget_bytes = 4 * (BLOCK_BYTES + HEADER_BYTES)
    state = rig.stack.pin(Pin("p", "t", (HASHES[0], HASHES[1], HASHES[0]), BLOCK_BYTES))
    assert (state.num_held, state.tiers) == (1, (Tier.DISK,))
    assert rig.stack.pins() == [state]
    assert rig.stack.unpin("p") == state.pin
    assert rig.stack.pins() == []


# --- policy


def test_the_hashes_of_one_tenant_are_its_own() -> None:
    lru = BlockLru(100)
    tenants = ["acme", "".join(["ac", "me"]), "other"]  # equal, not the same object
    for name, tenant in zip((b"a", b"b", b"c"), tenants, strict=True):
        lru.add(name, 10, tenant)
    assert lru.hashes("acme") == [b"a", b"b"]
    assert lru.hashes() == [b"a", b"b", b"c"]


def test_offers_are_remembered_by_what_is_held() -> None:
    held = MIN_OFFERS // OFFERS_PER_BLOCK + 10
    lru = BlockLru(held)
    for number in range(held):
        lru.add(b"held %d" % number, 1)
    for number in range(OFFERS_PER_BLOCK * held):
        assert not lru.wants(b"%d" % number, 1)
    assert lru.wants(b"0", 1)  # the oldest
    assert not lru.wants(b"new", 1)
    assert not lru.wants(b"1", 1)  # forgotten meanwhile


def test_a_budget_is_used_to_its_last_byte_and_no_further() -> None:
    odd = BlockLru(25)
    odd.add(b"a", 10)
    assert not odd.wants(b"b", 16)
    assert odd.wants(b"c", 15)
    lru = BlockLru(30, Quotas(named={"small": 12}))
    lru.add(b"a", 10)
    assert lru.wants(b"b", 20)
    assert not lru.wants(b"c", 21)
    lru.add(b"b", 20)
    with pytest.raises(ValueError, match="does not fit"):
        lru.add(b"d", 1)
    lru.drop(b"b")
    lru.add(b"s", 6, "small")
    assert not lru.wants(b"t", 7, "small")
    assert lru.wants(b"u", 6, "small")
    with pytest.raises(ValueError, match="does not fit"):
        lru.add(b"t", 7, "small")
    with pytest.raises(ValueError, match="held already"):
        lru.add(b"s", 1)


def test_a_dropped_account_is_told_once_it_has_counts() -> None:
    accounts = Accounts(Quotas(named={"kept": 5}))
    for tenant in ("kept", "gone"):
        accounts.of(tenant)
        accounts.settle(tenant)
    assert accounts.all().keys() == {"kept"}
    for hits, evicted in ((2, 0), (0, 3)):
        accounts.of("gone").num_hits, accounts.of("gone").num_evicted = hits, evicted
        accounts.settle("gone")
    assert (accounts.all()[OTHER].num_hits, accounts.all()[OTHER].num_evicted) == (2, 3)
    only_evicted = Accounts(Quotas())
    only_evicted.of("gone").num_evicted = 1
    only_evicted.settle("gone")
    assert only_evicted.all()[OTHER].num_evicted == 1


def test_removing_a_pin_keeps_all_others(tmp_path: Path) -> None:
    book = PinBook(tmp_path)
    for name in ("b", "a", "c"):
        book.put(Pin(name, "t", (HASHES[0],), 1))
    book.remove("b")
    assert [pin.name for pin in book.all()] == ["a", "c"]
    book.put(Pin("a", "u", (HASHES[1],), 2))
    again = PinBook(tmp_path)
    again.load()
    assert again.all() == book.all() == [Pin("c", "t", (HASHES[0],), 1), Pin("a", "u", (HASHES[1],), 2)]


def test_one_byte_beyond_a_quota_costs_one_block_of_ones_own() -> None:
    lru = BlockLru(100, Quotas(named={"t": 10}))
    lru.add(b"other", 5)
    for name in (b"a", b"b"):
        lru.add(name, 5, "t")
    assert lru.victims(1, "t") == [b"a"]
    assert lru.victims(6, "t") == [b"a", b"b"]
    assert lru.victims(85) == []
    assert lru.victims(86) == [b"other"]
