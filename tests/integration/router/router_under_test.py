"""A router's core over scripted workers, with real gRPC sessions between them."""

from __future__ import annotations

import asyncio
import time

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.dispatch.record import RequestEvent, RequestRecord
from services.router.dispatch.request import Request
from services.router.dispatch.waiting_room import DispatchConfig
from services.router.placement.policy import Placement, PlacementConfig
from services.router.workers.discovery import StaticDiscovery
from services.router.workers.fleet import Fleet
from shared.engine.sampling_params import SamplingParams
from shared.errors import Overloaded
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.scripted_worker import ScriptedWorker
from tests.unit.router.reading import deltas
from tests.waiting import DEADLINE_S, until

STOP = types_pb2.FINISH_REASON_STOP
PROMPT = tuple(range(5, 13))


class Noted:
    """Keeps what the records of the dispatcher's requests say, as it comes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        """Retries, and how each request ended."""
        self.routes: list[str] = []
        self.refusals: list[str] = []
        self.causes: list[str] = []
        self.migrations: list[str] = []
        self.records: dict[str, RequestRecord] = {}
        """The newest by request id."""

    def noted(self, record: RequestRecord) -> None:
        entry = record.entries[-1]
        self.records[record.ask.request_id] = record
        code = entry.error.code if entry.error is not None else ""
        match entry.event:
            case RequestEvent.PLACED:
                self.routes.append(record.choices[-1].route.value)
            case RequestEvent.SENDER_LOST:
                self.outcomes.append(f"retried {code}")
                self.migrations.append(f"prompt {code}")
            case RequestEvent.RETRY if code != Overloaded.code:
                if entry.worker:
                    self.outcomes.append(f"retried {code}")
                if record.num_output_tokens:
                    self.migrations.append(f"answer {code}")
            case RequestEvent.FULL | RequestEvent.LATE | RequestEvent.TIMEOUT:
                waited = any(before.event in (RequestEvent.WAITED, RequestEvent.PLACED) for before in record.entries)
                self.refusals.append("waited" if waited else "arrival")
                self.causes.append(entry.event.value)
        if record.state.ended:
            self.outcomes.append(code or record.state.value)


class Router:
    """The core over a fleet of scripted workers."""

    def __init__(self, prefills, decodes, placement=None, **config) -> None:
        self._placement = placement or {}
        self.workers = {worker.name: worker for worker in (*prefills, *decodes)}
        self._prefills, self._decodes = prefills, decodes
        self._collocated = config.pop("collocated", not prefills)
        self._limits = config.pop("limits", None)
        self._moves = config.pop("moves", None)
        self._config = config

    async def __aenter__(self) -> Router:
        for worker in self.workers.values():
            await worker.start()
        self.fleet = Fleet(
            "router-under-test",
            self._discovery(),
            self._on_change,
            collocated=self._collocated,
            limits=self._limits,
        )
        self.metrics = Noted()
        lookup = PrefixLookup(None, self.fleet)
        placement = Placement(PlacementConfig(**self._placement))
        config = DispatchConfig(mode="collocated" if self._collocated else "disaggregated", **self._config)
        self.dispatcher = Dispatcher(self.fleet, placement, lookup, config, self.metrics, self._moves)
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
        self.dispatcher.pump()

    async def until(self, condition) -> None:
        await until(condition)

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
    reserve = await decode.expect(worker_pb2.Reserve)
    await decode.reserved(reserve.request_id, ticket=99, needed=(0, 1))
    return await prefill.expect(worker_pb2.Submit)


async def to_second_token(router, prefill, decode, request_id="r"):
    """An answer of which the client's side has a token of each worker: it and its Submit."""
    running = router.submit(request_id)
    submit = await to_submit(prefill, decode)
    await prefill.first_token(submit.request_id, 50)
    await decode.step(submit.request_id, 51)
    await router.until(lambda: len(running.produced) == 2)
    return running, submit
