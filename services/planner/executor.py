"""Carries decisions out: drains what is to go, shrinks, and grows only into what is free of the budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.planner.cluster.calls import ClusterCalls
from services.planner.cluster.pods import Pod
from services.planner.figures.sources import Sources
from services.planner.policy.budget import Pair, replicas_now
from services.planner.policy.config import PlannerConfig
from services.planner.policy.observation import Observation, PoolCount
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The Lease ran out between two calls: nothing more is done."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool as it is and as it should be."""

    name: str
    count: PoolCount
    target: int
    pods: Sequence[Pod]


class Executor:
    """One step a tick, from the state that the cluster shows: a new leader continues where the last one stopped.

    Concurrency: one step at a time. Before each call that changes something `may_act` is asked.
    """

    def __init__(
        self,
        config: PlannerConfig,
        pools: tuple[str, str],
        drain_timeout_s: float,
        calls: ClusterCalls,
        sources: Sources,
        may_act: Callable[[], bool],
        failed: Callable[[TandemError], None],
    ) -> None:
        """`failed` is called with the error of each worker that could not be drained, or taken back from it; the next
        step tries again."""
        self._config, self._names, self._drain_timeout_s = config, pools, drain_timeout_s
        self._calls, self._sources, self._may_act, self._failed = calls, sources, may_act, failed

    async def check(self, target: Pair) -> None:
        """Asks the server whether it would accept all sizes, and changes nothing. Raises what `ClusterCalls` does."""
        for name, replicas in zip(self._names, (target.prefill, target.decode), strict=True):
            if not name:
                continue
            await self._calls.scale(name, replicas, dry_run=True)

    async def step(
        self,
        target: Pair,
        seen: Observation,
        pods: Sequence[Pod],
        workers: Mapping[str, inference_pb2.WorkerStatus],
        epoch_s: float,
    ) -> None:
        """Goes one step towards `target`. `workers`: by name, as a router sees them. Raises LeadershipLost, and what
        `ClusterCalls` does: the next step starts from what was reached."""
        pools = [
            Pool(name, count, size, [pod for pod in pods if pod.component == "worker" and pod.pool == name])
            for name, count, size in zip(
                self._names, (seen.prefill, seen.decode), (target.prefill, target.decode), strict=True
            )
            if name
        ]
        for pool in pools:
            await self._shrink(pool, pods, workers, epoch_s)
        grown = replicas_now(self._config, target, seen.prefill, seen.decode)
        replicas_of = dict(zip(self._names, (grown.prefill, grown.decode), strict=True))
        for pool in pools:
            replicas = replicas_of[pool.name]
            if replicas > pool.count.replicas:
                self.ensure_leads()
                await self._calls.scale(pool.name, replicas)
                logger.info("pool %s: %d → %d replicas", pool.name, pool.count.replicas, replicas)

    async def _shrink(
        self, pool: Pool, pods: Sequence[Pod], workers: Mapping[str, inference_pb2.WorkerStatus], epoch_s: float
    ) -> None:
        replicas, num_pods = pool.count.replicas, sum(not pod.ending for pod in pool.pods)
        surplus = max(0, replicas - pool.target)
        gone = min(surplus, max(0, replicas - num_pods))  # replicas without a Pod go first: nothing to drain
        num_victims = surplus - gone
        marked = [pod for pod in pool.pods if pod.victim]
        idle = [pod for pod in marked if self._may_go(pod, workers, epoch_s)]
        marked = idle + [pod for pod in marked if pod not in idle]
        num_going = min(len(idle), max(0, num_pods - replicas))  # their replicas went before, the controller is behind
        victims = marked[: num_going + num_victims]
        await self._spare(marked[len(victims) :], pods, workers)
        chosen = choose_victims(pool.pods, workers, num_going + num_victims - len(victims))
        for pod in chosen:
            self.ensure_leads()
            await self._calls.mark_victim(pod.name, epoch_s)
        await self._drain([*victims, *chosen], pods, workers)
        num_idle_going = min(len(idle) - num_going, num_victims)
        if num_idle_going and len(victims) + len(chosen) > num_going + num_idle_going:  # others still have work
            for pod in idle[: num_going + num_idle_going]:
                self.ensure_leads()
                await self._calls.mark_first_victim(pod.name)
        gone += num_idle_going
        if gone:
            self.ensure_leads()
            await self._calls.scale(pool.name, replicas - gone)
            logger.info("pool %s: %d → %d replicas", pool.name, replicas, replicas - gone)

    async def _spare(
        self, spared: Sequence[Pod], pods: Sequence[Pod], workers: Mapping[str, inference_pb2.WorkerStatus]
    ) -> None:
        """The load came back before they were gone. One that may drain keeps its mark: a later step asks again."""
        seen = [pod.name for pod in spared if pod.name in workers and workers[pod.name].connected]
        draining = [name for name in seen if workers[name].load.draining]
        serving = set(seen).difference(draining).union(await self._tell(draining, pods, undo=True))
        for pod in spared:
            if pod.name in serving:
                self.ensure_leads()
                await self._calls.spare_victim(pod.name)
                logger.info("worker %s stays after all", pod.name)

    async def _drain(
        self, victims: Sequence[Pod], pods: Sequence[Pod], workers: Mapping[str, inference_pb2.WorkerStatus]
    ) -> None:
        names = [
            pod.name
            for pod in victims
            if pod.name in workers and workers[pod.name].connected and not workers[pod.name].load.draining
        ]
        if told := await self._tell(names, pods):
            logger.info("draining %s", ", ".join(told))

    async def _tell(self, names: Sequence[str], pods: Sequence[Pod], *, undo: bool = False) -> list[str]:
        """Asks for each worker by itself, so that one that refuses holds up no other. Returns those that did."""

        async def tell(name: str) -> bool:
            try:
                await self._sources.drain(pods, name, undo=undo)
            except TandemError as error:
                self._failed(error)
                return False
            return True

        if names:
            self.ensure_leads()
        done = await asyncio.gather(*map(tell, names))
        return [name for name, is_done in zip(names, done, strict=True) if is_done]

    def _may_go(self, pod: Pod, workers: Mapping[str, inference_pb2.WorkerStatus], epoch_s: float) -> bool:
        """Whether a marked one has nothing left to do, or has had its time."""
        assert pod.drained_since_s is not None
        if epoch_s - pod.drained_since_s > self._drain_timeout_s:
            return True
        worker = workers.get(pod.name)
        if worker is None or not worker.connected:
            return not (pod.ready or pod.started)  # it never served; else a router is about to say what it does
        load = worker.load
        return load.draining and not (load.num_running or load.num_waiting or load.num_queued_tokens)

    def ensure_leads(self) -> None:
        """Raises LeadershipLost."""
        if not self._may_act():
            raise LeadershipLost


def choose_victims(pods: Sequence[Pod], workers: Mapping[str, inference_pb2.WorkerStatus], count: int) -> list[Pod]:
    """The Pods that go with the least harm: those that do not serve yet, the newest first, then those with the fewest
    sequences, then the newest, whose cache is smallest."""
    if count <= 0:
        return []

    def harm(pod: Pod) -> tuple[bool, int, float]:
        worker = workers.get(pod.name)
        running = worker.load.num_running + worker.load.num_waiting if worker is not None else 0
        return pod.ready, running, -(pod.ready_since_s or 0.0)

    return sorted((pod for pod in pods if not pod.ending and not pod.victim), key=harm)[:count]


def by_name(statuses: Sequence[inference_pb2.ClusterStatus]) -> dict[str, inference_pb2.WorkerStatus]:
    """The workers by name, as the first router that is connected to each sees them."""
    found: dict[str, inference_pb2.WorkerStatus] = {}
    for status in statuses:
        for worker in status.workers:
            if worker.worker.name not in found or not found[worker.worker.name].connected:
                found[worker.worker.name] = worker
    return found
