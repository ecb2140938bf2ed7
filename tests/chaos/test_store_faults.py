"""Store, workers, disk and Redis fail under load: every request gets the tokens that it gets without the fault, health
names what is degraded, and afterwards everything works as before."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from pathlib import Path

import pytest

from services.kvstore.embedded import EmbeddedValkey
from shared.block_service.store_nodes import RETRY_S
from shared.identity import WorkerRole
from shared.kv_index.holders import Tier
from tests.chaos.faults import PROMPT_LEN, Load, blocks_by_holder, watched
from tests.e2e.running import BLOCK_SIZE, PatientCommands
from tests.e2e.stage import HOST_BYTES, Stage, prompt, staged
from tests.waiting import DEADLINE_S, until

NUM_BLOCKS = PROMPT_LEN // BLOCK_SIZE


def send(stage: Stage, name: str, number: signal.Signals) -> None:
    os.kill(stage.cluster.children[name].pid, number)


async def still_works(stage: Stage, seed: int = 501) -> None:
    """Prompts that nobody has sent yet are served, before long their blocks are stored, and nothing leaks.

    Not the first prompt's for certain: each worker finds out by a probe of its own that the store answers again, and
    what it computes before is not offered.
    """
    async with asyncio.timeout(DEADLINE_S):
        for number in itertools.count(seed, step=2):
            tokens = prompt(PROMPT_LEN, seed=number)
            await stage.ask(tokens)
            with contextlib.suppress(TimeoutError):
                await stage.stored(tokens, NUM_BLOCKS, deadline_s=2 * RETRY_S)
                break
    await stage.idle()


@pytest.mark.slow
async def test_a_store_that_stalls_under_load_is_named_and_taken_back(tmp_path):
    async with staged(tmp_path, num_prefill=2, store_host_bytes=HOST_BYTES, prefix_fetch="auto") as stage:
        load = Load(stage)

        async def stall() -> None:
            send(stage, "kvstore", signal.SIGSTOP)
            try:
                async with watched(stage) as seen:
                    await seen(lambda failures: any("store-0 does not answer" in failure for failure in failures))
            finally:
                send(stage, "kvstore", signal.SIGCONT)

        await load.run(stall)
        async with watched(stage) as seen:
            await seen(lambda failures: not failures)
        await still_works(stage)


class LittleStaging(PatientCommands):
    """A store node in which one lost transfer would be missed at once."""

    def kvstore(self, bind, redis_url):
        return [*super().kvstore(bind, redis_url), "--staging-bytes", "2000000"]


@pytest.mark.slow
async def test_a_worker_killed_while_it_fills_and_fetches_costs_nothing_but_itself(tmp_path):
    spec = {"num_prefill": 2, "store_host_bytes": HOST_BYTES, "prefix_fetch": "auto"}
    async with staged(tmp_path, LittleStaging, **spec) as stage:

        async def kill() -> None:
            stage.kill("prefill-1")

        await Load(stage).run(kill)
        await stage.until(lambda: sum(link.connected for link in stage.fleet.links) == 2)
        await still_works(stage)
        expected, _ = await stage.ask(prompt(PROMPT_LEN, seed=503), tenant="calm")
        assert (await stage.ask(prompt(PROMPT_LEN, seed=503)))[0] == expected


async def test_the_index_is_exact_again_after_redis_was_killed_under_load(tmp_path):
    """Compared with what pools, memory and disk really hold."""
    disk = tmp_path / "blocks"
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        valkey = EmbeddedValkey(Path(folder))
        await valkey.start()

        class OwnRedis(PatientCommands):
            """With an index that the test can kill and start."""

            def kvstore(self, bind, redis_url):
                return super().kvstore(bind, valkey.url)

        spec = {"store_host_bytes": HOST_BYTES, "store_disk_folder": disk, "store_disk_bytes": HOST_BYTES}
        try:
            async with staged(tmp_path, OwnRedis, num_prefill=2, prefix_fetch="auto", **spec) as stage:

                async def kill_and_start() -> None:
                    assert valkey.pid is not None
                    os.kill(valkey.pid, signal.SIGKILL)
                    async with watched(stage) as seen:
                        await seen(lambda failures: any("index does not answer" in failure for failure in failures))
                        await valkey.stop()
                        await valkey.start()
                        await seen(lambda failures: not failures)

                await Load(stage).run(kill_and_start)
                await still_works(stage)
                await exact(stage, valkey.url, disk)
        finally:
            await valkey.stop()


def stored_in(disk: Path) -> set[bytes]:
    return {bytes.fromhex(path.stem) for path in disk.glob("??/*.kv")}


async def exact(stage: Stage, redis_url: str, disk: Path) -> None:
    """Waits until the index says of every pool and tier what it holds."""

    async def differences() -> list[str]:
        claims = await blocks_by_holder(redis_url)
        by_name = {(holder.worker_name, holder.tier): blocks for holder, blocks in claims.items()}
        held = {(link.name, Tier.DEVICE): link.load.num_cached_blocks for link in stage.fleet.links}
        held |= {("store-0", Tier(tier.tier)): tier.num_blocks for tier in (await stage.store.stats()).tiers}
        files = stored_in(disk)
        found = [
            f"{key}: {len(by_name.get(key, ()))} in the index, {count} held"
            for key, count in held.items()
            if len(by_name.get(key, ())) != count
        ]
        found += [f"{key}: nobody of that name" for key in by_name.keys() - held.keys()]
        if by_name.get(("store-0", Tier.DISK), set()) != files:
            found.append("other blocks on disk than the index says")
        assert {holder.role for holder in claims} <= {WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.STORE}
        return found

    last: list[str] = []

    async def is_exact() -> bool:
        nonlocal last
        last = await differences()
        return not last

    with contextlib.suppress(TimeoutError):
        await until(is_exact)
    assert not last
