"""What a peer needs to send to a worker: host, process, UCX worker address."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from shared.errors import TransferFailed

HOST_ID_BYTES = 16
_VERSION = 1
_HEADER = struct.Struct(f"<B8s{HOST_ID_BYTES}sIQ")  # version, checksum of the rest, host id, pid, started


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A worker's address; `pid` and `started` are meaningful on its own host only."""

    host: bytes
    pid: int
    started: int
    """Start time in clock ticks since boot: with the pid it identifies a process uniquely."""
    worker: bytes
    """UCX's worker address."""

    def encode(self) -> bytes:
        """The opaque bytes of `KVTransfer.address`."""
        header = _HEADER.pack(_VERSION, b"", self.host, self.pid, self.started)
        checksum = _checksum(header + self.worker)
        return _HEADER.pack(_VERSION, checksum, self.host, self.pid, self.started) + self.worker

    @staticmethod
    def decode(data: bytes) -> PeerAddress:
        """Inverse of `encode`. Raises TransferFailed for damaged data, which UCX itself would not notice."""
        if len(data) <= _HEADER.size or data[0] != _VERSION:
            raise TransferFailed("the peer's transfer address is not of this format", field="transfer_address")
        _, checksum, host, pid, started = _HEADER.unpack_from(data)
        worker = data[_HEADER.size :]
        if checksum != _checksum(_HEADER.pack(_VERSION, b"", host, pid, started) + worker):
            raise TransferFailed("the peer's transfer address is damaged", field="transfer_address")
        return PeerAddress(host, pid, started, worker)


def this_host() -> bytes:
    """16 bytes, equal for processes that may share memory: same boot, same IPC, PID and network namespaces.

    Network namespaces do not keep processes from sharing memory. They count because who puts processes into networks of
    their own wants what passes between them to pass through these.
    """
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    parts += [os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid", "net")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=HOST_ID_BYTES).digest()


def process_started(pid: int) -> int:
    """Start time of a process of this host, in clock ticks since boot. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return int(stat.rpartition(")")[2].split()[19])  # proc(5): field 22; the command before it may contain spaces


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
