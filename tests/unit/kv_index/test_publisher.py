"""IndexPublisher against a store of dictionaries: order, batches, outages, refusals, the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest, StoreUnavailable, TandemError
from shared.identity import WorkerIdentity, WorkerRole
from shared.kv_index import publisher as index_publisher
from shared.kv_index.holders import EventStamp, Tier
from shared.kv_index.publisher import IndexPublisher
from tests.examples import examples
from tests.waiting import DEADLINE_S

WORKER = WorkerIdentity("w", 1, WorkerRole.DECODE)
HASHES = [bytes([i]) * 16 for i in range(8)]


class FakeStore:
    """An index of one holder. `errors` are raised one a call, `gate` lets calls through, `lose` is a Redis restart."""

    def __init__(self, errors: Sequence[TandemError] = ()) -> None:
        self.held: set[bytes] = set()
        self.done: int | None = None
        self.calls: list[tuple[str, list[bytes]]] = []
        self.stamps: list[EventStamp] = []
        self.errors = list(errors)
        self.gate = asyncio.Event()
        self.gate.set()
        self._called = asyncio.Condition()

    def lose(self) -> None:
        self.held, self.done = set(), None

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp | None = None
    ) -> bool:
        assert (worker, tier) == (WORKER, Tier.HOST)
        await self._call("publish", hashes)
        if not self._takes(stamp):
            return False
        self.held |= set(hashes)
        return True

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp | None = None
    ) -> bool:
        assert (worker, tier) == (WORKER, Tier.HOST)
        await self._call("remove", hashes)
        if not self._takes(stamp):
            return False
        self.held -= set(hashes)
        return True

    def _takes(self, stamp: EventStamp | None) -> bool:
        assert stamp is not None
        assert not self.stamps or stamp.sequence > self.stamps[-1].sequence
        self.stamps.append(stamp)
        if stamp.reset:
            self.held = set()
        elif self.done is None or self.done < stamp.acknowledged:
            return False
        self.done = stamp.sequence
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for calls until the condition holds."""
        async with asyncio.timeout(DEADLINE_S), self._called:
            await self._called.wait_for(condition)

    async def _call(self, name: str, hashes: Sequence[bytes]) -> None:
        await asyncio.sleep(0)  # what is offered meanwhile must not overtake this call
        self.calls.append((name, list(hashes)))
        async with self._called:
            self._called.notify_all()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)


def publisher(store: FakeStore, **changes: float) -> IndexPublisher:
    options = {"flush_interval_s": 0.001, "heartbeat_s": 60, "max_batch": 4096, "max_backlog": 100_000, **changes}
    return IndexPublisher(store, WORKER, tier=Tier.HOST, **options)  # type: ignore[arg-type]


async def test_the_start_declares_the_incarnation_before_any_block_is_sealed() -> None:
    store = FakeStore()
    subject = publisher(store)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    assert store.calls == [("publish", [])]
    await subject.close()
    assert store.calls == [("publish", [])]


async def test_what_is_offered_together_goes_together() -> None:
    store = FakeStore()
    subject = publisher(store, flush_interval_s=60)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    for block_hash in HASHES[:4]:
        subject.offer([block_hash], [])
    subject.offer([], HASHES[6:])
    await subject.close(deadline_s=10)
    assert store.calls[1:] == [("publish", HASHES[:4]), ("remove", HASHES[6:])]
    assert subject.num_dropped == 0


async def test_a_full_batch_does_not_wait_for_the_interval() -> None:
    store = FakeStore()
    subject = publisher(store, flush_interval_s=60, max_batch=3)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    subject.offer(HASHES[:7], [])
    await store.until(lambda: len(store.calls) == 4)
    assert [hashes for _, hashes in store.calls] == [[], HASHES[:3], HASHES[3:6], HASHES[6:7]]
    await subject.close()


async def test_fewer_changes_than_a_batch_wait_for_others() -> None:
    store = FakeStore()
    subject = publisher(store, flush_interval_s=60, max_batch=3)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    subject.offer(HASHES[:2], [])
    for _ in range(100):  # turns of the event loop, in which they would be sent
        await asyncio.sleep(0)
    subject.offer(HASHES[2:4], [])
    await store.until(lambda: len(store.calls) > 1)
    assert store.calls[1] == ("publish", HASHES[:3])
    await subject.close()


async def test_an_outage_is_logged_once_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = FakeStore()
    subject = publisher(store)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    store.errors = [StoreUnavailable("gone"), StoreUnavailable("gone")]
    subject.offer(HASHES[:2], [])
    await store.until(lambda: len(store.calls) == 3)
    assert not subject.available
    subject.offer(HASHES[2:3], HASHES[:1])
    await store.until(lambda: store.held == {*HASHES[1:3]} or len(store.calls) > 4)
    await subject.close()
    assert subject.available
    assert store.held == {*HASHES[1:3]}
    assert (subject.num_dropped, subject.num_pending) == (0, 0)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]


async def test_too_long_a_backlog_is_dropped_for_a_new_start_with_what_is_held_then() -> None:
    store = FakeStore()
    subject = publisher(store, max_backlog=3)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    subject.offer(HASHES[:2], [])
    await store.until(lambda: store.held == {*HASHES[:2]} or len(store.calls) == 2)
    store.errors = [StoreUnavailable("gone")]
    subject.offer(HASHES[2:3], [])
    await store.until(lambda: len(store.calls) == 3)
    subject.offer(HASHES[3:6], HASHES[:1])
    subject.offer([], HASHES[3:4])
    await subject.close(deadline_s=10)
    assert store.held == {*HASHES[1:3], *HASHES[4:6]}
    assert [stamp.reset for stamp in store.stamps].count(True) == 2
    assert subject.num_dropped == 0


async def test_more_blocks_than_a_backlog_are_all_published_although_others_are_offered_meanwhile() -> None:
    store = FakeStore()
    store.gate.clear()
    subject = publisher(store, max_batch=2, max_backlog=3)
    subject.offer(HASHES, [])
    await subject.start()
    await store.until(lambda: bool(store.calls))
    subject.offer([], [])  # as a store node does behind every call
    store.gate.set()
    for _ in range(200):  # turns of the event loop
        subject.offer([], [])
        await asyncio.sleep(0)
    await subject.close(deadline_s=10)
    assert store.held == {*HASHES}
    assert [stamp.reset for stamp in store.stamps].count(True) == 1


async def test_an_index_that_lost_everything_gets_everything_again_although_nothing_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore()
    subject = publisher(store, heartbeat_s=0.01, max_batch=3)
    await subject.start()
    subject.offer(HASHES, HASHES[:1])
    subject.offer([], HASHES[:2])
    await store.until(lambda: store.done is not None and len(store.calls) > 3)
    store.lose()
    await store.until(lambda: subject.num_resyncs == 1 and store.held == {*HASHES[2:]})
    await subject.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_quiet_publisher_says_that_it_is_there() -> None:
    store = FakeStore()
    subject = publisher(store, heartbeat_s=0.01)
    await subject.start()
    await store.until(lambda: len(store.calls) == 4)
    await subject.close()
    assert store.calls[:4] == [("publish", [])] * 4
    assert [stamp.reset for stamp in store.stamps[:4]] == [True, False, False, False]


async def test_a_refused_batch_is_told_once_and_everything_sent_when_the_store_takes_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore([InvalidRequest("superseded")] * 3)
    subject = publisher(store)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    for i in range(2):
        subject.offer(HASHES[i : i + 1], [])
        await store.until(lambda i=i: len(store.calls) == i + 2)  # type: ignore[misc]
    subject.offer(HASHES[2:3], [])
    await subject.close(deadline_s=10)
    assert store.held == {*HASHES[:3]}
    assert subject.num_dropped == 2
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_close_gives_up_at_its_deadline_and_counts_what_was_lost() -> None:
    store = FakeStore()
    subject = publisher(store)
    await subject.start()
    await store.until(lambda: bool(store.calls))
    store.gate.clear()
    subject.offer(HASHES[:3], [])
    await store.until(lambda: len(store.calls) == 2)
    subject.offer(HASHES[3:4], [])
    async with asyncio.timeout(DEADLINE_S):
        await subject.close(deadline_s=0.05)
        await subject.close()
    assert subject.num_dropped == 4
    subject.offer(HASHES, [])
    assert subject.num_pending == 0


class FlakyStore(FakeStore):
    """Fails where a test says so: before a call has its effect, or after."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__()
        self.failures = failures

    async def publish(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp | None = None
    ) -> bool:
        return await self._fail(super().publish(worker, hashes, tier, stamp))

    async def remove(
        self, worker: WorkerIdentity, hashes: Sequence[bytes], tier: Tier = Tier.DEVICE, stamp: EventStamp | None = None
    ) -> bool:
        return await self._fail(super().remove(worker, hashes, tier, stamp))

    async def _fail(self, call: Coroutine[None, None, bool]) -> bool:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "lose":
            self.lose()
        if failure == "before":
            call.close()
        else:
            taken = await call
        if failure in ("before", "after"):
            raise StoreUnavailable(failure)
        return taken


changes = st.lists(
    st.tuples(st.lists(st.sampled_from(HASHES), unique=True), st.booleans(), st.booleans()), min_size=1, max_size=12
)


@given(changes, st.lists(st.sampled_from(["", "before", "after", "lose"]), max_size=8), st.integers(1, 4))
@examples(60)
def test_whatever_happens_the_store_ends_up_with_what_the_pool_holds(
    changes: list[tuple[list[bytes], bool, bool]], failures: list[str], max_batch: int
) -> None:
    """Any offers, any calls failing before or after they had their effect, any losses, any batch size."""

    async def run() -> None:
        store = FlakyStore(failures)
        subject = publisher(store, flush_interval_s=0.0, max_batch=max_batch)
        await subject.start()
        held: set[bytes] = set()
        for hashes, seal, pause in changes:
            if seal:
                subject.offer([h for h in hashes if h not in held], [])
                held |= set(hashes)
            else:
                subject.offer([], [h for h in hashes if h in held])
                held -= set(hashes)
            if pause:
                await asyncio.sleep(0)
        await subject.close(deadline_s=10)
        assert store.held == held
        assert subject.num_dropped == 0

    quick = patch.multiple(index_publisher, FIRST_RETRY_S=0.0, LAST_RETRY_S=0.0)
    with quick, asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(run())
