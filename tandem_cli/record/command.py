"""`tandem record`: a cluster's requests as a trace, without a word of what they say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer

from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc
from tandem import AsyncTandemClient
from tandem.failures import typed
from tandem_cli.console import json_of
from tandem_cli.failures import EXIT_FAILED
from tandem_cli.options import LOCAL, Connection
from tandem_cli.quantities import count_of, seconds_of
from tandem_cli.record.trace_file import TraceFile, cluster_file

_LONGEST_S = 30 * 86_400.0
_KEY_BYTES = 32
_SHOW_EVERY_S = 1.0
_MOST_REQUESTS = 10_000_000
_SHORT = 4
"""A prompt of fewer ids than this says little of what it shares."""


def record(
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace, as Mooncake's JSON lines; must not exist yet.")],
    duration: Annotated[
        str, typer.Option("--duration", help="For how long, 10min; default: until Ctrl-C, which ends it in order.")
    ] = "",
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size",
            help="Prompt tokens of one id, a multiple of 16. 512 is Mooncake's; 16 to 64 where prompts are short.",
        ),
    ] = 512,
    max_requests: Annotated[
        str, typer.Option("--max-requests", help="Ends after as many. Each takes 20 bytes of memory here.")
    ] = "1m",
    wait: Annotated[str, typer.Option("--wait", help="For what still runs at the end.")] = "60s",
    model: Annotated[str, typer.Option("--model", help="Served name; empty = the first model.")] = "",
    connection: Connection = LOCAL,
) -> None:
    """Record a cluster's requests as a trace: arrival, lengths and hashes of prefixes, never a text.

    The hashes have a key that is drawn for the recording and written nowhere. Beside the trace lies the cluster as it
    was at the end, for `tandem fit --trace FILE --measured FILE`. With several routers name all in --target.
    """
    settings = _Settings(
        seconds_of(duration, "duration", _LONGEST_S) if duration else None,
        seconds_of(wait, "wait", 3600.0),
        count_of(max_requests, "max-requests", _MOST_REQUESTS),
        block_size,
        model,
    )
    targets = [part.strip() for part in connection.target.split(",") if part.strip()]
    with TraceFile(out, block_size) as trace:
        failure = asyncio.run(_Run(trace, settings, len(targets)).record(targets, connection))
        summary = trace.finish()
    print(summary)
    if trace.mean_prompt_tokens and trace.mean_prompt_tokens < _SHORT * block_size > _SHORT * 16:
        print(f"the prompts are short beside ids of {block_size} tokens: --block-size 16 says more of what they share")
    cluster = cluster_file(out)
    wrote = f"wrote {out} and {cluster}: tandem fit --trace {out} --measured {cluster}"
    print(wrote if cluster.exists() else f"wrote {out}")
    if failure is not None:
        print(f"tandem: {failure.message}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True)
class _Settings:
    duration_s: float | None
    wait_s: float
    max_requests: int
    block_size: int
    model: str


class _Run:
    """One recording, of one or several routers."""

    def __init__(self, trace: TraceFile, settings: _Settings, num_targets: int) -> None:
        self._trace, self._settings, self._num_targets = trace, settings, num_targets
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._stop = asyncio.Event()  # no requests that arrive later
        self._leave = asyncio.Event()  # not even those that still run
        self._begun = asyncio.Event()  # all routers record
        self._num_dropped: dict[str, int] = {}
        self._num_running: dict[str, int] = {}

    async def record(self, targets: list[str], connection: Connection) -> TandemError | None:
        """Into the trace file, and the cluster beside it. Returns what ended it early; raises what kept it from
        beginning."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._on_signal)
        clients = [replace(connection, target=target).open(AsyncTandemClient) for target in targets]
        showing = asyncio.create_task(self._show())
        timing = asyncio.create_task(self._end_in_time())
        try:
            failures = list(await asyncio.gather(*map(self._follow, clients, targets)))
            failures.append(await self._keep_cluster(clients))
        finally:
            showing.cancel()
            timing.cancel()
            await asyncio.gather(*(client.close() for client in clients))
        return next((failure for failure in failures if failure is not None), None)

    async def _keep_cluster(self, clients: list[AsyncTandemClient]) -> TandemError | None:
        """Writes the cluster as the first router that answers sees it; returns why none does."""
        failure: TandemError | None = None
        for client in clients:
            try:
                status = await client.status()
            except TandemError as error:
                failure = failure or error
                continue
            text = json_of(status)
            cluster_file(self._trace.path).write_text(text + "\n")
            return None
        return failure

    def _on_signal(self) -> None:
        (self._leave if self._stop.is_set() else self._stop).set()

    async def _end_in_time(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.duration_s):
                await self._stop.wait()
        self._stop.set()
        await asyncio.sleep(self._settings.wait_s)
        self._leave.set()

    async def _follow(self, client: AsyncTandemClient, target: str) -> TandemError | None:
        """One router's requests. Returns what broke the stream after it had begun; raises what came before."""
        asked = fleet_pb2.RecordRequest(key=self._key, block_size=self._settings.block_size, model=self._settings.model)
        call = fleet_pb2_grpc.FleetServiceStub(client.channel(target)).Record(
            self._messages(asked), metadata=client.key
        )
        leaving = asyncio.create_task(self._cancel(call))
        begun = False
        try:
            async for message in call:
                begun = True
                self._take(target, message)
        except grpc.aio.AioRpcError as error:
            failure = typed(error, target, answered=begun)
            if not begun:
                raise failure from error
            self._stop.set()
            return failure
        except asyncio.CancelledError:
            if not self._leave.is_set():
                raise
        finally:
            leaving.cancel()
        return None

    async def _messages(self, asked: fleet_pb2.RecordRequest) -> AsyncIterator[fleet_pb2.RecordRequest]:
        """The end of this ends the recording in order."""
        yield asked
        await self._stop.wait()

    async def _cancel(
        self, call: grpc.aio.StreamStreamCall[fleet_pb2.RecordRequest, fleet_pb2.RecordedRequests]
    ) -> None:
        await self._leave.wait()
        call.cancel()

    def _take(self, target: str, message: fleet_pb2.RecordedRequests) -> None:
        self._num_dropped[target], self._num_running[target] = message.num_dropped, message.num_running
        if len(self._num_running) == self._num_targets:
            self._begun.set()
        self._trace.num_dropped = sum(self._num_dropped.values())
        self._trace.num_running = sum(self._num_running.values())
        for request in message.requests[: self._settings.max_requests - self._trace.num_requests]:
            self._trace.add(request)
        if self._trace.num_requests == self._settings.max_requests:
            self._stop.set()
            self._leave.set()

    async def _show(self) -> None:
        """A line when all record; on a terminal another one, which is written over."""
        await self._begun.wait()
        begun_s = time.monotonic()
        print("recording; Ctrl-C ends it", file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            return
        try:
            await self._count(begun_s)
        finally:
            print(file=sys.stderr)

    async def _count(self, begun_s: float) -> None:
        while True:
            await asyncio.sleep(_SHOW_EVERY_S)
            ending = f", waiting for {self._trace.num_running} that run" if self._stop.is_set() else ""
            text = f"{time.monotonic() - begun_s:.0f} s: {self._trace.num_requests} requests{ending}"
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
