"""In which order the files of a parallel run begin, so that the processor is busy to the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

LAST_WAITING = 0.85
"""Share of the computing tests by which the last file of waiting ones has begun: the others fill the processor."""
COMPUTING = "tests/unit/"
"""Tests below this folder compute; all others start processes and wait for them much of their time."""
OF_ONE_PROCESS = ("tests/k8s/",)
"""Tests below these folders share what takes long to start, a Kubernetes control plane, as those of a file do."""


def scope_of(nodeid: str) -> str:
    """Tests with one scope run in one process, one behind the other: those of a file, or of a whole folder."""
    return next((folder for folder in OF_ONE_PROCESS if nodeid.startswith(folder)), nodeid.partition("::")[0])


def begun_in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The files that wait, spread over those that compute. Of both kinds the files with most tests come first. The
    tests of a scope stay together."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[scope_of(item.nodeid)].append(item)
    sizes = Counter({name: len(tests) for name, tests in files.items()})
    by_size = [name for name, _ in sizes.most_common()]
    waiting = [name for name in by_size if not name.startswith(COMPUTING)]
    computing = [name for name in by_size if name.startswith(COMPUTING)]
    # Computing tests are alike; how long a waiting file takes is not known. At one place the waiting one comes first.
    places = _spread(dict.fromkeys(waiting, 1), LAST_WAITING) | _spread({name: sizes[name] for name in computing}, 1.0)
    return [item for name in sorted(places, key=lambda name: places[name]) for item in files[name]]


def _spread(sizes: Mapping[str, int], end: float) -> dict[str, float]:
    """The first at 0, each other one after those before it, by their sizes; all together they reach to `end`."""
    places, before = {}, 0
    for name, size in sizes.items():
        places[name] = end * before / sum(sizes.values())
        before += size
    return places
