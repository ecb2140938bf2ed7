"""Slots of adapters, and copies: what is used stays, the least used goes first, and the budgets hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from services.worker.adapters.slots import HostTable, SlotTable
from services.worker.adapters.uses import HALF_LIFE, Uses
from shared.errors import ConfigError


def load(table: SlotTable, digest: str, num_bytes: int = 1) -> int:
    room = table.make_room(digest, num_bytes)
    assert room is not None
    table.filled(digest)
    return room.slot


def test_the_least_recently_used_makes_room_and_a_pinned_one_never_does() -> None:
    table = SlotTable(3, 100)
    slots = {name: load(table, name) for name in "abc"}
    assert sorted(slots.values()) == [1, 2, 3]
    assert table.pin("a") == slots["a"]
    table.unpin("a")  # used last
    assert table.pin("b") == slots["b"]
    room = table.make_room("d", 1)
    assert room is not None
    assert room.emptied == (("c", slots["c"]),)
    assert room.slot == slots["c"]
    assert table.pin("d") is None, "it is not there yet"
    room = table.make_room("e", 1)
    assert room is not None
    assert [digest for digest, _ in room.emptied] == ["a"]
    assert table.make_room("f", 1) is None, "one is pinned, two are being loaded"
    table.unpin("b")
    room = table.make_room("f", 1)
    assert room is not None
    assert [digest for digest, _ in room.emptied] == ["b"]


def test_bytes_make_room_as_slots_do_and_what_never_fits_is_refused_by_the_setting() -> None:
    table = SlotTable(8, 10)
    for name in "abc":
        load(table, name, 3)
    room = table.make_room("d", 6)
    assert room is not None
    assert [digest for digest, _ in room.emptied] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"11 bytes.*10 bytes"):
        table.make_room("e", 11)
    table.check()


def test_where_too_little_would_be_freed_nothing_is() -> None:
    table = SlotTable(8, 10)
    load(table, "a", 5)
    load(table, "b", 5)
    table.pin("b")
    assert table.make_room("c", 6) is None
    assert table.resident == {"a", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_random_uses_never_lose_a_pinned_adapter_nor_a_slot(seed: int) -> None:
    draw = random.Random(seed)
    table = SlotTable(4, 12)
    sizes = {f"a{number}": draw.randint(1, 6) for number in range(9)}
    pins: dict[str, int] = {}
    loading: set[str] = set()
    for _ in range(3000):
        name = draw.choice(list(sizes))
        match draw.randrange(5):
            case 0 | 1:
                slot = table.pin(name)
                assert (slot is not None) == (name in table.resident)
                if slot is not None:
                    pins[name] = pins.get(name, 0) + 1
            case 2 if pins.get(name):
                table.unpin(name)
                pins[name] -= 1
            case 3 if name not in table.resident and name not in loading:
                if (room := table.make_room(name, sizes[name])) is not None:
                    assert all(not pins.get(gone) for gone, _ in room.emptied)
                    loading.add(name)
            case 4 if name in loading:
                loading.discard(name)
                table.filled(name) if draw.random() < 0.8 else table.drop(name)
        table.check()
        assert {name for name, count in pins.items() if count} <= table.resident
        assert {name: count for name, count in pins.items() if count} == {
            name: table.num_pins(name) for name in pins if table.num_pins(name)
        }


def test_one_that_is_used_often_outlasts_one_that_was_used_last_and_goes_when_it_is_used_no_longer() -> None:
    table = SlotTable(2, 100)
    for name in "ab":
        load(table, name)
    for name in "aaab":
        table.pin(name)
        table.unpin(name)
    room = table.make_room("c", 1)
    assert room is not None
    assert [digest for digest, _ in room.emptied] == ["b"]
    table.filled("c")
    for _ in range(200):
        table.pin("c")
        table.unpin("c")
    room = table.make_room("b", 1)
    assert room is not None
    assert [digest for digest, _ in room.emptied] == ["a"]


def test_a_use_counts_half_after_as_many_others_as_its_half_life_for_each_place() -> None:
    found = Uses(2)
    found.add("a")
    assert (found.of("a"), found.of("a", 1), found.of("b", 1)) == ((1.0, 1), (2.0, 1), (1.0, 0))
    for _ in range(HALF_LIFE * 2):
        found.add("b")
    assert found.of("a") == (pytest.approx(0.5), 1)
    assert found.of("a", 1) == (pytest.approx(1.5), 1)


def test_uses_of_more_adapters_than_are_kept_on_record_are_forgotten_from_the_oldest_on(monkeypatch) -> None:
    monkeypatch.setattr("services.worker.adapters.uses.MAX_ADAPTERS", 2)
    found = Uses(1)
    for name in "abac":
        found.add(name)
    assert [found.of(name)[1] for name in "abc"] == [3, 0, 4]


def test_spare_slots_are_those_that_are_free_or_unused() -> None:
    table = SlotTable(3, 100)
    assert table.num_spare(1) == 3
    load(table, "a")
    assert table.num_spare(1) == 3
    table.pin("a")
    assert table.num_spare(1) == 2
    assert table.make_room("b", 1) is not None
    assert table.num_spare(1) == 1, "one is on its way"
    table.filled("b")
    assert table.num_spare(1) == 2


def test_who_asks_which_are_resident_is_not_disturbed_by_one_that_goes_meanwhile() -> None:
    class Digest(str):
        __slots__ = ()
        on_hash: Callable[[], object] = staticmethod(lambda: None)

        def __hash__(self) -> int:
            type(self).on_hash()
            return super().__hash__()

    table = SlotTable(2, 100)
    load(table, Digest("a"))
    load(table, "b")

    def drop_b() -> None:  # as the event loop's thread may, while the metrics page's asks
        if "b" in table:
            table.drop("b")

    Digest.on_hash = staticmethod(drop_b)
    assert "a" in table.resident


def test_as_many_are_spare_as_there_are_bytes_for() -> None:
    table = SlotTable(16, 1024)
    for number in range(12):
        load(table, f"a{number}", 84)
        assert table.num_spare(84) == 12, "none is in use"
    for number in range(12):
        table.pin(f"a{number}")
        assert table.num_spare(84) == 11 - number
    assert table.make_room("b", 84) is None
    assert table.num_spare(16) == 1
    assert table.make_room("b", 16) is not None
    assert table.num_spare(16) == 0


def test_copies_are_kept_of_those_that_are_used_most() -> None:
    uses = Uses(2)
    host = HostTable(10, uses)
    for name in "aaab":
        uses.add(name)
    assert host.keep("a", 6) == ()
    assert host.keep("b", 6) == ("b",), "once, and now once more: less than a"
    uses.add("b")
    uses.add("b")
    assert host.keep("b", 6) == ("a",)
    assert host.keep("c", 11) == ("c",), "it never fits"
    assert ("a" in host, "b" in host, "c" in host, host.used_bytes) == (False, True, False, 6)
    for _ in range(9):
        uses.add("c")
    assert host.keep("c", 11) == ("c",), "nor does it cost others their copies"
    assert "b" in host
    host.drop("b")
    host.drop("b")
    assert host.used_bytes == 0


def test_one_that_is_read_for_a_request_counts_with_that_use() -> None:
    uses = Uses(2)
    host = HostTable(10, uses)
    for name in "ba":
        uses.add(name)
    assert host.keep("a", 6) == ()
    assert host.keep("b", 6) == ("a",), "as often as a on record, and now once more"


def test_copies_stay_where_one_that_was_used_less_comes() -> None:
    uses = Uses(100)
    host = HostTable(10, uses)
    for name in ("a", "b", "b", "b", "b", "c", "c"):
        uses.add(name)
    assert host.keep("a", 2) == host.keep("b", 6) == ()
    assert host.keep("c", 8) == ("c",), "beside b there is no room for it, so a need not go"
    assert ("a" in host, "b" in host) == (True, True)


@pytest.mark.parametrize("seed", range(5))
def test_a_tail_that_is_asked_for_once_costs_fewer_loads_than_if_the_oldest_went(seed: int) -> None:
    draw = random.Random(seed)
    table, oldest, num_loads = SlotTable(8, 100), list[str](), [0, 0]
    for _ in range(4000):
        name = f"a{int(draw.paretovariate(0.6))}"
        if table.pin(name) is None:
            num_loads[0] += 1
            load(table, name)
            table.pin(name)
        table.unpin(name)
        if name in oldest:
            oldest.remove(name)
        else:
            num_loads[1] += 1
        oldest = [*oldest[-7:], name]
    assert num_loads[0] < num_loads[1]
