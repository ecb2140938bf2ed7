"""The order in which files begin in a parallel run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.order import LAST_WAITING, begun_in_order


@dataclass(frozen=True)
class Item:
    nodeid: str


def files(items) -> list[str]:
    return list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))


def test_waiting_files_come_one_by_one_between_the_others_and_leave_them_the_end():
    computing = [Item(f"tests/unit/quick_{number}.py::test") for number in range(20)]
    waiting = [Item(f"tests/e2e/test_{number}.py::test") for number in range(5)]
    found = files(begun_in_order([*computing, *waiting]))
    assert found[0] == "tests/e2e/test_0.py"
    at = [found.index(f"tests/e2e/test_{number}.py") for number in range(5)]
    assert at == sorted(at)
    assert all(later - earlier > 2 for earlier, later in itertools.pairwise(at))
    assert at[-1] < LAST_WAITING * len(found)


def test_files_with_most_come_first_and_their_tests_stay_together_in_order():
    items = [
        Item("tests/unit/one.py::test"),
        *(Item(f"tests/unit/many.py::test_{number}") for number in range(3)),
        Item("tests/chaos/one.py::test_0"),
        *(Item(f"tests/chaos/many.py::test_{number}") for number in (1, 2, 0)),
    ]
    found = begun_in_order(items)
    assert sorted(found, key=items.index) == items
    assert [name for name in files(found) if "chaos" in name] == ["tests/chaos/many.py", "tests/chaos/one.py"]
    assert [name for name in files(found) if "unit" in name] == ["tests/unit/many.py", "tests/unit/one.py"]
    for name in files(found):
        of_file = [item for item in items if item.nodeid.startswith(f"{name}::")]
        at = found.index(of_file[0])
        assert found[at : at + len(of_file)] == of_file
