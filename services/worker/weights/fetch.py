"""A model folder that this machine lacks, from a worker that serves it.

It is fetched before anything is loaded, into the folder itself. So ranks of a group read their slices from it, the next
start needs no peer, and a peer may have another processor, dtype or tensor-parallel degree.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from services.worker.settings import WorkerSettings
from services.worker.weights.files import (
    MAX_FILES,
    PART_PIECES,
    PIECE_BYTES,
    TRAILER_BYTES,
    FilePart,
    checksums_of,
    content_digest,
    is_whole,
    parts_of,
    piece_views,
)
from services.worker.weights.server import first_of, own_transfer, weights_key
from shared.address import Address, parse_named
from shared.durable_files import sync_file, sync_folder, write_all
from shared.errors import ModelLoadError, TandemError, TransferFailed
from shared.kv.fleet_key import FleetKey, seal_of, token_of
from shared.kv.seal import Purpose
from shared.kv.transfer import KVTransfer, new_ticket
from shared.rpc.connection import Connection
from shared.rpc.errors import from_store_error
from shared.rpc.fleet_identity import fleet_metadata
from shared.rpc.pb.tandem.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.tls import NamedCredentials, as_they_are

logger = logging.getLogger(__name__)

DESCRIBE_S = 30.0
"""For a peer to say what it has: it reads a part of every tensor."""
SILENT_S = 30.0
"""A peer that brings no part of 32 MiB for this long is given up."""
AT_ONCE = 2
"""Parts: one arrives while another is checked and written."""
STAGING = ".fetching"
"""Folder of what has not been checked as a whole."""

OnProgress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch of weights."""

    peer: str
    num_bytes: int
    seconds: float


async def fetch_missing_folder(settings: WorkerSettings, on_progress: OnProgress) -> Fetched | None:
    """Fetches the settings' model folder from a worker of `weights_from`, where the folder is not whole; None where it
    is, or no worker is named. Raises ModelLoadError, which says what was wrong with each peer; the folder then has what
    it had."""
    folder = Path(settings.model)
    if not settings.weights_from or await asyncio.to_thread(is_whole, folder):
        return None
    peers = list(parse_named(settings.weights_from, "weights_from", unnamed=True).values())
    fetch = FolderFetch(folder, await weights_key(settings), settings.tls.channel_credentials(), on_progress)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(addresses_of(peer)) for peer in peers]
    hosts = {
        address: Address.parse(peer, "weights_from").host
        for peer, task in zip(peers, asking, strict=True)
        for address in task.result()
    }
    addresses = list(hosts)
    random.shuffle(addresses)  # several that start take several peers
    return await fetch.from_any(addresses, hosts)


async def addresses_of(peer: str) -> list[str]:
    """host:port of every address that a name has, as a headless Service's of Kubernetes has one for each ready Pod;
    none of a name that has none."""
    address = Address.parse(peer, "weights_from", min_port=1)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("weights_from: %s has no address: %s", address.host, error)
        return []
    return [str(Address(str(place[0]), address.port)) for *_, place in found]


class FolderFetch:
    """Brings one folder. A process that finds another one at it waits for that one."""

    def __init__(
        self,
        folder: Path,
        key: FleetKey | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        on_progress: OnProgress = lambda _fraction, _what: None,
        transfer: Callable[[FleetKey | None], KVTransfer] = own_transfer,
    ) -> None:
        """`key` and `credentials` are the fleet's."""
        self._folder = folder
        self._staging = folder / STAGING
        self._key = key
        self._credentials = credentials
        self._on_progress = on_progress
        self._transfer = transfer
        self._complete: set[str] = set()
        self._left: dict[str, int] = {}  # bytes of each file that are to come
        self._digest = ""  # of what `_complete` are files of

    async def from_any(self, peers: list[str], hosts: Mapping[str, str] | None = None) -> Fetched | None:
        """Fetches from the first of the peers, host:port, that brings all of it; None where the folder is whole by
        then. `hosts`: by peer, the name that its certificate has where it is not the address. Raises
        ModelLoadError."""
        reasons: list[str] = []
        lock = await asyncio.to_thread(self._lock)
        try:
            if await asyncio.to_thread(is_whole, self._folder):
                return None
            await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)
            for peer in peers:
                began = time.perf_counter()
                try:
                    num_bytes = await self._from(peer, (hosts or {}).get(peer, ""))
                except TandemError as error:
                    logger.warning("worker %s did not bring model folder %s: %s", peer, self._folder, error)
                    reasons.append(f"{peer}: {error.message}")
                    continue
                fetched = Fetched(peer, num_bytes, time.perf_counter() - began)
                logger.info(
                    "model folder %s came from worker %s: %d bytes in %.1f s",
                    self._folder, peer, num_bytes, fetched.seconds,
                )  # fmt: skip
                return fetched
        finally:
            await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)
            os.close(lock)
        why = "; ".join(reasons) or "no worker is there"
        raise ModelLoadError(f"{self._folder} has no model, and no worker gave one ({why})", field="weights_from")

    def _lock(self) -> int:
        """The folder's descriptor, locked until it is closed. Raises ModelLoadError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError as error:
            raise ModelLoadError(f"{self._folder} cannot be written to: {error}", field="model") from error
        return held

    async def _from(self, peer: str, host: str) -> int:
        """Raises TandemError; what came whole stays for the next peer."""
        credentials = as_they_are(self._credentials)
        if credentials is not None and not isinstance(credentials, NamedCredentials) and host:
            credentials = NamedCredentials(credentials, host)
        connection = Connection(peer, credentials)
        metadata = fleet_metadata(token_of(self._key))
        stub = weights_pb2_grpc.WeightServiceStub(connection.channel())
        transfer = self._transfer(self._key)
        try:
            described = await stub.Describe(weights_pb2.DescribeWeights(), timeout=DESCRIBE_S, metadata=metadata)
            _check(described)
            if described.digest != self._digest:
                self._digest, self._complete = described.digest, set()
            await transfer.start()
            await self._receive(described, transfer, stub.Send(metadata=metadata))
            await asyncio.to_thread(self._put_in_place, described)
        except grpc.aio.AioRpcError as error:
            raise from_store_error(error, peer) from error
        except TimeoutError:
            raise TransferFailed(f"it brought nothing for {SILENT_S:g} s", limit=SILENT_S) from None
        except OSError as error:
            raise ModelLoadError(f"{self._folder} cannot be written to: {error}", field="model") from error
        finally:
            await transfer.close()
            await connection.close()
        return sum(file.num_bytes for file in described.files)

    async def _receive(self, described: weights_pb2.WeightFiles, transfer: KVTransfer, call: object) -> None:
        missing = [file for file in described.files if file.name not in self._complete]
        await asyncio.to_thread(self._make_files, missing)
        self._left = {file.name: file.num_bytes for file in missing}
        self._complete.update(file.name for file in missing if not file.num_bytes)
        parts = (part for file in missing for part in parts_of(file.name, file.num_bytes))
        stream = _Stream(call, parts, sum(file.num_bytes for file in missing), self._on_progress)
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(stream.read())
                async with asyncio.TaskGroup() as workers:
                    for _ in range(AT_ONCE):
                        workers.create_task(self._take_parts(stream, transfer))
                reading.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            stream.close()

    def _make_files(self, files: list[weights_pb2.WeightFile]) -> None:
        self._staging.mkdir(exist_ok=True)
        for file in files:
            with (self._staging / file.name).open("wb") as made:
                made.truncate(file.num_bytes)

    async def _take_parts(self, stream: _Stream, transfer: KVTransfer) -> None:
        buffer = np.empty(PART_PIECES * PIECE_BYTES, np.uint8)
        for part in stream.parts:
            ticket, pieces = new_ticket(), piece_views(buffer, part.num_pieces)
            incoming = transfer.expect(ticket, list(enumerate(pieces)), TRAILER_BYTES)
            try:
                async with asyncio.timeout(SILENT_S):
                    sent = await stream.ask(part, ticket, transfer.address)
                    await incoming.blocks(range(part.num_pieces))
                    await incoming.trailer()
            finally:
                await transfer.cancel(ticket)
            await asyncio.to_thread(self._store, part, pieces, sent)
            stream.note(part.num_bytes)
            self._left[part.file] -= part.num_bytes
            if not self._left[part.file]:
                self._complete.add(part.file)

    def _store(self, part: FilePart, pieces: list[memoryview], sent: weights_pb2.SentWeights) -> None:
        """Checks the pieces of a part, and writes them. Raises TransferFailed, which names what is damaged."""
        path = self._staging / part.file
        if not len(sent.checksums) == len(sent.contents) == len(pieces):
            raise TransferFailed("it announced other pieces than were asked for", field="checksums")
        sound = [True] * len(pieces)
        if (seal := seal_of(self._key, Purpose.WEIGHTS, sent.ticket, PIECE_BYTES)) is not None:
            if len(sent.tags) != len(pieces):
                raise TransferFailed("it announced pieces without tags", field="tags")
            sound = seal.open_blocks([(index, piece, sent.tags[index]) for index, piece in enumerate(pieces)])
        for index, checksum in enumerate(checksums_of(pieces)):
            if not sound[index] or checksum != sent.checksums[index]:
                where = f"{part.file} from byte {part.offset + index * PIECE_BYTES} on"
                raise TransferFailed(f"{sent.contents[index] or 'its header'} arrived damaged ({where})")
        with path.open("r+b", buffering=0) as file:
            file.seek(part.offset)
            left = part.num_bytes
            for piece in pieces:
                write_all(file, piece[: min(left, PIECE_BYTES)])
                left -= PIECE_BYTES

    def _put_in_place(self, described: weights_pb2.WeightFiles) -> None:
        """Raises ModelLoadError where the files together are not what the peer serves."""
        if (found := content_digest(self._staging)) != described.digest:
            self._complete.clear()
            raise ModelLoadError(f"the files are those of {found}, not of {described.digest} as was announced")
        for file in described.files:
            sync_file(self._staging / file.name)
        for file in described.files:  # the configuration last
            (self._staging / file.name).replace(self._folder / file.name)
        sync_folder(self._folder)


class _Stream:
    """The calls of one fetch: what was asked, and who waits for its answer."""

    def __init__(self, call: object, parts: Iterator[FilePart], num_bytes: int, on_progress: OnProgress) -> None:
        self.parts = parts
        """The parts that were not asked for yet."""
        self._call: grpc.aio.StreamStreamCall[weights_pb2.SendWeights, weights_pb2.SentWeights] = call  # type: ignore[assignment]
        self._waiting: dict[int, asyncio.Future[weights_pb2.SentWeights]] = {}
        self._writing = asyncio.Lock()
        self._num_bytes = num_bytes
        self._num_here = 0
        self._on_progress = on_progress

    async def ask(self, part: FilePart, ticket: int, address: bytes) -> weights_pb2.SentWeights:
        """Asks for a part; returns when it has begun to come."""
        waiter: asyncio.Future[weights_pb2.SentWeights] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = waiter
        request = weights_pb2.SendWeights(
            file=part.file, offset=part.offset, num_pieces=part.num_pieces, ticket=ticket, transfer_address=address
        )
        try:
            async with self._writing:
                await self._call.write(request)
            return await waiter
        except asyncio.InvalidStateError:  # gRPC's, of a call that is over: `read` says why
            return await waiter
        finally:
            self._waiting.pop(ticket, None)

    async def read(self) -> None:
        """Hands answers to who waits for them; until it is cancelled. Raises TransferFailed, AioRpcError."""
        while True:
            sent = await self._call.read()
            if not isinstance(sent, weights_pb2.SentWeights):
                break  # EOF
            waiter = self._waiting.get(sent.ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(sent)
        raise TransferFailed("it ended the call before everything was sent")

    def note(self, num_bytes: int) -> None:
        """A part is on the disk."""
        self._num_here += num_bytes
        self._on_progress(self._num_here / max(1, self._num_bytes), "fetching weights")

    def close(self) -> None:
        """Ends the call."""
        self._call.cancel()


def _check(described: weights_pb2.WeightFiles) -> None:
    """Raises TransferFailed for names that would lie elsewhere."""
    names = [file.name for file in described.files]
    if not names or len(names) > MAX_FILES or len(set(names)) != len(names):
        raise TransferFailed(f"it names {len(names)} files", field="files", limit=MAX_FILES)
    for name in names:
        if not name or Path(name).name != name or name.startswith("."):
            raise TransferFailed(f"it names {name!r}, which is not a plain file name", field="files")
