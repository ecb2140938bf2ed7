"""Files of tenants in one folder: data and a description each, bounded in bytes, forgotten after a time."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from services.router.edge.http.bodies import BodyTooLargeError
from services.router.edge.settings import BatchSettings
from shared.durable_files import sync_folder
from shared.errors import ConfigError, InvalidRequest, NotFound, Overloaded, QuotaExceeded, brief
from shared.tasks import unbroken

LEAST_BYTES = 4096
"""A shorter file counts as this long, so that the number of files is bounded too."""
WRITE_BYTES = 1 << 20
"""An upload is written in pieces of at least this length."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. Times in seconds since 1970."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's `file` object."""
        fields = asdict(self)
        del fields["tenant"]
        return {"object": "file", **fields, "status": "processed"}

    @property
    def counted_bytes(self) -> int:
        """Bytes that the file counts for in the limits of storage, at least LEAST_BYTES."""
        return max(LEAST_BYTES, self.bytes)


class FileStore:
    """The files of one folder, which one process at a time may use. A tenant finds only files of its own. Threads do
    all I/O, except that of `open`."""

    def __init__(self, settings: BatchSettings, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970. No I/O before `open`."""
        assert settings.folder is not None
        self.folder = settings.folder
        self._settings = settings
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        self._arriving: dict[Path, tuple[str, int]] = {}
        """Tenant and counted bytes of uploads that `keep` has not made files yet, by path."""
        self._held = Counter[str]()
        """Counted bytes of files and uploads by tenant."""
        self._lock: BinaryIO | None = None
        self.in_use: Callable[[str], bool] = lambda _: False
        """Whether a file may not be deleted now."""

    def open(self) -> None:
        """Reads what is there, and forgets uploads that were cut off. Raises ConfigError (`edge.batch.folder`) where
        the folder cannot be used or another process has it."""
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            why = "another process has it" if isinstance(error, BlockingIOError) else str(error)
            raise ConfigError(f"edge.batch.folder cannot be used: {why}", field="edge.batch.folder") from error
        known = set()
        for path in self._data.glob("*.json"):
            stored = StoredFile(**json.loads(path.read_text()))
            self._add(stored)
            known.add(stored.id)
        for path in self._data.iterdir():
            if path.name.partition(".")[0] not in known or path.suffix == ".part":
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlocks the folder; twice is fine."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _data(self) -> Path:
        return self.folder / "files"

    def path(self, file_id: str) -> Path:
        """Path of the file's data."""
        return self._data / f"{file_id}.data"

    def get(self, tenant: str, file_id: str, field: str = "file_id") -> StoredFile:
        """A tenant's file that has not expired. Raises NotFound (`field`)."""
        found = self._files.get(file_id)
        if found is None or found.tenant != tenant or found.expires_at <= self._clock():
            raise NotFound(f"there is no file {brief(file_id, 100)!r}", field=field, value=brief(file_id, 100))
        return found

    def of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files that have not expired, oldest first."""
        now = self._clock()
        found = [file for file in self._files.values() if file.tenant == tenant and file.expires_at > now]
        return sorted(found, key=lambda file: (file.created_at, file.id))

    def check_room(self, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant's files and uploads are longer than `tenant_bytes`, Overloaded where
        those of all tenants are longer than `max_bytes`."""
        if self._held[tenant] > self._settings.tenant_bytes:
            limit = self._settings.tenant_bytes
            raise QuotaExceeded(f"file: the tenant's files have more than {limit} bytes", field="file", limit=limit)
        if self._held.total() > self._settings.max_bytes:
            limit = self._settings.max_bytes
            raise Overloaded(f"file: all files have more than {limit} bytes", field="file", limit=limit)

    async def write(self, tenant: str, pieces: AsyncIterator[bytes]) -> tuple[Path, int]:
        """Writes an upload; the path of its data, for `keep` or `drop`, and their length in bytes. Raises what
        `check_room` raises, and BodyTooLargeError."""
        await self.sweep()
        path = self._data / f"{uuid.uuid4().hex}.part"
        num_bytes = 0
        try:
            with await asyncio.to_thread(path.open, "wb") as out:
                waiting = bytearray()
                async for piece in pieces:
                    num_bytes += len(piece)
                    if num_bytes > self._settings.max_file_bytes:
                        raise BodyTooLargeError(self._settings.max_file_bytes)
                    waiting += piece
                    if len(waiting) >= WRITE_BYTES:
                        self._arrives(path, tenant, num_bytes)
                        await asyncio.to_thread(out.write, bytes(waiting))
                        waiting.clear()
                self._arrives(path, tenant, num_bytes)
                await asyncio.to_thread(out.write, bytes(waiting))
        except BaseException:
            await self.drop(path)
            raise
        return path, num_bytes

    def _arrives(self, path: Path, tenant: str, num_bytes: int) -> None:
        self._arrived(path)
        counted = max(LEAST_BYTES, num_bytes)
        self._arriving[path] = (tenant, counted)
        self._held[tenant] += counted
        self.check_room(tenant)

    def _arrived(self, path: Path) -> None:
        """The upload is not counted any more."""
        if (counted := self._arriving.pop(path, None)) is not None:
            tenant, num_bytes = counted
            self._held[tenant] -= num_bytes

    def _add(self, stored: StoredFile) -> None:
        self._forget(stored.id)
        self._files[stored.id] = stored
        self._held[stored.tenant] += stored.counted_bytes

    def _forget(self, file_id: str) -> StoredFile | None:
        found = self._files.pop(file_id, None)
        if found is not None:
            self._held[found.tenant] -= found.counted_bytes
        return found

    async def drop(self, data: Path) -> None:
        """Removes an upload that `keep` has not made a file."""
        await unbroken(asyncio.to_thread(data.unlink, missing_ok=True))
        self._arrived(data)

    async def keep(
        self, tenant: str, data: Path, filename: str, purpose: str, ttl_s: float | None = None, file_id: str = ""
    ) -> StoredFile:
        """Makes `data`, a path in the folder, a file that expires after `ttl_s` seconds, by default the settings'. It
        replaces a file of the same id. A cancelled call keeps the file all the same, or raises before it begins to."""
        now = int(self._clock())
        stored = StoredFile(
            file_id or new_file_id(),
            tenant,
            filename,
            purpose,
            (await asyncio.to_thread(data.stat)).st_size,
            now,
            now + int(self._settings.ttl_s if ttl_s is None else ttl_s),
        )

        async def note() -> None:
            await asyncio.to_thread(self._keep, stored, data)
            self._add(stored)
            self._arrived(data)

        await unbroken(note())
        return stored

    def _keep(self, stored: StoredFile, data: Path) -> None:
        with data.open("rb") as written:
            os.fsync(written.fileno())
        data.replace(self.path(stored.id))
        write_whole(self._data / f"{stored.id}.json", asdict(stored))

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NotFound, and InvalidRequest for the input of a batch that has not ended."""
        self.get(tenant, file_id)
        if self.in_use(file_id):
            raise InvalidRequest("file_id: a batch that has not ended reads this file", field="file_id")
        await self._remove(file_id)

    async def sweep(self) -> None:
        """Removes expired files that are not in use."""
        now = self._clock()
        for file_id in [file.id for file in self._files.values() if file.expires_at <= now]:
            if not self.in_use(file_id):
                await self._remove(file_id)

    async def _remove(self, file_id: str) -> None:
        if self._forget(file_id) is None:
            return  # another call is removing it

        def remove() -> None:
            (self._data / f"{file_id}.json").unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)

        await asyncio.to_thread(remove)


def new_file_id() -> str:
    """A new id, which no file has."""
    return f"file-{uuid.uuid4().hex}"


def write_whole(path: Path, content: object) -> None:
    """Writes `content` as JSON: after a crash or a loss of power the file has all of it, or what it had before."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as out:
        out.write(json.dumps(content).encode())
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
    sync_folder(path.parent)
