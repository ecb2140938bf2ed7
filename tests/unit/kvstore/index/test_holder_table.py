"""The snapshot of the holder table: who lives, what a value means, when it must be read again."""

from __future__ import annotations

import pytest

from services.kvstore.index.holder_table import ENTRY, HolderTable, TableVersion, holder_ids
from shared.errors import Internal
from shared.identity import WorkerRole
from shared.kv_index.holders import Holder, Tier

EPOCH = b"epoch-01"
DEAD, OURS, OTHER = b"\x01\0\0\0", b"\x02\0\0\0", b"\xff\xff\0\0"
FIELDS = {
    b"next": b"65535",
    b"dead": b"4",
    b"\x01w": ENTRY.pack(4, OURS, 1),
    b"\x03" + "ü".encode(): ENTRY.pack(2**64 - 1, OTHER, 2),
}
OUR_HOLDER = Holder("w", 4, WorkerRole.PREFILL, Tier.DEVICE)
OTHER_HOLDER = Holder("ü", 2**64 - 1, WorkerRole.DECODE, Tier.DISK)


def table() -> HolderTable:
    return HolderTable(TableVersion(EPOCH, 3), FIELDS)


def test_only_who_is_in_the_table_lives() -> None:
    assert table().prefix([DEAD + OURS + OTHER]).blocks == ((OUR_HOLDER, OTHER_HOLDER),)
    assert table().live.keys() == {OURS, OTHER}
    assert table().num_deaths == 4


@pytest.mark.parametrize("gap", [None, DEAD, b"\x09\x09\x09\x09", b""])
def test_a_prefix_ends_where_nobody_alive_holds_the_block(gap: bytes | None) -> None:
    assert table().prefix([OURS, OURS, gap, OURS]).blocks == ((OUR_HOLDER,), (OUR_HOLDER,))


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


@pytest.mark.parametrize("value", [OURS[:3], OURS + b"x"])
def test_a_damaged_value_is_told_and_not_taken_for_a_miss(value: bytes) -> None:
    with pytest.raises(Internal, match="damaged"):
        table().prefix([value])


@pytest.mark.parametrize(
    "fields",
    [{b"\x01w": b"short"}, {b"\x09w": ENTRY.pack(1, OURS, 1)}, {b"\x01w": ENTRY.pack(1, OURS, 9)}, {b"dead": b"x"}],
)
def test_a_damaged_table_is_told(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(Internal, match="damaged"):
        HolderTable(TableVersion(EPOCH, 1), fields)


def test_records_and_versions_are_what_the_module_says() -> None:
    assert holder_ids(DEAD + OTHER) == [DEAD, OTHER]
    assert TableVersion.parse(EPOCH + b"\x02\x01" + bytes(6)) == TableVersion(EPOCH, 258)
