"""Match requests over one stream: gRPC's overhead of a call (headers, deadline, trailers) is paid once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import grpc.aio

from shared.errors import StoreUnavailable, TandemError
from shared.rpc.errors import from_proto
from shared.rpc.pb.tandem.v1 import kvstore_pb2

Stream = grpc.aio.StreamStreamCall[kvstore_pb2.MatchCall, kvstore_pb2.MatchAnswer]


class MatchStream:
    """One stream to one store, for any number of concurrent requests. A broken stream stays broken (`is_open`); its
    owner opens a new one."""

    def __init__(self, stream: Stream, address: str, translate: Callable[[grpc.aio.AioRpcError], TandemError]) -> None:
        """Owns the stream and starts the task that reads it. `translate` turns gRPC's errors into typed ones."""
        self._stream = stream
        self._address = address
        self._translate = translate
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[kvstore_pb2.MatchAnswer]] = {}
        self._writing = asyncio.Lock()  # gRPC allows one write at a time
        self._broken: TandemError | None = None
        self._kept: list[bytes] = []  # ids of traces that the store is to be told of
        self._keeping: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read(), name="match stream")

    @property
    def is_open(self) -> bool:
        """False once broken or closed."""
        return self._broken is None

    async def ask(
        self, request: kvstore_pb2.MatchRequest, timeout_s: float, traceparent: str = ""
    ) -> kvstore_pb2.MatchResponse:
        """The store's answer; `traceparent` as in MatchCall. Raises StoreUnavailable if none comes in time, or the
        typed error in the answer."""
        if self._broken is not None:
            raise self._broken
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    await self._stream.write(kvstore_pb2.MatchCall(id=number, request=request, traceparent=traceparent))
                answer = await future
        except TimeoutError as error:
            message = f"KV store {self._address} did not answer in time"
            raise StoreUnavailable(message, address=self._address) from error
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        except asyncio.InvalidStateError as error:  # raised by a write to a stream that has ended
            raise StoreUnavailable(f"KV store {self._address} ended the stream", address=self._address) from error
        finally:
            del self._waiting[number]
        if answer.HasField("error"):
            raise from_proto(answer.error)
        response: kvstore_pb2.MatchResponse = answer.response
        return response

    def keep_trace(self, trace_id: bytes) -> None:
        """Passes it on in a call that asks nothing: see MatchCall. Does not block."""
        self._kept.append(trace_id)
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._send_kept(), name="kept traces")

    async def _send_kept(self) -> None:
        while self._kept and self.is_open:
            async with self._writing:
                kept, self._kept = self._kept, []
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader notices it
                    await self._stream.write(kvstore_pb2.MatchCall(kept_traces=kept))

    async def close(self) -> None:
        """Ends the stream; waiting requests get StoreUnavailable. Idempotent."""
        self._stream.cancel()
        await asyncio.wait({self._reader, *({self._keeping} if self._keeping is not None else ())})

    async def _read(self) -> None:
        broken: TandemError = StoreUnavailable(f"KV store {self._address} ended the stream", address=self._address)
        try:
            while isinstance(answer := await self._stream.read(), kvstore_pb2.MatchAnswer):
                future = self._waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
        except grpc.aio.AioRpcError as error:
            broken = self._translate(error)
        except asyncio.CancelledError:
            pass  # by `close`, or by the end of the event loop
        self._broken = broken
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(broken)
