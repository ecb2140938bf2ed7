"""The snapshot of the holder table: who lives, what a value means, when it must be read again."""

from __future__ import annotations

import pytest

from services.kvstore.holder_table import HolderTable, TableVersion, identity
from services.kvstore.records import RECORD, block_keys, unpack_records
from shared.errors import Internal
from shared.rpc.block_holders import Holder, Tier, WorkerRole

EPOCH = b"epoch-01"
OLD, NEW, OTHER = identity("w", 5), identity("w", 4), identity("ü", 2**64 - 1)
FIELDS = {
    b"next": b"3",
    b"i:" + OLD: b"1",
    b"i:" + NEW: b"2",
    b"i:" + OTHER: b"3",
    b"h:1": OLD,
    b"h:2": NEW,
    b"h:3": OTHER,
    b"w:w": NEW[:8] + b"\x01",
    "w:ü".encode(): OTHER[:8] + b"\x02",
}
NEW_HOLDER = Holder("w", 4, WorkerRole.PREFILL, Tier.DEVICE)
OTHER_HOLDER = Holder("ü", 2**64 - 1, WorkerRole.DECODE, Tier.DISK)


def table() -> HolderTable:
    return HolderTable(TableVersion(EPOCH, 3), FIELDS)


def test_only_the_newest_incarnation_of_a_name_lives() -> None:
    value = RECORD.pack(1, 1) + RECORD.pack(2, 1) + RECORD.pack(3, 3)
    assert table().prefix([value]).blocks == ((NEW_HOLDER, OTHER_HOLDER),)
    assert table().dead == {1: OLD}


@pytest.mark.parametrize("gap", [None, RECORD.pack(1, 1), RECORD.pack(99, 1), b""])
def test_a_prefix_ends_where_nobody_alive_holds_the_block(gap: bytes | None) -> None:
    value = RECORD.pack(2, 1)
    assert table().prefix([value, value, gap, value]).blocks == ((NEW_HOLDER,), (NEW_HOLDER,))


@pytest.mark.parametrize(
    ("version", "covered"),
    [
        (TableVersion(EPOCH, 2), True),
        (TableVersion(EPOCH, 3), True),
        (TableVersion(EPOCH, 4), False),
        (TableVersion(b"epoch-02", 1), False),
    ],
)
def test_a_newer_version_or_another_epoch_is_not_covered(version: TableVersion, covered: bool) -> None:
    assert table().covers(version) is covered


@pytest.mark.parametrize("value", [RECORD.pack(2, 1)[:4], RECORD.pack(2, 1) + b"x", RECORD.pack(2, 9)])
def test_a_damaged_value_is_told_and_not_taken_for_a_miss(value: bytes) -> None:
    with pytest.raises(Internal, match="damaged"):
        table().prefix([value])


@pytest.mark.parametrize(
    "fields", [{b"h:1": OLD}, {b"h:x": OLD, b"w:w": OLD}, {b"h:1": OLD, b"w:w": OLD[:8] + b"\x09"}]
)
def test_a_damaged_table_is_told(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(Internal, match="damaged"):
        HolderTable(TableVersion(EPOCH, 1), fields)


def test_keys_and_records_are_what_the_module_says() -> None:
    assert block_keys(bytes(16) + b"x" * 16) == [b"b:" + bytes(16), b"b:" + b"x" * 16]
    assert unpack_records(b"\x01\x02\x00\x00\x03") == [(513, Tier.DISK)]
    assert TableVersion.parse(EPOCH + b"\x02\x01" + bytes(6)) == TableVersion(EPOCH, 258)
