"""RedisIndex against plain dictionaries: any sequence of calls, restarts and sweeps, on two stores at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from services.kvstore.index.redis_index import RedisIndex
from services.kvstore.index.sweeper import Sweeper
from services.kvstore.resp.command import Command
from services.kvstore.resp.open import redis_client
from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.kv_index.holders import Holder, PrefixMatch, Tier
from tests.integration.kvstore.workers import hashes, worker

T = TypeVar("T")
HASHES = hashes(6)
names = st.sampled_from(["a", "b", "ü" * 20])
ages = st.integers(1, 3)  # incarnations of a name, in no order
roles = st.sampled_from(WorkerRole)
tiers = st.sampled_from(Tier)
stores = st.integers(0, 1)
chains = st.lists(st.integers(0, len(HASHES) - 1), max_size=8)


def joined(chain: list[int]) -> bytes:
    return b"".join(HASHES[i] for i in chain)


class IndexMachine(RuleBasedStateMachine):
    """`url` is set by the test."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.client = redis_client(self.url, 5.0)
        self.stores = [RedisIndex(self.client), RedisIndex(self.client)]
        self.sweeper = Sweeper(self.client, interval_s=60, lease_s=60)
        self.run(self.client.call(Command.of("FLUSHALL")))
        self.held: dict[int, dict[tuple[str, int, Tier], None]] = {}
        self.newest: dict[str, int] = {}
        self.roles: dict[tuple[str, int, Tier], WorkerRole] = {}
        self.seen: set[tuple[str, int]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.client.close())
        self.runner.close()

    @rule(store=stores, name=names, age=ages, role=roles, tier=tiers, chain=chains)
    def publish(self, store: int, name: str, age: int, role: WorkerRole, tier: Tier, chain: list[int]) -> None:
        work = self.stores[store].publish(worker(name, age, role), tier, joined(chain))
        if (name, age) in self.seen and self.newest[name] != age:
            with pytest.raises(InvalidRequest):
                self.run(work)
            return
        self.run(work)
        self.seen.add((name, age))
        self.newest[name] = age
        self.roles[name, age, tier] = role
        for i in chain:
            self.held.setdefault(i, {})[name, age, tier] = None

    @rule(store=stores, name=names, age=ages, tier=tiers, chain=chains)
    def remove(self, store: int, name: str, age: int, tier: Tier, chain: list[int]) -> None:
        self.run(self.stores[store].remove(worker(name, age), tier, joined(chain)))
        for i in chain if self.newest.get(name) == age else ():
            self.held.get(i, {}).pop((name, age, tier), None)

    @rule(store=stores, chain=chains)
    def match(self, store: int, chain: list[int]) -> None:
        assert self.run(self.stores[store].match(joined(chain))) == self.expected(chain)

    @rule()
    def sweep(self) -> None:
        self.run(self.sweeper.sweep())
        for holders in self.held.values():
            for name, age, tier in [*holders]:
                if self.newest[name] != age:
                    del holders[name, age, tier]

    @precondition(lambda self: self.seen)
    @rule()
    def stats(self) -> None:
        num_blocks = self.run(self.stores[0].stats()).num_blocks
        assert num_blocks == sum(1 for holders in self.held.values() if holders)

    @precondition(lambda self: len(self.seen) > 2)
    @rule()
    def restart_redis(self) -> None:
        self.run(self.client.call(Command.of("FLUSHALL")))
        self.held, self.newest, self.seen = {}, {}, set()

    def expected(self, chain: list[int]) -> PrefixMatch:
        blocks = []
        for i in chain:
            holders = tuple(
                Holder(name, age, self.roles[name, age, tier], tier)
                for name, age, tier in self.held.get(i, {})
                if self.newest[name] == age
            )
            if not holders:
                break
            blocks.append(holders)
        return PrefixMatch(tuple(blocks))


def test_the_index_is_what_the_model_says(valkey_url: str) -> None:
    machine = type("Machine", (IndexMachine,), {"url": valkey_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
