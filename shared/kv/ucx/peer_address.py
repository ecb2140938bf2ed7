"""What a peer needs to send to a worker: host, process, UCX worker address.

UCX ends the process on an address that is not one. So an address is checked before UCX sees it: against damage, and in
a fleet with a key against forgery.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import TransferFailed
from shared.kv.encryption_modes import Encryption
from shared.kv.fleet_key import FleetKey
from shared.kv.seal import MAC_BYTES

HOST_ID_BYTES = 16
_PLAIN = 1
_SIGNED: Mapping[Encryption, int] = {"none": 2, "aes-gcm": 3, "chacha20-poly1305": 4}
"""Versions: they say how the owner of the address encrypts blocks."""
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

    def encode(self, key: FleetKey | None = None) -> bytes:
        """The opaque bytes of `KVTransfer.address`, signed where there is a key."""
        version = _version(key)
        header = _HEADER.pack(version, b"", self.host, self.pid, self.started)
        checksum = _checksum(header + self.worker)
        address = _HEADER.pack(version, checksum, self.host, self.pid, self.started) + self.worker
        return address if key is None else address + key.sign_address(address)

    @staticmethod
    def decode(data: bytes, key: FleetKey | None = None) -> PeerAddress:
        """Inverse of `encode`. Raises TransferFailed for damaged data, and with a key for what it has not signed and
        for an owner that encrypts blocks in another way."""
        version = _version(key)
        if key is not None:
            data = _without_signature(data, key)
            _check_encryption(data, key)
        if len(data) <= _HEADER.size or data[0] != version:
            raise TransferFailed("the peer's transfer address is not of this format", field="transfer_address")
        _, checksum, host, pid, started = _HEADER.unpack_from(data)
        worker = data[_HEADER.size :]
        if checksum != _checksum(_HEADER.pack(version, b"", host, pid, started) + worker):
            raise TransferFailed("the peer's transfer address is damaged", field="transfer_address")
        return PeerAddress(host, pid, started, worker)

    @staticmethod
    def host_in(data: bytes) -> bytes:
        """The host of an encoded address, unchecked; for messages to people. b"" where there is none."""
        return data[9 : 9 + HOST_ID_BYTES] if len(data) > _HEADER.size else b""


def this_host() -> bytes:
    """16 bytes, equal for processes that see each other as processes of one host: same boot, same IPC, PID and network
    namespaces. Processes in separate network namespaces are treated as separate hosts."""
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


def _version(key: FleetKey | None) -> int:
    return _PLAIN if key is None else _SIGNED[key.encryption]


def _check_encryption(data: bytes, key: FleetKey) -> None:
    theirs = next((name for name, version in _SIGNED.items() if data[:1] == bytes([version])), None)
    if theirs is not None and theirs != key.encryption:
        raise TransferFailed(
            f"block_encryption is {key.encryption} here and {theirs} at the peer: a fleet has one",
            field="block_encryption",
            ours=key.encryption,
            theirs=theirs,
        )


def _without_signature(data: bytes, key: FleetKey) -> bytes:
    address, signature = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if not hmac.compare_digest(key.sign_address(address), signature):
        raise TransferFailed("the peer's transfer address is not signed by this fleet", field="transfer_address")
    return address


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
