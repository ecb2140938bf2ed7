"""What is retained gives way last, for its time, within a share of tier and quota; low priority gives way first."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.tiers.accounts import Quotas
from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from services.kvstore.tiers.lru import MIN_OFFERS, MOST_RETAINED, BlockLru
from services.kvstore.tiers.order import PLAIN, Keep
from services.kvstore.tiers.stack import TierStack
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block

NAMES = [bytes([i]) * 16 for i in range(64)]
HOUR, LOW = Keep(3600.0), Keep(is_low=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fill(lru: BlockLru, names: list[bytes], keep: Keep = PLAIN, tenant: str = "") -> None:
    for name in names:
        for victim in lru.victims(10, tenant):
            lru.evict(victim)
        lru.add(name, 10, tenant, keep)


def test_low_goes_first_then_the_others_then_the_retained() -> None:
    lru = BlockLru(60, clock=Clock())
    fill(lru, NAMES[:2], HOUR)
    fill(lru, NAMES[2:4])
    fill(lru, NAMES[4:6], LOW)
    assert lru.victims(60) == [*NAMES[4:6], *NAMES[2:4], *NAMES[:2]]
    lru.use(NAMES[4], PLAIN)  # a use without low priority: it is as others from now on
    assert lru.victims(60) == [NAMES[5], NAMES[2], NAMES[3], NAMES[4], *NAMES[:2]]
    lru.use(NAMES[2], HOUR)
    assert lru.victims(60) == [NAMES[5], NAMES[3], NAMES[4], NAMES[0], NAMES[1], NAMES[2]]


def test_renewing_a_block_for_ever_takes_no_more_memory() -> None:
    clock = Clock()
    lru = BlockLru(40, clock=clock)
    fill(lru, NAMES[:2], HOUR)
    for _ in range(3 * MIN_OFFERS):
        clock.now += 1
        lru.hit(NAMES[0])
    assert len(lru._due) <= MIN_OFFERS
    clock.now += 3599
    assert lru.victims(40) == [NAMES[1], NAMES[0]]
    assert lru.retained_bytes == 10


def test_a_use_renews_the_time_and_after_it_the_block_goes_before_others() -> None:
    clock = Clock()
    lru = BlockLru(40, clock=clock)
    fill(lru, NAMES[:2], Keep(300.0))
    fill(lru, NAMES[2:4])
    clock.now += 299
    lru.hit(NAMES[1])
    clock.now += 2
    assert lru.victims(40) == [NAMES[0], NAMES[2], NAMES[3], NAMES[1]]
    assert lru.retained_bytes == 10
    clock.now += 300
    assert lru.victims(40) == [NAMES[0], NAMES[1], NAMES[2], NAMES[3]]
    assert lru.retained_bytes == 0


def test_a_retained_block_is_wanted_at_its_first_offer_and_a_stream_of_others_leaves_it() -> None:
    lru = BlockLru(100, clock=Clock())
    fill(lru, NAMES[:10])
    assert not lru.wants(NAMES[10], 10)
    assert lru.wants(NAMES[11], 10, "", HOUR)
    fill(lru, [NAMES[11]], HOUR)
    fill(lru, NAMES[20:29])
    lru.hit(NAMES[11])
    assert lru.num_hint_hits == 0  # it would still be here
    fill(lru, NAMES[29:39])
    assert NAMES[11] in lru
    lru.hit(NAMES[11])
    assert lru.num_hint_hits == 1


def test_at_most_a_share_of_the_tier_and_of_a_quota_is_retained() -> None:
    lru = BlockLru(200, Quotas(named={"small": 40}), clock=Clock())
    fill(lru, NAMES[:4], HOUR, "small")
    assert lru.accounts.of("small").retained_bytes == 40 * MOST_RETAINED // 100
    fill(lru, NAMES[4:20], HOUR, "big")
    assert lru.retained_bytes == 200 * MOST_RETAINED // 100
    fill(lru, NAMES[20:22], PLAIN, "small")  # at its quota: it evicts its own, the least wanted first
    assert NAMES[0] not in lru
    assert all(name in lru for name in NAMES[4:20])
    assert lru.accounts.of("small").used_bytes == 40


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("put", "use", "drop", "pin", "unpin", "pass")),
            st.integers(0, 23),
            st.integers(1, 20),
            st.sampled_from(("small", "a", "b")),
            st.sampled_from((PLAIN, LOW, HOUR, Keep(300.0))),
        ),
        max_size=80,
    )
)
def test_any_use_keeps_the_bounds_and_counts_every_byte(uses: list[tuple[str, int, int, str, Keep]]) -> None:
    clock = Clock()
    lru = BlockLru(100, Quotas(named={"small": 30}), 40, clock)
    for use, number, size, tenant, keep in uses:
        name = NAMES[number]
        if use == "put" and name not in lru and lru.can_fit(size, tenant):
            for victim in lru.victims(size, tenant):
                lru.evict(victim)
            lru.add(name, size, tenant, keep)
        elif use == "use" and name in lru:
            lru.use(name, keep)
        elif use == "drop" and name in lru:
            lru.drop(name)
        elif use == "pin" and f"p{number}" not in lru.pins.names:
            lru.pin(f"p{number}", NAMES[number : number + 2], size, tenant)
        elif use == "unpin":
            lru.unpin(f"p{number}")
        else:
            clock.now += 200
        accounts = lru.accounts.all()
        assert lru.used_bytes == sum(lru.size_of(held) for held in lru.hashes()) <= 100
        assert lru.retained_bytes == sum(account.retained_bytes for account in accounts.values()) <= 75
        assert accounts.get("small") is None or accounts["small"].retained_bytes <= 22
        assert all(account.used_bytes <= 30 for name, account in accounts.items() if name == "small")
    clock.now += 4000
    lru.victims(1)
    assert lru.retained_bytes == 0


def test_what_is_retained_is_so_after_a_restart_and_in_the_faster_tier(tmp_path: Path) -> None:
    size = BLOCK_BYTES + HEADER_BYTES
    disk = DiskTier(tmp_path, 8 * size, BLOCK_BYTES)
    disk.start()
    for number, keep in enumerate((HOUR, PLAIN, LOW)):
        data = memoryview(block(number))
        disk.put(HASHES[number], data, block_checksum(data), "t", keep)
    disk.close()
    again = DiskTier(tmp_path, 8 * size, BLOCK_BYTES)
    again.start()
    assert [again.blocks.keep_of(name) for name in HASHES[:3]] == [HOUR, PLAIN, LOW]
    assert again.blocks.victims(8 * size) == [HASHES[2], HASHES[1], HASHES[0]]
    arena = HostArena(2 * BLOCK_BYTES, BLOCK_BYTES)
    arena.start()
    stack = TierStack([again])
    stack.add_fastest(arena)
    assert stack.read(HASHES[0], memoryview(bytearray(BLOCK_BYTES))) is not None
    assert arena.blocks.keep_of(HASHES[0]) == HOUR
    stack.close()
