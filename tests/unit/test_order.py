"""The order in which files begin in a parallel run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.order import LAST_SLOW, begun_in_order


@dataclass(frozen=True)
class Item:
    nodeid: str
    slow: bool = False

    def get_closest_marker(self, name):
        return name if name == "slow" and self.slow else None


def files(items) -> list[str]:
    return list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))


def test_slow_files_come_one_by_one_between_the_others_and_leave_them_the_end():
    quick = [Item(f"quick_{number}.py::test") for number in range(20)]
    slow = [Item(f"slow_{number}.py::test", slow=True) for number in range(5)]
    found = files(begun_in_order([*quick, *slow]))
    assert found[0] == "slow_0.py"
    at = [found.index(f"slow_{number}.py") for number in range(5)]
    assert at == sorted(at)
    assert all(later - earlier > 2 for earlier, later in itertools.pairwise(at))
    assert at[-1] < LAST_SLOW * len(found)


def test_files_with_most_come_first_and_their_tests_stay_together_in_order():
    items = [
        Item("one.py::test"),
        *(Item(f"many.py::test_{number}") for number in range(3)),
        Item("slow.py::test_0", slow=True),
        Item("slower.py::test_1"),
        Item("slower.py::test_2", slow=True),
        Item("slower.py::test_0", slow=True),
    ]
    found = begun_in_order(items)
    assert sorted(found, key=items.index) == items
    assert [name for name in files(found) if "slow" in name] == ["slower.py", "slow.py"]
    assert [name for name in files(found) if "slow" not in name] == ["many.py", "one.py"]
    assert [item.nodeid for item in found if "slower" in item.nodeid] == [
        "slower.py::test_1", "slower.py::test_2", "slower.py::test_0",
    ]  # fmt: skip
    for name in files(found):
        at = [place for place, item in enumerate(found) if item.nodeid.startswith(f"{name}::")]
        assert at == list(range(at[0], at[-1] + 1))


def test_with_one_kind_alone():
    assert begun_in_order([]) == []
    assert files(begun_in_order([Item("a.py::test"), Item("b.py::test", slow=True)])) == ["b.py", "a.py"]
    assert files(begun_in_order([Item("a.py::test")])) == ["a.py"]
