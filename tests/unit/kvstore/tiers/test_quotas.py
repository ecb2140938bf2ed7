"""Quotas and pins: after any operations no tenant is above its quota, no pinned block is gone, and every byte is
counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.tiers.accounts import OTHER, Quotas
from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from services.kvstore.tiers.lru import BlockLru
from services.kvstore.tiers.pins import Pin, PinBook
from services.kvstore.tiers.stack import TierStack
from services.kvstore.tiers.tier import BlockTier
from shared.errors import ConfigError, InvalidRequest, NotFound, StoreUnavailable
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block

BUDGET, PIN_BUDGET = 100, 40
QUOTAS = Quotas(default=60, named={"small": 30, "free": 0})
TENANTS = ("small", "free", "a", "b")
NAMES = [bytes([i]) * 16 for i in range(24)]

uses = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 23), st.integers(1, 45), st.sampled_from(TENANTS)),
        st.tuples(st.just("use"), st.integers(0, 23), st.just(0), st.just("")),
        st.tuples(st.just("drop"), st.integers(0, 23), st.just(0), st.just("")),
        st.tuples(st.just("pin"), st.integers(0, 20), st.integers(1, 15), st.sampled_from(TENANTS)),
        st.tuples(st.just("unpin"), st.integers(0, 20), st.just(0), st.just("")),
    ),
    max_size=80,
)


@given(uses)
def test_any_use_keeps_to_budget_quotas_and_pins_and_counts_every_byte(uses: list[tuple[str, int, int, str]]) -> None:
    lru = BlockLru(BUDGET, QUOTAS, PIN_BUDGET)
    held: dict[bytes, tuple[int, str]] = {}
    pins: dict[str, tuple[bytes, ...]] = {}
    published: set[bytes] = set()
    for use, number, size, tenant in uses:
        name = NAMES[number]
        if use == "put" and name not in held and lru.can_fit(size, tenant):
            over = max(0, lru.accounts.of(tenant).used_bytes + size - (QUOTAS.of(tenant) or BUDGET))
            excess = max(0, lru.used_bytes + size - BUDGET)
            before = {other: lru.accounts.of(other).used_bytes for other in TENANTS}
            victims = lru.victims(size, tenant)
            assert not {victim for victim in victims if any(victim in pinned for pinned in pins.values())}
            if over >= excess:  # its own quota is what is spent: nobody else pays
                assert {held[victim][1] for victim in victims} <= {tenant}
            for victim in victims:
                lru.evict(victim)
                del held[victim]
            lru.add(name, size, tenant)
            held[name] = size, tenant
            if over >= excess:
                assert all(lru.accounts.of(other).used_bytes == before[other] for other in TENANTS if other != tenant)
        elif use == "use" and name in held:
            lru.hit(name)
        elif use == "drop" and name in held:
            lru.drop(name)
            del held[name]
        elif use == "pin" and str(number) not in pins:
            wanted = tuple(NAMES[number : number + 3])
            if lru.pin(str(number), wanted, size, tenant):
                pins[str(number)] = wanted
        elif use == "unpin":
            lru.unpin(str(number))
            pins.pop(str(number), None)
        sealed, evicted = lru.drain()
        published = (published | set(sealed)) - set(evicted)
        assert published == set(held) == set(lru.hashes())
        assert lru.used_bytes == sum(size for size, _ in held.values()) <= BUDGET
        assert lru.pins.used_bytes <= PIN_BUDGET
        sums, counts = Counter[str](), Counter[str]()
        for size, owner in held.values():
            sums[owner] += size
            counts[owner] += 1
        for owner in TENANTS:
            account = lru.accounts.of(owner)
            assert (account.used_bytes, account.num_blocks) == (sums[owner], counts[owner])
            assert not QUOTAS.of(owner) or account.used_bytes <= QUOTAS.of(owner)
            assert set(account.order) == {n for n in held if held[n][1] == owner and n not in lru.pins}
        assert lru.accounts.all().keys() - {OTHER} <= set(TENANTS)
        for pinned in pins.values():
            assert all(name in lru.pins for name in pinned)


def test_a_tenant_above_its_quota_loses_its_own_least_recently_used() -> None:
    lru = BlockLru(100, Quotas(default=30))
    for number, tenant in enumerate(["a", "b", "a", "a", "b"]):
        lru.add(NAMES[number], 10, tenant)
    lru.use(NAMES[0])
    assert lru.victims(10, "a") == [NAMES[2]]
    assert lru.victims(20, "a") == [NAMES[2], NAMES[3]]
    assert lru.victims(10, "b") == []
    assert not lru.wants(NAMES[9], 10, "a")
    assert lru.wants(NAMES[9], 10, "a")
    assert lru.wants(NAMES[10], 10, "c")
    assert not lru.wants(NAMES[11], 31, "c")


def test_accounts_of_tenants_that_hold_nothing_are_forgotten_with_their_counts_kept() -> None:
    lru = BlockLru(100, Quotas(named={"kept": 50}))
    for number, tenant in enumerate(["kept", "gone"]):
        lru.add(NAMES[number], 10, tenant)
        lru.hit(NAMES[number])
        lru.evict(NAMES[number])
    found = {tenant: (account.num_hits, account.num_evicted) for tenant, account in lru.accounts.all().items()}
    assert found == {"kept": (1, 1), OTHER: (1, 1)}


def test_a_pinned_block_is_taken_at_once_and_outlives_a_flood() -> None:
    lru = BlockLru(40, pin_budget_bytes=20)
    assert lru.pin("p", NAMES[:2], 10, "t")
    assert not lru.pin("q", NAMES[2:3], 10, "t")
    for number in range(4, 8):
        lru.add(NAMES[number], 10)
    assert lru.wants(NAMES[0], 10, "t")
    for number in (0, 1, 8, 9, 10, 11):
        for victim in lru.victims(10, "t"):
            lru.evict(victim)
        lru.add(NAMES[number], 10, "t")
    assert set(lru.hashes()) == {NAMES[0], NAMES[1], NAMES[10], NAMES[11]}
    lru.unpin("p")
    assert lru.victims(30, "t") == [NAMES[10], NAMES[11], NAMES[0]]
    assert lru.pin("q", NAMES[2:3], 10, "t")


def test_a_block_that_two_pins_name_counts_once_and_stays_until_both_are_gone() -> None:
    lru = BlockLru(100, pin_budget_bytes=30)
    assert lru.pin("p", NAMES[:2], 10, "t")
    assert lru.pin("q", NAMES[:3], 10, "t")
    assert lru.pins.used_bytes == 30
    lru.unpin("q")
    assert NAMES[0] in lru.pins
    assert NAMES[2] not in lru.pins
    lru.unpin("p")
    assert (lru.pins.used_bytes, lru.pins.names) == (0, ())


def test_pins_of_a_tenant_stay_within_its_quota() -> None:
    lru = BlockLru(100, Quotas(default=20), pin_budget_bytes=50)
    assert lru.pin("p", NAMES[:2], 10, "a")
    assert not lru.pin("q", NAMES[2:3], 10, "a")
    assert lru.pin("q", NAMES[2:3], 10, "b")


def put(tier: BlockTier, number: int, tenant: str) -> None:
    data = memoryview(block(number))
    tier.put(HASHES[number], data, block_checksum(data), tenant)


def started(folder: Path, num_blocks: int, quotas: Quotas | None = None) -> DiskTier:
    return DiskTier(folder, num_blocks * (BLOCK_BYTES + HEADER_BYTES), BLOCK_BYTES, quotas, 0.5)


def test_quotas_hold_over_a_restart_of_the_disk_tier(tmp_path: Path) -> None:
    tier = started(tmp_path, 10)
    tier.start()
    for number in range(6):
        put(tier, number, "a" if number % 2 else "b")
    tier.close()
    tier = started(tmp_path, 10, Quotas(named={"a": 2 * (BLOCK_BYTES + HEADER_BYTES)}))
    tier.start()
    assert tier.drain_events().sealed == [HASHES[number] for number in (0, 2, 3, 4, 5)]
    put(tier, 7, "a")
    assert not tier.holds(HASHES[3])
    assert {tier.blocks.tenant_of(HASHES[number]) for number in (5, 7)} == {"a"}
    tier.close()


def test_a_quota_too_small_for_one_block_stops_the_start_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        HostArena(1 << 20, BLOCK_BYTES, Quotas(named={"acme": BLOCK_BYTES - 1}))
    assert caught.value.field == "tenant_quotas.acme.host_bytes"
    with pytest.raises(ConfigError) as caught:
        started(tmp_path, 10, Quotas(default=BLOCK_BYTES))
    assert caught.value.field == "tenant_quota.disk_bytes"


def pin(name: str, *numbers: int, tenant: str = "") -> Pin:
    return Pin(name, tenant, tuple(HASHES[number] for number in numbers), BLOCK_BYTES)


def stack(tmp_path: Path, num_blocks: int = 8) -> TierStack:
    tier = started(tmp_path, num_blocks)
    tiers = TierStack([tier], tmp_path)
    tiers.load_pins()
    tier.start()
    return tiers


def test_pins_outlive_the_process_and_shrinking_budgets(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    for number in range(8):
        put(tiers.tiers[0], number, "t")
    state = tiers.pin(pin("system", 0, 1, 9, tenant="t"))
    assert (state.num_held, len(state.tiers)) == (2, 1)
    tiers.close()
    tiers = stack(tmp_path, num_blocks=6)
    assert [(state.pin.name, state.pin.tenant, state.num_held) for state in tiers.pins()] == [("system", "t", 2)]
    assert {HASHES[number] for number in (0, 1, 4, 5, 6, 7)} == set(tiers.tiers[0].blocks.hashes())
    tiers.unpin("system")
    with pytest.raises(NotFound, match="system"):
        tiers.unpin("system")
    tiers.close()
    assert PinBook(tmp_path).all() == []


def test_a_pin_without_room_changes_nothing(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    tiers.pin(pin("p", 0, 1))
    with pytest.raises(InvalidRequest, match="bytes pinned") as caught:
        tiers.pin(pin("p", *range(5)))
    assert caught.value.field == "prefix"
    assert [len(state.pin.block_hashes) for state in tiers.pins()] == [2]
    assert tiers.tiers[0].blocks.pins.hashes("p") == (HASHES[0], HASHES[1])
    tiers.close()


def test_a_pin_that_cannot_be_kept_over_a_restart_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = stack(tmp_path)

    def read_only(*_arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", read_only)
    with pytest.raises(StoreUnavailable, match="Read-only"):
        tiers.pin(pin("p", 0))
    assert (tiers.pins(), HASHES[0] in tiers.tiers[0].blocks.pins) == ([], False)
    tiers.close()


def test_a_damaged_pin_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text("[{]")
    with pytest.raises(ConfigError, match="delete it") as caught:
        stack(tmp_path)
    assert caught.value.field == "disk_folder"


def test_a_flush_drops_one_tenants_blocks_or_all_and_tells_the_index(tmp_path: Path) -> None:
    tiers = stack(tmp_path)
    for number in range(6):
        put(tiers.tiers[0], number, "a" if number < 2 else "b")
    tiers.pin(pin("p", 2))
    tiers.tiers[0].drain_events()
    assert tiers.flush("a") == (2, 2 * (BLOCK_BYTES + HEADER_BYTES))
    assert tiers.tiers[0].drain_events().evicted == HASHES[:2]
    assert tiers.flush()[0] == 4
    assert (tiers.tiers[0].blocks.used_bytes, list(tmp_path.glob("??/*.kv"))) == (0, [])
    assert [state.num_held for state in tiers.pins()] == [0]
    tiers.close()
