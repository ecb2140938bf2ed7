"""Who leads: a planner acts only while no other one can have taken its Lease, by its own clock alone."""

from __future__ import annotations

import contextlib
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.planner.cluster.calls import Absent, ClusterCalls, Conflict
from services.planner.cluster.lease import Leadership
from shared.errors import ClusterUnavailable
from tests.waiting import until

DURATION_S = 30.0


class EndOfTurn(BaseException):
    """In place of the pause behind a turn."""


@dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


class Server:
    """The Lease as an API server has it; a call takes `took_s`, or raises `error`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.kept: dict[str, Any] | None = None
        self.version = 0
        self.took_s = 0.0
        self.error: Exception | None = None

    @property
    def spec(self) -> dict[str, Any]:
        assert self.kept is not None
        found: dict[str, Any] = self.kept["spec"]
        return found

    async def lease(self, name: str) -> dict[str, Any]:
        self._answer()
        if self.kept is None:
            raise Absent("there is none", status=404)
        return deepcopy(self.kept)

    async def create_lease(self, name: str, spec: dict[str, Any]) -> None:
        self._answer()
        assert self.kept is None
        self._keep({"metadata": {"name": name}, "spec": spec})

    async def replace_lease(self, lease: dict[str, Any]) -> None:
        self._answer()
        if lease["metadata"]["resourceVersion"] != str(self.version):
            raise Conflict("it has changed")
        self._keep(lease)

    def _answer(self) -> None:
        self.clock.now += self.took_s
        if self.error is not None:
            raise self.error

    def _keep(self, lease: dict[str, Any]) -> None:
        self.version += 1
        self.kept = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}


class Planner:
    """One that seeks the Lease, turn by turn."""

    def __init__(self, server: Server, identity: str) -> None:
        self.failures: list[Exception] = []
        self.num_answers = 0
        calls = cast(ClusterCalls, server)
        self.lead = Leadership(calls, "lease", identity, DURATION_S, self.failures.append, self._answered)

    def _answered(self) -> None:
        self.num_answers += 1

    async def turn(self) -> bool:
        """Whether it leads behind its next turn."""
        with contextlib.suppress(EndOfTurn):
            await self.lead._run()
        return self.lead.held


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("services.planner.cluster.lease.time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(_: float) -> None:
        raise EndOfTurn

    monkeypatch.setattr("asyncio.sleep", end)


@pytest.fixture
def server(clock: Clock) -> Server:
    return Server(clock)


@pytest.mark.usefixtures("turns")
async def test_it_leads_for_two_thirds_of_the_duration_after_its_call_began(server: Server, clock: Clock) -> None:
    first = Planner(server, "a")
    server.took_s = 2.5  # twice: it is read, then made
    assert await first.turn()
    assert first.lead.changed.is_set()
    assert (server.spec["holderIdentity"], server.spec["leaseDurationSeconds"]) == ("a", 30)
    clock.now = 1019.9
    assert first.lead.held
    clock.now = 1020.0
    assert not first.lead.held


@pytest.mark.usefixtures("turns")
async def test_another_one_waits_until_it_has_itself_seen_no_renewal_for_the_whole_duration(
    server: Server, clock: Clock
) -> None:
    first, second = Planner(server, "a"), Planner(server, "b")
    assert await first.turn()
    assert not await second.turn()
    assert second.lead.holder == "a"
    clock.now += 15.0
    assert await first.turn()
    clock.now += 10.0
    assert not await second.turn()  # it sees the renewal only now
    clock.now += 30.0
    assert not await second.turn()
    clock.now += 0.1
    assert await second.turn()
    assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("b", 1)
    assert not await first.turn()
    assert first.lead.holder == "b"


@pytest.mark.usefixtures("turns")
async def test_the_holders_own_duration_counts(server: Server, clock: Clock) -> None:
    first, second = Planner(server, "a"), Planner(server, "b")
    assert await first.turn()
    server.spec["leaseDurationSeconds"] = 60
    assert not await second.turn()
    clock.now += 60.0
    assert not await second.turn()
    clock.now += 0.1
    assert await second.turn()


@pytest.mark.usefixtures("turns")
async def test_a_renewal_keeps_when_it_was_acquired_and_counts_no_transition(server: Server, clock: Clock) -> None:
    first = Planner(server, "a")
    assert await first.turn()
    acquired, first_version = server.spec["acquireTime"], server.version
    first.lead.changed.clear()
    clock.now += 15.0
    assert await first.turn()
    assert server.version == first_version + 1
    assert (server.spec["acquireTime"], server.spec["leaseTransitions"]) == (acquired, 0)
    assert not first.lead.changed.is_set(), "it was held all the time"
    clock.now += 19.9
    assert first.lead.held


@pytest.mark.usefixtures("turns")
async def test_a_hold_that_lapsed_during_the_renewal_counts_as_gained_again(server: Server, clock: Clock) -> None:
    first = Planner(server, "a")
    assert await first.turn()
    first.lead.changed.clear()
    clock.now += 19.0
    server.took_s = 1.0  # twice: at the second answer it is held no more
    assert await first.turn()
    assert first.lead.changed.is_set()


@pytest.mark.usefixtures("turns")
async def test_while_the_server_is_away_it_leads_no_longer_than_it_may(server: Server, clock: Clock) -> None:
    first = Planner(server, "a")
    assert await first.turn()
    server.error = ClusterUnavailable("away")
    clock.now += 19.0
    assert await first.turn(), "an error alone says nothing of others"
    assert (first.failures, first.num_answers) == ([server.error], 1)
    clock.now += 1.0
    assert not await first.turn()
    server.error = None
    assert await first.turn()
    assert first.num_answers == 2


@pytest.mark.usefixtures("turns")
async def test_who_is_overtaken_between_reading_and_writing_does_not_lead(server: Server, clock: Clock) -> None:
    first = Planner(server, "a")
    assert await first.turn()
    reading = server.lease

    async def overtaken(name: str) -> dict[str, Any]:
        lease = await reading(name)
        server._keep({**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
        return lease

    server.lease = overtaken  # type: ignore[method-assign]
    assert not await first.turn()
    assert first.failures == []


async def test_at_its_end_it_gives_the_lease_back_and_the_next_one_leads_at_once(server: Server) -> None:
    first, second = Planner(server, "a"), Planner(server, "b")
    first.lead.start()
    await until(lambda: first.lead.held)
    await first.lead.close()
    await first.lead.close()
    assert (first.lead.held, server.spec["holderIdentity"]) == (False, "")
    second.lead.start()
    await until(lambda: second.lead.held)
    assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("b", 1)
    await second.lead.close()


async def test_who_does_not_lead_leaves_the_lease_as_it_is(server: Server, clock: Clock) -> None:
    first, second = Planner(server, "a"), Planner(server, "b")
    first.lead.start()
    await until(lambda: first.lead.held)
    second.lead.start()
    await until(lambda: second.lead.holder)
    await second.lead.close()
    clock.now += 20.0  # its time is over: another may have it by now
    await first.lead.close()
    assert server.spec["holderIdentity"] == "a"
