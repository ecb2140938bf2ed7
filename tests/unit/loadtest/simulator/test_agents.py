"""Agents over simulated workers: what is said of their next turns is worth as much as knowing them."""

from __future__ import annotations

import pytest

from loadtest.bench.prefix.agents import Served, clairvoyant_hits
from loadtest.simulator import agents
from loadtest.simulator.agents import LAST_USE, ORACLE, RETAINED, SAID, Agents, hits


def test_what_is_said_is_worth_what_a_clairvoyant_pool_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "TURNS", 12)
    found = hits(Agents(6, 0.5, 0.5), (LAST_USE, RETAINED, SAID, ORACLE))
    assert found[SAID] >= 0.95 * found[ORACLE] > found[RETAINED] > found[LAST_USE]


def test_a_clairvoyant_cache_cuts_the_end_of_what_comes_back_last() -> None:
    turns = [
        Served(0.0, 1.0, 0, 4, 0, 0),
        Served(2.0, 3.0, 1, 4, 0, 0),
        Served(4.0, 5.0, 2, 4, 0, 0),
        Served(6.0, 7.0, 1, 4, 4, 4),
        Served(8.0, 9.0, 0, 4, 4, 2),
    ]
    assert clairvoyant_hits(turns, 10) == (4 + 2) / 8
    assert clairvoyant_hits(turns, 12) == 1.0
