"""A router's core over scripted workers, with real gRPC sessions between them."""

from __future__ import annotations

import asyncio
import contextlib
import time

from services.router.dispatch.config import DispatchConfig
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.placement.policy import Placement, PlacementConfig
from services.router.request import Request
from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from shared.engine.sampling_params import SamplingParams
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import decode_pb2, prefill_pb2, types_pb2
from tests.integration.router.scripted_worker import DEADLINE_S, ScriptedWorker
from tests.unit.router.reading import deltas

STOP = types_pb2.FINISH_REASON_STOP
PROMPT = tuple(range(5, 13))


class NoMetrics:
    """Keeps what the dispatcher tells."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.routes: list[str] = []
        self.refusals: list[str] = []
        self.causes: list[str] = []
        self.migrations: list[str] = []

    def refused(self, *, waited: bool, cause: str) -> None:
        self.refusals.append("waited" if waited else "arrival")
        self.causes.append(cause)

    def migrated(self, phase: str, error: TandemError) -> None:
        self.migrations.append(f"{phase} {error.code}")

    def placed(self, route) -> None:
        self.routes.append(route.value)

    def retried(self, error: TandemError) -> None:
        self.outcomes.append(f"retried {error.code}")


class Watched(Dispatcher):
    """Notes how each request ended."""

    def _end(self, active, task) -> None:
        super()._end(active, task)
        error = active._error
        self._metrics.outcomes.append(error.code if error is not None else active.state.value)


class Router:
    """The core over a fleet of scripted workers."""

    def __init__(self, prefills, decodes, placement=None, **config) -> None:
        self._placement = placement or {}
        self.workers = {worker.name: worker for worker in (*prefills, *decodes)}
        self._prefills, self._decodes = prefills, decodes
        self._collocated = config.pop("collocated", not prefills)
        self._limits = config.pop("limits", None)
        self._config = config

    async def __aenter__(self) -> Router:
        for worker in self.workers.values():
            await worker.start()
        self.changed = asyncio.Event()
        self.fleet = Fleet(
            "router-under-test",
            self._discovery(),
            self._on_change,
            collocated=self._collocated,
            limits=self._limits,
        )
        self.metrics = NoMetrics()
        lookup = PrefixLookup(None, self.fleet)
        placement = Placement(PlacementConfig(**self._placement))
        config = DispatchConfig(collocated=self._collocated, **self._config)
        self.dispatcher = Watched(self.fleet, placement, lookup, self.metrics, config)
        self.fleet.start()
        await self.until(lambda: all(link.connected or link.mismatch for link in self.fleet.links))
        return self

    async def __aexit__(self, *_) -> None:
        await self.fleet.close()
        for worker in self.workers.values():
            await worker.stop()

    def _discovery(self):
        return StaticDiscovery.of(
            {worker.name: worker.address for worker in self._prefills},
            {worker.name: worker.address for worker in self._decodes},
        )

    def _on_change(self) -> None:
        self.changed.set()
        self.dispatcher.pump()

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.02)

    def submit(self, request_id="r", **sampling):
        params = SamplingParams(**{"seed": 1, "max_tokens": 8, **sampling})
        return self.dispatcher.submit(Request(request_id, PROMPT, params))

    def ask(self, request_id="r", prompt=PROMPT, **fields):
        """Like `submit`, with fields of the request instead of sampling's."""
        params = SamplingParams(seed=1, max_tokens=8)
        return self.dispatcher.submit(Request(request_id, prompt, params, arrived_at=time.perf_counter(), **fields))


def prefill_worker(name="p0", **kwargs) -> ScriptedWorker:
    return ScriptedWorker(name, types_pb2.WORKER_ROLE_PREFILL, **kwargs)


def decode_worker(name="d0", **kwargs) -> ScriptedWorker:
    return ScriptedWorker(name, types_pb2.WORKER_ROLE_DECODE, **kwargs)


async def read(running) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [token async for delta in deltas(running) for token in delta.token_ids]


async def to_submit(prefill, decode):
    """Reserve → Reserved → Submit."""
    reserve = await decode.expect(decode_pb2.Reserve)
    await decode.reserved(reserve.request_id, ticket=99, needed=(0, 1))
    return await prefill.expect(prefill_pb2.Submit)
