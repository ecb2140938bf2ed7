"""A prefill worker is lost in the middle of a hand-off: another one sends what is missing, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from services.router.dispatch.record import RequestState
from services.router.workers.liveness import LivenessLimits
from tests.e2e.running import BLOCK_SIZE, DEMO, PatientCommands, block_bytes
from tests.e2e.stage import Stage, prompt, staged
from tests.waiting import until

BLOCK_BYTES = block_bytes(DEMO)
PROMPT = prompt(40 * BLOCK_SIZE)
CHUNK = 4
"""Blocks of one engine step, and so between two notes."""
NUM_ARRIVED = 2 * CHUNK


class Holding(PatientCommands):
    """prefill-0 can be told to send two chunks of the next hand-off, and then to stand still."""

    hang = "hang"

    def worker(self, plan, kvstore):
        command = [*super().worker(plan, kvstore), "--max-num-batched-tokens", str(CHUNK * BLOCK_SIZE)]
        if plan.name == "prefill-0":
            command += ["--failpoints", f"ucx.send={self.hang}@{NUM_ARRIVED + 2}"]
        return command


class HoldingForAWhile(Holding):
    """For four seconds."""

    hang = "hang:4"


async def held_back(stage: Stage, tenant: str, **sampling) -> asyncio.Task:
    """A request whose first two chunks are at the decode worker, and the others still at prefill-0."""
    child = stage.cluster.children["prefill-0"]
    os.kill(child.pid, signal.SIGUSR1)
    await stage.until(lambda: "armed" in child.log_path.read_text())
    before = await received(stage)
    asking = asyncio.create_task(stage.ask(PROMPT, "prefill-0", tenant, **sampling))

    async def arrived() -> bool:
        return await received(stage) >= before + NUM_ARRIVED * BLOCK_BYTES

    await until(arrived)
    return asking


async def received(stage: Stage) -> float:
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"http://{stage.cluster.metrics['decode-0']}/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith("tandem_transfer_received_bytes_total")]
    return float(line.split()[-1])


async def first_token(stage: Stage) -> None:
    """Waits until the client has the first token, which does not wait for the blocks."""
    await stage.until(lambda: any(item.state is RequestState.SHIPPING for item in stage.dispatcher._active.values()))


def sent(stage: Stage, name: str) -> float:
    return stage.load(name).kv_bytes_sent / BLOCK_BYTES


async def finished(stage: Stage, asking: asyncio.Task, expected: list[int], before: float) -> None:
    """The answer is right, prefill-1 sent the missing blocks alone, and nothing is left behind.

    The note of the second chunk may be held back behind the third chunk's first block: then its blocks are missing too.
    """
    answer, summary = await asking
    assert answer == expected
    assert (summary.prefill_worker, summary.decode_worker) == ("prefill-1", "decode-0")
    await stage.idle()
    kept = len(PROMPT) / BLOCK_SIZE - (sent(stage, "prefill-1") - before)
    assert kept in (CHUNK, NUM_ARRIVED)


@pytest.mark.parametrize("sampling", [{}, pytest.param({"temperature": 0.9, "seed": 3}, marks=pytest.mark.slow)])
async def test_a_killed_senders_blocks_are_kept_and_the_next_one_sends_the_others(tmp_path, sampling):
    async with staged(tmp_path, Holding, num_prefill=2, prefix_fetch="never") as stage:
        expected, _ = await stage.ask(PROMPT, "prefill-1", "undisturbed", **sampling)
        await stage.idle()
        before = sent(stage, "prefill-1")
        asking = await held_back(stage, "disturbed", **sampling)
        await first_token(stage)
        stage.kill("prefill-0")
        await finished(stage, asking, expected, before)


@pytest.mark.slow
async def test_a_stopped_sender_that_comes_back_costs_nothing(tmp_path):
    """Its blocks are for a ticket that is void by then."""
    async with staged(tmp_path, HoldingForAWhile, num_prefill=2, prefix_fetch="never") as stage:
        (stopped,) = [link for link in stage.fleet.links if link.name == "prefill-0"]  # the others may be slow
        stopped._limits = stopped._stream._liveness._limits = LivenessLimits(give_up_after_s=2.0)
        expected, _ = await stage.ask(PROMPT, "prefill-1", "undisturbed")
        await stage.idle()
        before = sent(stage, "prefill-1")
        asking = await held_back(stage, "disturbed")
        child = stage.cluster.children["prefill-0"]
        os.kill(child.pid, signal.SIGSTOP)
        try:
            await finished(stage, asking, expected, before)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        await stage.until(lambda: all(link.connected for link in stage.fleet.links))
        await stage.idle()
        answer, summary = await stage.ask(PROMPT, "prefill-1", "disturbed")  # from what the decode worker kept
        assert (answer, summary.decode_worker) == (expected, "decode-0")
        await stage.idle()
