"""Workers named in a YAML file that is watched for changes.

    workers:
      - {name: prefill-0, role: prefill, address: "10.0.0.1:50061", label: zone-a/rack-3}
      - {name: decode-0, role: decode, address: "10.0.0.2:50061"}
      - {name: worker-0, role: "prefill,decode", address: "10.0.0.3:50061"}

Write the new file beside the old one and rename it over it (a Kubernetes ConfigMap does so): then half a file is never
read. It is read every second and parsed where its bytes have changed. A file of this size costs little to read, and no
file system's rules for modification times, inodes and links matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.workers.discovery import DiscoveredWorker, check_names
from shared.address import Address
from shared.errors import ConfigError
from shared.identity import PREFILL, WorkerRole
from shared.tasks import end_task

INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class FileDiscovery:
    """Implements `Discovery`. A file that is missing or wrong changes nothing, is logged once for each reason, and is
    looked at again every `interval_s` seconds."""

    def __init__(self, path: Path, *, collocated: bool = False, interval_s: float = INTERVAL_S) -> None:
        """`collocated`: a file with prefill workers is wrong. Reads nothing yet."""
        self._path = path
        self._collocated = collocated
        self._interval_s = interval_s
        self._content: bytes | None = None  # what `_workers` were parsed from
        self._workers: tuple[DiscoveredWorker, ...] = ()
        self._failure = "has not been read yet"
        self._task: asyncio.Task[None] | None = None

    @property
    def workers(self) -> tuple[DiscoveredWorker, ...]:
        """The workers of the last content that was right."""
        return self._workers

    @property
    def failure(self) -> str:
        """The fault of the file; empty = none."""
        return f"workers file {self._path}: {self._failure}" if self._failure else ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begins to read the file."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(on_change), name="workers file")

    async def close(self) -> None:
        """Ends the watch."""
        task, self._task = self._task, None
        await end_task(task)

    async def _watch(self, on_change: Callable[[], None]) -> None:
        while True:
            before = self._workers
            await self._read()
            if self._workers != before:
                on_change()
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> None:
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            if content != self._content:
                self._workers = await asyncio.to_thread(parse_workers, content, collocated=self._collocated)
                self._content = content
            failure = ""
        except OSError as error:
            failure = f"cannot be read: {error.strerror or error}"
        except ConfigError as error:
            failure = error.message
        if failure and failure != self._failure:
            logger.error("workers file %s: %s; the %d workers of before stay", self._path, failure, len(self._workers))
        elif self._failure and not failure:
            logger.info("workers file %s names %d workers", self._path, len(self._workers))
        self._failure = failure


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    role: Literal["prefill", "decode", "prefill,decode"]
    address: str
    label: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    workers: list[_Entry]


def parse_workers(content: bytes, *, collocated: bool = False) -> tuple[DiscoveredWorker, ...]:
    """The workers that a file's content names, in its order; none are fine.

    Raises ConfigError that says which entry is wrong. An empty file is wrong: it may be one that is
    just being written.
    """
    # BaseLoader reads all scalars as text, so a worker may be called 1 or no. The faster C loader crashes the process
    # where brackets nest very deep.
    try:
        entries = _File.model_validate(yaml.load(content, Loader=yaml.BaseLoader)).workers
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())  # of several lines
        raise ConfigError(f"is not valid YAML: {reason}", field="workers_file") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where or 'content'}: {first['msg']}", field="workers_file") from error
    workers = tuple(_worker(entry, f"workers.{number}") for number, entry in enumerate(entries))
    check_names(workers)
    if collocated and (prefills := [worker.name for worker in workers if worker.roles == PREFILL]):
        raise ConfigError(
            f"names the prefill worker {prefills[0]!r}: in collocated mode the decode workers prefill",
            field="workers_file",
        )
    return workers


def _worker(entry: _Entry, where: str) -> DiscoveredWorker:
    label = tuple(entry.label.split("/")) if entry.label else ()
    if not all(label):
        raise ConfigError(f"{where}.label: {entry.label!r} is not part/part", field="workers_file")
    address = str(Address.parse(entry.address, f"{where}.address", min_port=1))
    return DiscoveredWorker(entry.name, frozenset(map(WorkerRole, entry.role.split(","))), address, label)
