"""One growing block index behind a KV store process: what is timed on it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from redis.asyncio import Redis

from shared.child_process import ChildProcess
from shared.identity import WorkerIdentity, WorkerRole
from shared.kv.hashing import HASH_BYTES
from shared.kv_index.client import KVStoreClient

PROMPT_BLOCKS = 512
BATCH_BLOCKS = 4096
"""Most blocks in one call of a worker's publisher."""
NUM_PUBLISHERS = 4
MAX_PROMPTS = 256


class IndexBench:
    """One index that grows; the caller decides when to measure."""

    def __init__(self, store: KVStoreClient, redis: Redis, store_pid: int) -> None:
        """Does not close its arguments."""
        self._store = store
        self._redis = redis
        self._store_process = psutil.Process(store_pid)
        self._workers = [
            WorkerIdentity(f"worker-{i}", secrets.randbits(63) + 1, WorkerRole.PREFILL) for i in range(NUM_PUBLISHERS)
        ]
        self._prompts: list[list[bytes]] = []
        self._num_blocks = 0
        self._empty_bytes = 0

    async def start(self) -> None:
        """Registers the workers; the index's memory grows only by blocks after this."""
        for worker in self._workers:
            await self._store.publish(worker, [])
        self._empty_bytes = (await self._store.stats()).index_bytes

    async def grow(self, num_blocks: int) -> float:
        """Publishes until the index has `num_blocks`, as several concurrent workers; returns blocks a second."""
        batches = [BATCH_BLOCKS] * ((num_blocks - self._num_blocks) // BATCH_BLOCKS)
        rest = num_blocks - self._num_blocks - sum(batches)
        batches += [rest] if rest else []
        every = max(1, len(batches) * BATCH_BLOCKS // PROMPT_BLOCKS // MAX_PROMPTS)
        self._prompts = []

        async def publish(worker: WorkerIdentity) -> None:
            while batches:
                blob = os.urandom(batches.pop() * HASH_BYTES)
                hashes = [blob[i : i + HASH_BYTES] for i in range(0, len(blob), HASH_BYTES)]
                if len(self._prompts) < MAX_PROMPTS and len(batches) % every == 0:
                    self._prompts.append(hashes[-PROMPT_BLOCKS:])
                await self._store.publish(worker, hashes)

        started = time.perf_counter()
        await asyncio.gather(*(publish(worker) for worker in self._workers))
        seconds = time.perf_counter() - started
        grown, self._num_blocks = num_blocks - self._num_blocks, num_blocks
        return grown / seconds

    async def match_and_mget(self, pairs: int) -> tuple[list[float], list[float]]:
        """Milliseconds of each match and of its MGET; one call at a time, so that none waits for another."""

        async def match(prompt: list[bytes]) -> None:
            found = await self._store.match(prompt)
            assert found.num_blocks == len(prompt)

        async def mget(prompt: list[bytes]) -> None:
            values = await self._redis.mget([b"b:" + block_hash for block_hash in prompt])
            assert None not in values

        ours, bare = [], []
        for number in range(-20, pairs):
            prompt = self._prompts[number % len(self._prompts)]
            times = [await _timed_ms(match, prompt), await _timed_ms(mget, prompt)]
            if number >= 0:
                ours.append(times[0])
                bare.append(times[1])
        return ours, bare

    async def store_cpu_ms(self, matches: int) -> float:
        """Processor time of the store's process in one match, milliseconds."""
        before = self._store_process.cpu_times()
        for number in range(matches):
            await self._store.match(self._prompts[number % len(self._prompts)])
        after = self._store_process.cpu_times()
        return (after.user + after.system - before.user - before.system) * 1000 / matches

    async def bytes_per_block(self) -> float:
        """Memory of the Redis server for each indexed block."""
        stats = await self._store.stats()
        assert stats.num_blocks == self._num_blocks
        return (stats.index_bytes - self._empty_bytes) / self._num_blocks


@asynccontextmanager
async def running_index() -> AsyncIterator[IndexBench]:
    """An empty index behind a KV store process, both started as a deployment starts them. Raises their errors."""
    python = (sys.executable, "-m")
    with tempfile.TemporaryDirectory() as logs:
        valkey = ChildProcess("valkey", (*python, "services.kvstore.valkey"), Path(logs, "valkey.log"))
        async with valkey.serving() as index:
            environment = {"TANDEM_KVSTORE_REDIS_URL": index.address, "TANDEM_KVSTORE_REDIS_TIMEOUT_S": "10"}
            command = (*python, "services.kvstore", "--bind", "127.0.0.1:0")
            process = ChildProcess("kvstore", command, Path(logs, "kvstore.log"), environment=environment)
            async with process.serving() as kvstore, Redis.from_url(index.address, protocol=2) as redis:
                store = KVStoreClient(kvstore.address, match_timeout_s=30, write_timeout_s=60)
                bench = IndexBench(store, redis, process.pid)
                await bench.start()
                yield bench
                await store.close()


async def _timed_ms(call: Callable[[list[bytes]], Awaitable[None]], prompt: list[bytes]) -> float:
    started = time.perf_counter()
    await call(prompt)
    return (time.perf_counter() - started) * 1000
