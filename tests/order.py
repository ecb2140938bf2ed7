"""In which order the files of a parallel run begin, so that the processor is busy to the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

LAST_SLOW = 0.85
"""Share of the quick tests by which the last file with slow tests has begun: what comes after fills the processor."""


def begun_in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files with slow tests spread over the others: they wait much of their time, while the others compute. Those with
    most slow tests, and else with most tests, come first. The tests of a file stay together."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    num_slow: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("::")[0]
        files[name].append(item)
        num_slow[name] += item.get_closest_marker("slow") is not None
    slow = sorted((name for name in files if num_slow[name]), key=lambda name: -num_slow[name])
    quick = sorted((name for name in files if not num_slow[name]), key=lambda name: -len(files[name]))
    # Quick tests are alike; of a slow file it is not known how long it takes. At one place the slow one comes first.
    places = _spread(dict.fromkeys(slow, 1), LAST_SLOW) | _spread({name: len(files[name]) for name in quick}, 1.0)
    return [item for name in sorted(places, key=lambda name: places[name]) for item in files[name]]


def _spread(sizes: Mapping[str, int], end: float) -> dict[str, float]:
    """The first at 0, each other one after those before it, by their sizes; all together they reach to `end`."""
    places, before = {}, 0
    for name, size in sizes.items():
        places[name] = end * before / sum(sizes.values())
        before += size
    return places
