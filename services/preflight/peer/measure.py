"""The side that connects: bandwidth both ways, and the clocks' difference."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from services.preflight.clock import check_skew
from services.preflight.finding import Finding, fail, ok, warn
from services.preflight.machine import Machine
from services.preflight.peer.block_transfer import BlockBatch
from services.preflight.peer.wire import BLOCK_BYTES, MAX_COUNT, MAX_LINE_BYTES, Line, address_in
from services.preflight.rdma import rdma_ports
from shared.address import Address
from shared.errors import ConfigError, TransferFailed
from shared.kv.fleet_key import FleetKey
from shared.kv.transfer import new_ticket
from shared.kv.ucx import UcxTransfer
from shared.kv.ucx.peer_address import PeerAddress

CHECK = "bandwidth"
RETRY_S = 0.5
ROUNDS = 4
"""MAX_COUNT blocks each way, this often; and once before, since memory that is touched first is slow."""
RDMA_SHARE = 0.5
"""Least share of the RDMA link's rate; below it something is wrong."""
TCP_LEAST = 1e9
"""Bytes a second: a 10 Gb/s network, nearly full."""
PROMPT_LEN = 8192
_REACH = (
    "start the other side, in the other Pod: tandem preflight --serve 0.0.0.0:7999; and let no NetworkPolicy stand "
    "between the two Pods on that port and on UCX's (UCX_TCP_PORT_RANGE)"
)
_FASTER = (
    "see that both sides list the same RDMA transports, that UCX_NET_DEVICES names the card beside the GPU, and the "
    "network's MTU; without RDMA a faster network, or pools in one zone"
)


async def check_peer(
    peer: str, fleet_key: str, wait_s: float, machine: Machine, token_bytes: float | None
) -> list[Finding]:
    """Measures against a preflight that serves at `peer`, host:port; `token_bytes`: KV of a token, None = unknown.

    Tries for `wait_s` seconds while nothing listens there.
    """
    try:
        line = await _connect(Address.parse(peer, "peer", min_port=1), wait_s)
    except (ConfigError, TransferFailed) as error:
        return [fail(CHECK, error.message, _REACH)]
    transfer = UcxTransfer(fleet_key=FleetKey.of(fleet_key))
    try:
        await transfer.start()
        hello = await line.ask(op="hello", address=transfer.address.hex())
        address = address_in(hello)
        same_host = _host(address) == _host(transfer.address)
        skew = await _skew(peer, line)
        there, back = await _measure(line, transfer, address)
        await line.send(op="bye")
    except TransferFailed as error:
        return [fail(CHECK, f"{peer}: {error.message}", _REACH)]
    finally:
        line.close()
        await transfer.close()
    where = "on this host" if same_host else "over the network"
    text = f"{peer} (UCX {hello.get('version', '?')}, {where}): {there / 1e9:.2f} GB/s there, {back / 1e9:.2f} back"
    if token_bytes is not None:
        seconds = PROMPT_LEN * token_bytes / min(there, back)
        text += f"; the KV of {PROMPT_LEN} tokens takes {_duration(seconds)}"
    rate = 0.0 if same_host else max((port.gigabits for port in rdma_ports(machine) if port.usable), default=0.0)
    return [judge(text, min(there, back), rate * 1e9 / 8), skew]


def judge(text: str, bytes_per_s: float, rdma_bytes_per_s: float) -> Finding:
    """Against the RDMA link's rate, 0 = none, else against what a network in a data centre gives."""
    if bytes_per_s < RDMA_SHARE * rdma_bytes_per_s:
        return warn(CHECK, f"{text}; the RDMA link gives {rdma_bytes_per_s / 1e9:.1f}", _FASTER)
    if bytes_per_s < TCP_LEAST:
        return warn(CHECK, f"{text}; hand-offs of long prompts will wait for it", _FASTER)
    return ok(CHECK, text)


async def _connect(address: Address, wait_s: float) -> Line:
    """Raises TransferFailed."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=MAX_LINE_BYTES)
            return Line(reader, writer)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TransferFailed(f"no preflight answers at {address}: {error}") from error
        await asyncio.sleep(RETRY_S)


async def _skew(peer: str, line: Line) -> Finding:
    """Compares the clocks by the quickest of a few questions."""
    best: tuple[float, float] | None = None
    for _ in range(5):
        before = time.time()
        there = (await line.ask(op="time")).get("time")
        after = time.time()
        if not isinstance(there, int | float):
            raise TransferFailed("the other side sent no time")
        error_s = (after - before) / 2
        if best is None or error_s < best[1]:
            best = there - (before + after) / 2, error_s
    assert best is not None
    return check_skew(peer, *best)


async def _measure(line: Line, transfer: UcxTransfer, address: bytes) -> tuple[float, float]:
    """Bytes a second there and back: the median round of each."""
    batch = BlockBatch(transfer)

    async def there(count: int) -> float:
        ticket = new_ticket()
        await line.ask(op="receive", ticket=ticket, count=count)
        begin = time.perf_counter()
        await batch.send(address, ticket, count)
        await line.read()
        return count * BLOCK_BYTES / (time.perf_counter() - begin)

    async def back(count: int) -> float:
        ticket = new_ticket()
        incoming = batch.expect(ticket, count)
        begin = time.perf_counter()
        try:
            await line.send(op="send", ticket=ticket, count=count)
        finally:
            await batch.finish(incoming, ticket, count)
        took_s = time.perf_counter() - begin
        await line.read()
        return count * BLOCK_BYTES / took_s

    for move in (there, back):
        await move(MAX_COUNT)
    return median([await there(MAX_COUNT) for _ in range(ROUNDS)]), median(
        [await back(MAX_COUNT) for _ in range(ROUNDS)]
    )


def _host(address: bytes) -> bytes:
    """Which host and namespaces an address is of; its signature, where it has one, is for the transfer to check."""
    return PeerAddress.host_in(address)


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
