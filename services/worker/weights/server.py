"""`tandem.v1.WeightService`: a worker gives its model folder to workers that start.

The files are read anew, mostly from the page cache. What the worker computes with is no use to another: on a CPU it is
packed for this processor's instructions, on a GPU it has this worker's dtype, and each rank has its own slice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from services.worker.settings import WorkerSettings
from services.worker.weights.files import (
    PART_PIECES,
    PIECE_BYTES,
    TRAILER_BYTES,
    checksums_of,
    content_digest,
    entries_of,
    folder_files,
    piece_views,
    what_lies_at,
)
from shared.errors import InvalidRequest, ModelLoadError, Overloaded, TandemError
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kv.fleet_key import FleetKey, seal_of
from shared.kv.seal import Purpose, SealedBlock
from shared.kv.transfer import TICKET_BITS, TRAILER_INDEX, KVTransfer
from shared.kv.ucx import UcxTransfer
from shared.rpc.errors import answer
from shared.rpc.fleet_identity import FleetGuard
from shared.rpc.pb.tandem.v1 import weights_pb2, weights_pb2_grpc
from shared.tasks import unbroken

logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.WeightService"
MAX_FETCHES = 4
"""At once; a worker that asks then takes another peer, or its own folder."""
AT_ONCE = 2
"""Parts of one fetch: one is read while another is on its way."""

Context = grpc.aio.ServicerContext[Any, Any]


def own_transfer(key: FleetKey | None) -> KVTransfer:
    """A transfer plane for one fetch. It is not the worker's own, whose counters are of KV, and ends with the fetch."""
    return UcxTransfer(fleet_key=key, needs_gpu=False)


async def weights_key(settings: WorkerSettings) -> FleetKey | None:
    """The fleet's key, for model files alone: the worker's own keeps the hash of one size of blocks. Raises
    ConfigError."""
    key = FleetKey.of(settings.fleet_key.get_secret_value(), settings.block_encryption)
    if key is not None:
        key.use(await asyncio.to_thread(fastest_sum))
    return key


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a group's tasks raised first; ours before gRPC's, since it says more."""
    flat: list[BaseException] = []
    todo: list[BaseException] = [errors]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo += error.exceptions
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, TandemError)), flat[0])


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Serves one folder at a time. Every call is for workers of the fleet."""

    def __init__(
        self,
        folder: Callable[[], Path],
        guard: FleetGuard,
        key: FleetKey | None = None,
        transfer: Callable[[FleetKey | None], KVTransfer] = own_transfer,
    ) -> None:
        """`folder`: that which the worker serves now. `key`: see `weights_key`."""
        self._folder = folder
        self._guard = guard
        self._key = key
        self._transfer = transfer
        self._num_fetches = 0

    def register(self, server: grpc.aio.Server) -> None:
        """The `register` of `RpcServer`."""
        weights_pb2_grpc.add_WeightServiceServicer_to_server(self, server)

    async def Describe(  # noqa: N802
        self,
        request: weights_pb2.DescribeWeights,  # noqa: ARG002
        context: Context,
    ) -> weights_pb2.WeightFiles:
        """The files there are."""
        return await answer(self._describe(context), context)

    async def Send(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Sends what is asked for, until the caller ends the stream."""
        await answer(self._send(request_iterator, context), context)

    async def _describe(self, context: Context) -> weights_pb2.WeightFiles:
        self._guard.check(context)
        folder = self._folder()

        def read() -> weights_pb2.WeightFiles:
            files = [
                weights_pb2.WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in folder_files(folder)
            ]
            return weights_pb2.WeightFiles(model_name=folder.name, digest=content_digest(folder), files=files)

        return await asyncio.to_thread(read)

    async def _send(self, requests: Any, context: Context) -> None:
        self._guard.check(context)
        if self._num_fetches >= MAX_FETCHES:
            raise Overloaded(f"{MAX_FETCHES} workers fetch this one's weights already", limit=MAX_FETCHES)
        self._num_fetches += 1
        folder = self._folder()
        transfer = self._transfer(self._key)
        try:
            known = await asyncio.to_thread(lambda: {path.name: path for path in folder_files(folder)})
            async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
                await transfer.start()
                # Before the group waits for its tasks: a send to who has gone ends with the transfer.
                stack.push_async_callback(transfer.close)
                sender = _Sender(transfer, self._key, context)
                async for request in requests:
                    path = known.get(request.file)
                    if path is None:
                        raise InvalidRequest(f"{request.file!r} is no file of {folder.name}", field="file")
                    await sender.room.acquire()
                    group.create_task(sender.send(path, request))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            self._num_fetches -= 1


class _Sender:
    """The parts of one fetch."""

    def __init__(self, transfer: KVTransfer, key: FleetKey | None, context: Context) -> None:
        self.room = asyncio.Semaphore(AT_ONCE)
        """Taken before each `send`, which gives it back."""
        self._transfer = transfer
        self._key = key
        self._context = context
        self._writing = asyncio.Lock()
        self._entries = lru_cache(maxsize=2)(entries_of)  # of the files that are under way

    async def send(self, path: Path, request: weights_pb2.SendWeights) -> None:
        """Reads a part, announces it, and returns when it was taken. Raises TandemError."""
        try:
            if not 0 < request.num_pieces <= PART_PIECES:
                raise InvalidRequest(
                    f"num_pieces must be 1 to {PART_PIECES}, not {request.num_pieces}",
                    field="num_pieces",
                    limit=PART_PIECES,
                )
            if request.ticket >> TICKET_BITS:
                raise InvalidRequest(f"ticket has more than {TICKET_BITS} bits", field="ticket", limit=TICKET_BITS)
            seal = seal_of(self._key, Purpose.WEIGHTS, request.ticket, PIECE_BYTES)

            def read() -> tuple[weights_pb2.SentWeights, list[SealedBlock]]:
                buffer = np.zeros(request.num_pieces * PIECE_BYTES, np.uint8)
                _read_into(path, request.offset, memoryview(buffer.data))
                pieces = piece_views(buffer, request.num_pieces)
                entries, begin = self._entries(path), request.offset
                sent = weights_pb2.SentWeights(
                    ticket=request.ticket,
                    checksums=checksums_of(pieces),
                    contents=[what_lies_at(entries, begin + at * PIECE_BYTES) for at in range(len(pieces))],
                )
                if seal is None:
                    return sent, [SealedBlock(piece) for piece in pieces]
                sealed = seal.close_blocks(list(enumerate(pieces)))
                sent.tags.extend(piece.tag for piece in sealed)
                return sent, sealed

            sent, pieces = await asyncio.to_thread(read)
            async with self._writing:
                await self._context.write(sent)
            blocks = [(number, piece.wire) for number, piece in enumerate(pieces)]
            blocks.append((TRAILER_INDEX, memoryview(bytes(TRAILER_BYTES))))
            # To its end: a send must not be cancelled. A receiver that is gone fails it.
            await unbroken(self._transfer.send_blocks(request.transfer_address, request.ticket, blocks, lambda: None))
            if seal is not None:
                for piece in pieces:
                    seal.give_back(piece)
        finally:
            self.room.release()


def _read_into(path: Path, offset: int, memory: memoryview) -> None:
    """The file's bytes from there on, as many as there are. Raises ModelLoadError."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            at = 0
            while at < len(memory) and (count := file.readinto(memory[at:])):
                at += count
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", file=path.name) from error
