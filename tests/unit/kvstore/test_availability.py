"""Availability: one probe decides for everyone, and each change is reported once."""

from __future__ import annotations

import asyncio

import pytest

from services.kvstore.availability import Availability
from shared.errors import StoreUnavailable
from tests.waiting import DEADLINE_S


class Switch:
    """A probe that can be turned off; remembers the changes told."""

    def __init__(self, error: StoreUnavailable | None = None) -> None:
        self.error = error
        self.changes: asyncio.Queue[StoreUnavailable | None] = asyncio.Queue()

    async def probe(self) -> None:
        if self.error is not None:
            raise self.error

    def subject(self, interval_s: float) -> Availability:
        return Availability(self.probe, self.changes.put, interval_s)

    async def next_change(self) -> StoreUnavailable | None:
        async with asyncio.timeout(DEADLINE_S):
            return await self.changes.get()


async def test_nothing_is_available_before_the_first_probe() -> None:
    subject = Switch().subject(60)
    assert not subject.available
    with pytest.raises(StoreUnavailable):
        subject.require()


async def test_start_tells_the_first_state() -> None:
    switch = Switch(StoreUnavailable("no Redis", address="x"))
    subject = switch.subject(60)
    await subject.start()
    assert await switch.next_change() is switch.error
    with pytest.raises(StoreUnavailable, match="no Redis") as caught:
        subject.require()
    assert caught.value.details == {"address": "x"}
    await subject.close()


async def test_a_suspicion_is_probed_at_once_and_each_change_told_once() -> None:
    switch = Switch()
    subject = switch.subject(60)
    await subject.start()
    assert await switch.next_change() is None
    subject.require()
    switch.error = StoreUnavailable("gone")
    subject.suspect()
    assert await switch.next_change() is switch.error
    assert not subject.available
    switch.error = None
    subject.suspect()
    assert await switch.next_change() is None
    subject.suspect()
    await subject.close()
    await subject.close()
    assert switch.changes.empty()


async def test_recovery_is_seen_without_anyone_asking() -> None:
    switch = Switch(StoreUnavailable("gone"))
    subject = switch.subject(0.001)
    await subject.start()
    assert await switch.next_change() is switch.error
    switch.error = None
    assert await switch.next_change() is None
    assert subject.available
    await subject.close()
