"""A process lives and has its memory back, whenever another one with which it exchanges blocks is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from shared.errors import TransferFailed
from shared.kv.transfer import new_ticket
from tests.integration.kv.conftest import Call, FarProcess

SIZES = [(index, (300_000, 40_000, 5_000)[index % 3]) for index in range(48)]
NUM_ARRIVED = (0, 1, 2, 3, 5, 8, 13, 21, 30, 40)
"""How many blocks of a peer have arrived when it is killed, by round."""
NUM_ROUNDS = 20


async def _peer(peers: asyncio.subprocess.Process, **command: object) -> tuple[int, str]:
    """A new one: its pid and address."""
    assert peers.stdin is not None
    assert peers.stdout is not None
    peers.stdin.write(json.dumps(command).encode() + b"\n")
    made = json.loads(await peers.stdout.readline())
    return made["pid"], made["address"]


async def _round(survivor: Call, peers: asyncio.subprocess.Process, num_arrived: int) -> None:
    """Blocks go both ways. Those of one ticket are expected; those of another wait to be taken when their sender
    dies."""
    taken, waiting, sent = new_ticket(), new_ticket(), new_ticket()
    await survivor("expect", ticket=taken, sizes=SIZES)
    pid, address = await _peer(
        peers, address=await survivor("address"), outward=[taken, waiting], inward=sent, sizes=SIZES
    )
    sending = asyncio.create_task(survivor("send", address=address, ticket=sent, sizes=SIZES))
    await survivor("blocks", ticket=taken, indexes=[index for index, _ in SIZES[:num_arrived]])
    os.kill(pid, signal.SIGKILL)
    await survivor("expect", ticket=waiting, sizes=SIZES)
    for ticket in (taken, waiting):
        await survivor("cancel", ticket=ticket)  # raises where memory is lost
        assert await survivor("damaged", ticket=ticket) == []
    with contextlib.suppress(TransferFailed):  # all may have been taken
        await sending


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_process_survives_peers_that_are_killed_at_any_moment() -> None:
    process = FarProcess(None)
    peers = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.kv.doomed_peers",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
        start_new_session=True, env={**os.environ, "UCX_LOG_FILE": "stderr", "UCX_WARN_UNUSED_ENV_VARS": "n"},
    )  # fmt: skip
    try:
        async with process.connected() as survivor:
            for number in range(NUM_ROUNDS):
                await _round(survivor, peers, NUM_ARRIVED[number % len(NUM_ARRIVED)])
    finally:
        os.killpg(peers.pid, signal.SIGKILL)
        await peers.wait()
        process.end(killed=False, quiet=False)  # UCX may say that peers are gone
