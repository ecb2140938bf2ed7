"""The planner's process: it looks at the fleet, decides, and carries out, while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Mapping

from services.planner.cluster.calls import ClusterCalls, Conflict, cluster_calls
from services.planner.cluster.lease import Leadership
from services.planner.executor import Executor, LeadershipLost, by_name
from services.planner.figures.observer import Observer, Reading
from services.planner.figures.sources import Sources, unless
from services.planner.metrics import METRICS, PlannerState
from services.planner.policy import budget
from services.planner.policy.budget import Pair
from services.planner.policy.config import PlannerConfig
from services.planner.policy.elastic import ElasticPlanner
from services.planner.policy.observation import Observation
from services.planner.policy.planner import Decision, Planner
from services.planner.settings import PlannerSettings
from shared.errors import Internal, TandemError
from shared.kubernetes.access import ClusterAccess
from shared.tasks import end_task
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import MetricsServer

logger = logging.getLogger(__name__)


class PlannerService:
    """Implements `shared.process.Service`. `start()` returns when the metrics page serves, leader or not.

    Failure: whatever does not answer is counted and logged once until it does again; sizes stay as they are meanwhile.
    Nothing ends the process but a signal.
    """

    def __init__(self, settings: PlannerSettings, config: PlannerConfig | None = None) -> None:
        """`config`: None = as the settings say. Raises ConfigError."""
        self._settings = settings
        self._config = settings.policy() if config is None else config
        budget.check(self._config)
        self._access = ClusterAccess.of(settings.namespace, settings.kubeconfig, "kubeconfig")
        self.identity = settings.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.state = PlannerState(is_elastic=self._config.is_elastic)
        self._metrics = Metrics("tandem-planner", self.identity)
        self._metrics.observe(METRICS, self.state)
        self._server = MetricsServer(
            settings.metrics, self._metrics.registry, lambda: ""
        )  # a planner that waits for the Lease is ready
        self._sources = Sources(settings.api_key.get_secret_value(), settings.timeout_s, settings.router_tls.client())
        self._failure = ""
        self._stack = contextlib.AsyncExitStack()
        self._leadership: Leadership | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the metrics page."""
        return self._server.address

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Addresses by name, for the launcher."""
        return {"metrics": self._server.address}

    @property
    def leads(self) -> bool:
        """Whether this planner holds the Lease and may change pools."""
        return self._leadership is not None and self._leadership.held

    async def start(self) -> None:
        """Begins to seek the Lease. Raises ConfigError where the metrics' address is taken."""
        await self._server.start()
        settings = self._settings
        calls = await self._stack.enter_async_context(cluster_calls(self._access, settings.release, settings.timeout_s))
        self._leadership = Leadership(
            calls,
            f"{settings.release}-planner",
            self.identity,
            settings.lease_s,
            self._failed,
            lambda: None if self.state.leads else self._succeeded(),  # a leader asks for more than its Lease
        )
        self._leadership.start()
        self._task = asyncio.create_task(self._run(calls, self._leadership), name="planner")

    async def close(self) -> None:
        """Stops acting, gives the Lease back, ends all connections. Twice is fine."""
        task, self._task = self._task, None
        await end_task(task)
        if self._leadership is not None:
            await self._leadership.close()
        await self._sources.close()
        await self._stack.aclose()
        self._server.close()
        self._metrics.close()

    async def _run(self, calls: ClusterCalls, leadership: Leadership) -> None:
        while True:
            await leadership.changed.wait()
            leadership.changed.clear()
            await self._lead(calls, leadership)
            self.state.leads = False

    async def _lead(self, calls: ClusterCalls, leadership: Leadership) -> None:
        """Ticks until leadership is lost. It begins with nothing learnt: what another leader did is not known."""
        settings = self._settings
        planner = ElasticPlanner(self._config) if self._config.is_elastic else Planner(self._config)
        observer = Observer(settings.pool_names, settings.ttft_s, settings.tpot_s, self._config.cold_start_s)
        executor = Executor(
            self._config,
            settings.pool_names,
            settings.drain_timeout_s,
            calls,
            self._sources,
            lambda: leadership.held,
            self._failed,
        )
        while leadership.held:
            self.state.leads = True
            began_s = time.monotonic()
            try:
                await self._tick(calls, planner, observer, executor)
            except LeadershipLost:
                return
            except TandemError as error:
                self._failed(error)
            except Conflict as error:
                logger.info("another client changed an object meanwhile: %s", error)
            except Exception as error:
                # Uncaught it would end this loop alone: the lease is renewed on, so that no other planner takes over.
                logger.exception("a bug stopped a look at the cluster")
                self._failed(Internal(f"{type(error).__name__}: {error}"))
            await asyncio.sleep(max(0.0, settings.interval_s - (time.monotonic() - began_s)))

    async def _tick(
        self, calls: ClusterCalls, planner: Planner | ElasticPlanner, observer: Observer, executor: Executor
    ) -> None:
        failures = dict(self.state.num_failures)
        reading = await self._read(calls)
        seen = observer.observe(reading)
        self._note(seen)
        decision = planner.decide(seen)
        executor.ensure_leads()
        if decision.changes:
            if not self._settings.dry_run:
                try:
                    await executor.check(decision.target)
                except (TandemError, Conflict):
                    planner.refused(decision)  # no pool is changed where one may not be
                    raise
            await self._announce(calls, decision)
        self.state.target = decision.target
        if not self._settings.dry_run and reading.routers is not None:
            statuses = [router.status for router in reading.routers]
            await executor.step(decision.target, seen, reading.pods, by_name(statuses), reading.epoch_s)
        if self.state.num_failures == failures:
            self._succeeded()

    async def _read(self, calls: ClusterCalls) -> Reading:
        prefill, decode = self._settings.pool_names
        pods, *replicas = await asyncio.gather(
            calls.pods(), self._replicas(calls, prefill), self._replicas(calls, decode)
        )
        routers = await unless(lambda: self._sources.routers(pods), self._failed)
        serving = [pod for pod in pods if pod.component == "worker" and prefill and pod.pool == prefill and pod.ready]
        pages = await unless(lambda: self._sources.pages(serving), self._failed)
        return Reading(time.monotonic(), time.time(), pods, replicas[0], replicas[1], routers, pages)

    @staticmethod
    async def _replicas(calls: ClusterCalls, pool: str) -> int:
        """The replicas of a pool; 0 without a name."""
        return await calls.replicas(pool) if pool else 0

    async def _announce(self, calls: ClusterCalls, decision: Decision) -> None:
        """A log line and an Event on each Deployment that is to change; in a dry run the log line alone."""
        logger.info("%s%s", "dry run: " if self._settings.dry_run else "", decision)
        names = [name for name in self._settings.pool_names if name]
        for name, (role, before, after) in zip(names, decision.sizes, strict=True):
            if before == after:
                continue
            self.state.num_changes[role] = self.state.num_changes.get(role, 0) + 1
            if not self._settings.dry_run:
                await calls.event("ScaledUp" if after > before else "ScaledDown", str(decision), about=name)

    def _note(self, seen: Observation) -> None:
        self.state.num_ticks += 1
        self.state.replicas = Pair(seen.prefill.replicas, seen.decode.replicas)
        self.state.num_gpus = budget.gpus(self._config, Pair(seen.prefill.num_held, seen.decode.num_held))

    def _failed(self, error: Exception) -> None:
        """Counts it; logs it unless it is what failed last."""
        code = error.code if isinstance(error, TandemError) else "timeout"
        self.state.num_failures[code] = self.state.num_failures.get(code, 0) + 1
        self.state.failing = True
        if self._failure != code:
            self._failure = code
            logger.error("%s; it is tried again", error or type(error).__name__)

    def _succeeded(self) -> None:
        if self._failure:
            logger.info("all that the planner reads answers again")
        self._failure, self.state.failing = "", False
