"""Two preflights measure each other over real UCX, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.preflight.finding import Level
from services.preflight.machine import Machine
from services.preflight.peer.measure import check_peer, judge
from services.preflight.peer.serve import PreflightServer
from services.preflight.peer.wire import MAX_LINE_BYTES, STEP_TIMEOUT_S, Line
from shared.errors import TransferFailed
from tests.waiting import DEADLINE_S

KEY = "the fleet's secret, long enough"


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """`tandem preflight --serve` as a process; its address. Ends with status 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli.main", "preflight", "--serve", "127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            line = (await process.stdout.readline()).decode()
        yield line.split()[2].rstrip(";")
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
    assert process.returncode == 0


@pytest.mark.slow
async def test_bandwidth_both_ways_and_the_clocks_are_measured() -> None:
    async with serving() as address:
        bandwidth, clock = await check_peer(address, "", 0.0, Machine(), token_bytes=128 << 10)
    assert bandwidth.check == "bandwidth"
    assert "on this host" in bandwidth.text
    assert "the KV of 8192 tokens takes" in bandwidth.text
    assert clock.level is Level.OK


async def test_nobody_there_is_a_failure_with_what_to_start() -> None:
    [finding] = await check_peer("127.0.0.1:1", "", 0.0, Machine(), None)
    assert finding.level is Level.FAIL
    assert "--serve" in finding.fix


@pytest.mark.slow
async def test_a_fleet_with_a_key_is_measured_by_its_own_alone() -> None:
    server = PreflightServer("127.0.0.1:0", KEY, lambda line: None)
    await server.start()
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S / 2):  # the server does not wait for what the stranger never sends
            [stranger] = await check_peer(server.address, "", 0.0, Machine(), None)
            assert stranger.level is Level.FAIL
        bandwidth, _ = await check_peer(server.address, KEY, 0.0, Machine(), None)
        assert "GB/s" in bandwidth.text
    finally:
        await server.close()


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n",
        b"[1]\n",
        b'{"op": "nothing"}\n',
        b'{"op": "receive", "ticket": 1, "count": 65}\n',
        b'{"op": "receive", "ticket": "1", "count": 1}\n',
        b'{"op": "hello", "address": "zz"}\n',
        b'{"op": "send", "ticket": 1, "count": 1}\n',  # before hello
        b"x" * (2 * MAX_LINE_BYTES),
    ],
)
async def test_what_is_not_the_protocol_gets_an_error_and_the_next_is_served(text: bytes) -> None:
    server = PreflightServer("127.0.0.1:0", "", lambda line: None)
    await server.start()
    host, _, port = server.address.rpartition(":")
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(text)
            with pytest.raises(TransferFailed, match=r"the other side:|closed the connection|gone"):
                await Line(reader, writer).read()
            writer.close()
            reader, writer = await asyncio.open_connection(host, int(port))
            line = Line(reader, writer)
            assert "time" in await line.ask(op="time")
            await line.send(op="bye")
            line.close()
    finally:
        await server.close()


def test_bandwidth_is_judged_by_the_link() -> None:
    assert judge("x", 40e9, 50e9).level is Level.OK
    slow = judge("x", 2e9, 50e9)
    assert slow.level is Level.WARN
    assert "the RDMA link gives 50.0" in slow.text
    assert judge("x", 2e9, 0.0).level is Level.OK
    assert judge("x", 0.1e9, 0.0).level is Level.WARN


@pytest.mark.slow
async def test_the_command_as_an_init_container_would_run_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("pod") / "termination-log"
    log.touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli.main", "preflight", "--component", "worker", "--json"),
        *("--termination-log", str(log), "--", "--model", "models/demo", "--device", "cuda"),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await process.communicate()
    told = json.loads(out)
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    assert process.returncode == 1
    assert levels["gpu"] == "fail"  # where there is a GPU, this torch has no CUDA
    assert levels["model"] == levels["ucx"] == levels["ports"] == "ok"
    assert log.read_text().startswith("gpu: device is cuda, but no GPU is in this container. Fix: ")
