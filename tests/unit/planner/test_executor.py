"""Which Pods go and when: what the executor asks of the cluster and of the routers, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from services.planner.cluster.calls import ClusterCalls
from services.planner.cluster.pods import Pod
from services.planner.executor import Executor, LeadershipLost, by_name, choose_victims
from services.planner.figures.observer import Observer, Reading
from services.planner.figures.sources import Sources
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig
from services.planner.policy.elastic import ElasticPlanner
from services.planner.policy.observation import Observation, PoolCount
from services.planner.policy.planner import Planner
from shared.errors import NotFound, TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

DRAIN_S = 100.0
NOW = 5000.0


def pod(name: str, pool: str = "d", ready_since_s: float | None = 1.0, *, ending: bool = False) -> Pod:
    return Pod(name, "worker", pool, "10.0.0.1", {}, ready_since_s, ending, None)


def victim(name: str, since_s: float = NOW - 10.0, ready_since_s: float | None = 1.0, *, started: bool = False) -> Pod:
    return Pod(name, "worker", "d", "10.0.0.1", {}, ready_since_s, False, since_s, started)


def status(name: str, *, connected: bool = True, **load: Any) -> inference_pb2.WorkerStatus:
    return inference_pb2.WorkerStatus(
        worker=types_pb2.WorkerId(name=name), connected=connected, load=types_pb2.Load(**load)
    )


class Cluster:
    """Takes down what is asked for; `leads` says whether this planner may act."""

    def __init__(self, gpu_budget: int = 16) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.leads = True
        self.refused: set[str] = set()
        """Workers that no router drains, nor takes that back."""
        self.failures: list[TandemError] = []
        self.executor = Executor(
            PlannerConfig(gpu_budget=gpu_budget),
            ("p", "d"),
            DRAIN_S,
            cast(ClusterCalls, self),
            cast(Sources, self),
            lambda: self.leads,
            self.failures.append,
        )

    async def scale(self, pool: str, replicas: int, *, dry_run: bool = False) -> None:
        self.asked.append(("try" if dry_run else "scale", pool, replicas))

    async def mark_victim(self, name: str, since_s: float) -> None:
        self.asked.append(("mark", name, since_s))

    async def mark_first_victim(self, name: str) -> None:
        self.asked.append(("first", name))

    async def spare_victim(self, name: str) -> None:
        self.asked.append(("spare", name))

    async def drain(self, pods: Sequence[Pod], name: str, *, undo: bool = False) -> None:
        self.asked.append(("undrain" if undo else "drain", name))
        if name in self.refused:
            raise NotFound(f"there is no worker {name!r}")

    async def step(
        self,
        target: int,
        pods: Sequence[Pod],
        *workers: inference_pb2.WorkerStatus,
        replicas: int | None = None,
        prefill: int = 2,
    ) -> list[tuple[Any, ...]]:
        """One step of the decode pool, beside two prefill workers, to be `prefill`. Returns what was asked."""
        self.asked.clear()
        count = PoolCount(len(pods) if replicas is None else replicas, len(pods))
        seen = Observation(0.0, PoolCount(2, 2), count)
        found = {each.worker.name: each for each in workers}
        await self.executor.step(Pair(prefill, target), seen, [*pods, pod("p0", "p"), pod("p1", "p")], found, NOW)
        return list(self.asked)


async def test_a_pool_that_is_as_it_should_be_is_left_alone() -> None:
    assert await Cluster().step(2, [pod("a"), pod("b")], status("a"), status("b", draining=True)) == []


async def test_the_least_harmful_is_marked_and_drained_and_its_replica_stays_until_it_is_idle() -> None:
    cluster = Cluster()
    pods = [pod("a"), pod("b"), pod("c")]
    busy, idle, queued = status("a", num_running=2), status("b", num_running=1), status("c", num_waiting=2)
    assert await cluster.step(2, pods, busy, idle, queued) == [("mark", "b", NOW), ("drain", "b")]
    pods[1] = victim("b")
    running = status("b", num_running=1, draining=True)
    assert await cluster.step(2, pods, busy, running, queued) == []
    for left in ({"num_running": 1}, {"num_waiting": 1}, {"num_queued_tokens": 1}):
        assert await cluster.step(2, pods, busy, status("b", draining=True, **left), queued) == []
    assert await cluster.step(2, pods, busy, status("b", draining=True), queued) == [("scale", "d", 2)]


async def test_of_several_that_are_to_go_those_without_work_go_first() -> None:
    """A ReplicaSet would else choose among those that drain by their age."""
    pods = [pod("a"), victim("b"), victim("c")]
    busy, idle = status("b", draining=True, num_running=1), status("c", draining=True)
    assert await Cluster().step(1, pods, status("a"), busy, idle) == [("first", "c"), ("scale", "d", 2)]
    behind = await Cluster().step(1, pods, status("a"), busy, idle, replicas=2)
    assert behind == [], "its replica went before"
    both = await Cluster().step(1, pods, status("a"), status("b", draining=True), idle)
    assert both == [("scale", "d", 1)], "none has work"


async def test_one_that_was_not_heard_to_drain_is_asked_again_and_does_not_go() -> None:
    pods = [pod("a"), victim("b")]
    assert await Cluster().step(1, pods, status("a"), status("b")) == [("drain", "b")]
    assert await Cluster().step(1, pods, status("a"), status("b", connected=False)) == []
    assert await Cluster().step(1, pods, status("a")) == [], "it serves: a router is about to say so"
    pods[1] = victim("b", ready_since_s=None)
    assert await Cluster().step(1, pods, status("a")) == [("scale", "d", 1)], "it never served"


async def test_one_that_does_not_become_idle_goes_after_its_time() -> None:
    running = status("b", num_running=1, draining=True)
    assert await Cluster().step(1, [pod("a"), victim("b", NOW - DRAIN_S)], status("a"), running) == []
    late = [pod("a"), victim("b", NOW - DRAIN_S - 1.0)]
    assert await Cluster().step(1, late, status("a"), running) == [("scale", "d", 1)]


async def test_one_that_drains_unseen_while_routers_restart_keeps_its_replica() -> None:
    pods = [pod("a"), victim("b", ready_since_s=None, started=True)]
    for workers in ((), (status("a", num_running=3), status("b", connected=False))):
        assert not [call for call in await Cluster().step(1, pods, *workers) if call[0] == "scale"]
    never = [pod("a"), victim("b", ready_since_s=None)]
    assert ("scale", "d", 1) in await Cluster().step(1, never)


async def test_where_the_load_comes_back_those_that_were_to_go_stay() -> None:
    pods = [victim("a"), victim("b"), pod("c")]
    found = [status("a", num_running=1, draining=True), status("b", draining=True), status("c")]
    assert await Cluster().step(3, pods, *found) == [
        ("undrain", "b"), ("undrain", "a"), ("spare", "b"), ("spare", "a"),
    ]  # fmt: skip
    assert await Cluster().step(2, pods, *found) == [("undrain", "a"), ("spare", "a"), ("scale", "d", 2)], "b may go"
    assert await Cluster().step(3, [victim("a"), pod("b"), pod("c")], status("a")) == [("spare", "a")]


async def test_who_stays_keeps_its_mark_until_it_drains_no_more() -> None:
    cluster, pods, found = Cluster(), [pod("a"), victim("b", ready_since_s=None)], [status("a")]
    assert await cluster.step(2, pods, *found) == [], "no router says whether it drains"
    assert await cluster.step(2, pods, *found, status("b", connected=False)) == []
    found.append(status("b", draining=True))
    cluster.refused = {"b"}
    assert await cluster.step(2, pods, *found) == [("undrain", "b")]
    cluster.refused.clear()
    assert await cluster.step(2, pods, *found) == [("undrain", "b"), ("spare", "b")]


async def test_who_is_about_to_be_deleted_stays_drained_and_counts_once() -> None:
    busy, gone = status("a", num_running=1, draining=True), status("b", draining=True)
    assert await Cluster().step(1, [pod("a"), victim("b")], status("a"), gone, replicas=1) == []
    pods = [victim("a"), victim("b"), pod("c")]
    assert await Cluster().step(1, pods, busy, gone, status("c"), replicas=2) == []
    assert await Cluster().step(2, pods, busy, gone, status("c"), replicas=2) == [("undrain", "a"), ("spare", "a")]
    idle = status("a", draining=True)
    assert await Cluster().step(1, pods, idle, gone, status("c"), replicas=2) == [("scale", "d", 1)]
    assert await Cluster().step(2, pods, busy, status("b", num_running=1), status("c"), replicas=2) == [
        ("undrain", "a"), ("spare", "a"), ("spare", "b"),
    ], "a roll-out has another Pod for a while"  # fmt: skip
    pods = [pod("a"), victim("b"), pod("c")]
    assert await Cluster().step(1, pods, status("a"), gone, status("c", num_running=1), replicas=2) == [
        ("mark", "a", NOW), ("drain", "a"),
    ]  # fmt: skip


async def test_a_worker_that_no_router_drains_holds_up_nobody_and_goes_after_its_time() -> None:
    cluster = Cluster()
    cluster.refused = {"a"}
    pods, found = [victim("a"), victim("b"), pod("c")], [status("a", num_running=1), status("b"), status("c")]
    asked = [("drain", "a"), ("drain", "b"), ("scale", "p", 4)]
    assert await cluster.step(1, pods, *found, prefill=4) == asked
    pods[0] = victim("a", NOW - DRAIN_S - 1.0)
    assert await cluster.step(1, pods, *found, prefill=4) == [*asked[:2], ("first", "a"), ("scale", "d", 2), asked[2]]
    assert [type(error) for error in cluster.failures] == [NotFound] * 2


async def test_replicas_without_a_pod_go_before_a_pod_is_drained() -> None:
    assert await Cluster().step(1, [pod("a")], status("a"), replicas=3) == [("scale", "d", 1)]
    pods = [pod("a"), pod("b"), pod("c", ending=True)]
    asked = await Cluster().step(1, pods, status("a", num_running=1), status("b"), replicas=4)
    assert asked == [("mark", "b", NOW), ("drain", "b"), ("scale", "d", 2)]
    marked = [victim("a"), pod("b")]
    assert await Cluster().step(2, marked, status("a", draining=True), status("b"), replicas=3) == [
        ("undrain", "a"), ("spare", "a"), ("scale", "d", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("replicas", "asked"), [(4, [("scale", "d", 3)]), (3, [])])
@pytest.mark.parametrize("is_elastic", [False, True])
async def test_a_planner_that_takes_over_continues_the_drains(
    is_elastic: bool, replicas: int, asked: list[Any]
) -> None:
    pods = [pod("a"), pod("b"), pod("c"), victim("d")]
    prefill = [] if is_elastic else [pod("p0", "p")]
    read = Reading(0.0, NOW, [*pods, *prefill], len(prefill), replicas, None, None)
    seen = Observer(("" if is_elastic else "p", "d"), 1.0, 0.05, 60.0).observe(read)
    config = PlannerConfig(is_elastic=is_elastic)
    decision = (ElasticPlanner(config) if is_elastic else Planner(config)).decide(seen)
    assert (decision.target, decision.changes) == (Pair(len(prefill), 3), False)
    draining = [status(each.name, draining=each.victim) for each in pods]
    assert await Cluster().step(decision.target.decode, pods, *draining, replicas=replicas) == asked


async def test_a_pool_grows_into_what_is_free_of_the_budget() -> None:
    pods = [pod("a"), pod("b")]
    assert await Cluster().step(5, pods, status("a"), status("b")) == [("scale", "d", 5)]
    assert await Cluster(gpu_budget=5).step(5, pods, status("a"), status("b")) == [("scale", "d", 3)]
    assert await Cluster(gpu_budget=4).step(5, pods, status("a"), status("b")) == []


async def test_all_sizes_are_tried_without_a_change() -> None:
    cluster = Cluster()
    await cluster.executor.check(Pair(3, 1))
    assert cluster.asked == [("try", "p", 3), ("try", "d", 1)]


@pytest.mark.parametrize(
    ("target", "pods"),
    [(1, [pod("a"), pod("b")]), (1, [pod("a"), victim("b")]), (2, [pod("a"), victim("b")]), (3, [pod("a"), pod("b")])],
)
async def test_without_its_lease_nothing_is_changed(target: int, pods: list[Pod]) -> None:
    cluster = Cluster()
    cluster.leads = False
    with pytest.raises(LeadershipLost):
        await cluster.step(target, pods, status("a"), status("b", draining=pods[1].victim))
    assert cluster.asked == []


def test_those_that_do_not_serve_go_first_then_the_least_busy_then_the_newest() -> None:
    pods = [
        pod("old", ready_since_s=10.0),
        pod("new", ready_since_s=20.0),
        pod("busy", ready_since_s=30.0),
        pod("starting", ready_since_s=None),
        pod("ending", ending=True),
        victim("chosen"),
    ]
    workers = {"busy": status("busy", num_running=1), "old": status("old")}
    chosen = [each.name for each in choose_victims(pods, workers, 9)]
    assert chosen == ["starting", "new", "old", "busy"]
    assert [each.name for each in choose_victims(pods, workers, 2)] == chosen[:2]
    assert choose_victims(pods, workers, 0) == choose_victims(pods, workers, -1) == []


def test_of_what_routers_say_of_a_worker_that_of_a_connected_one_counts() -> None:
    said = [
        [status("a", connected=False), status("b", num_running=1)],
        [status("a", num_running=2), status("b", num_running=3)],
        [status("a", num_running=4), status("c", connected=False)],
    ]
    found = by_name([inference_pb2.ClusterStatus(workers=workers) for workers in said])
    assert {name: (each.connected, each.load.num_running) for name, each in found.items()} == {
        "a": (True, 2), "b": (True, 1), "c": (False, 0),
    }  # fmt: skip
