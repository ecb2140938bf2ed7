"""Brings a prompt's prefix from the store before and while the rest is computed.

Blocks arrive from the back of the known prefix, the dear ones first: computing token n costs attention over all before
it. Where they do not arrive soon, the engine computes from the front meanwhile, until both meet ("Compute or load KV
cache? Why not both?", Jin et al., 2024). So a slow link delays a request by the time for which it is held at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence as Seq

from services.worker.fetch_policy import FetchPolicy
from services.worker.host import EngineHost
from services.worker.store_answers import StoreAnswers
from shared.engine.messages import AdoptBlocks, EndFetch
from shared.engine.sequence import Sequence
from shared.errors import TandemError, TransferFailed
from shared.kv.hashing import extend_chain
from shared.kv.transfer import Incoming, new_ticket
from shared.rpc.block_holders import Tier
from shared.rpc.handoff import trailer_bytes
from shared.rpc.receiving import MemoryLost, end_receives
from shared.rpc.store_client import StoreClient

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""A store that did not answer is left alone for so long."""


class Fetch:
    """One request's fetch."""

    def __init__(self) -> None:
        self.waited_ms = 0.0
        """How long the request was held."""
        self.num_tokens = 0
        """Tokens whose blocks came so far."""
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """What has not come is needed no more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None


class PrefixFetch:
    """All fetches of one worker. Runs on the event loop; the engine takes the blocks in."""

    def __init__(self, host: EngineHost, client: StoreClient, answers: StoreAnswers, policy: FetchPolicy) -> None:
        """Owns none of them."""
        self._host = host
        self._client = client
        self._answers = answers
        self.policy = policy
        self._local: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: list[tuple[int, memoryview]] = []  # somebody may still write there: kept for good
        self._silent_until = 0.0
        self._available = True
        self.num_blocks: Counter[Tier] = Counter()
        """Blocks fetched, by tier."""
        self.num_failed = 0
        """Fetches that ended by an error: what was missing was computed."""

    def on_pool(self, sealed: Seq[bytes], evicted: Seq[bytes]) -> None:
        """What the pool holds has changed."""
        self._local.difference_update(evicted)
        self._local.update(sealed)

    def num_tokens(self, tier: Tier) -> int:
        """Tokens whose blocks came from a tier."""
        return self.num_blocks[tier] * self._host.model.layout.block_size

    async def hold(self, sequence: Sequence, num_stored_blocks: int | None, fetch: Fetch) -> None:
        """Returns when the sequence should start: its prefix is here, or cannot come, or takes too long.

        `num_stored_blocks`: where the store has nothing behind this block of the chain; None = not known.
        """
        began = time.perf_counter()
        block_size = self._host.model.layout.block_size
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, block_size)
        hashes = tuple(sequence.block_hashes[: (sequence.num_tokens - 1) // block_size])
        num_known = await self._num_known(hashes if num_stored_blocks is None else hashes[:num_stored_blocks])
        num_local = self._num_local(hashes)
        if num_known > num_local:
            num_bytes = (num_known - num_local) * self._host.model.layout.block_bytes
            hold_s = self.policy.hold_s(num_bytes, (num_known - num_local) * block_size)
            if hold_s > 0:
                fetch.task = asyncio.create_task(self._bring(hashes[:num_known], fetch))
                self._tasks.add(fetch.task)
                fetch.task.add_done_callback(self._tasks.discard)
                await asyncio.wait({fetch.task}, timeout=hold_s)
        fetch.waited_ms = (time.perf_counter() - began) * 1e3

    async def close(self) -> None:
        """Ends all fetches."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _num_local(self, hashes: Seq[bytes]) -> int:
        return next((index for index, name in enumerate(hashes) if name not in self._local), len(hashes))

    async def _num_known(self, hashes: tuple[bytes, ...]) -> int:
        """Blocks of the chain that are here, or behind those in the store; asks only where that may help."""
        num_local = self._num_local(hashes)
        if num_local == len(hashes) or not self.policy.enabled or time.monotonic() < self._silent_until:
            return num_local
        try:
            num_stored = await self._client.look_up(hashes[num_local:])
        except TandemError as error:
            self._failed(error)
            return num_local
        if not self._available:
            logger.info("the store at %s answers again", self._client.address)
            self._available = True
        return num_local + num_stored

    async def _bring(self, hashes: tuple[bytes, ...], fetch: Fetch) -> None:
        """Never raises but when cancelled, and then too leaves nothing behind."""
        asking = asyncio.create_task(self._answers.prepare(hashes, self.policy.mode == "auto"))
        try:
            prepared = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._host.engine.submit(EndFetch((await asking).key))
            raise
        if not prepared.missing:
            self._host.engine.submit(EndFetch(prepared.key))
            return
        ticket = new_ticket()
        blocks = self._host.engine.blocks
        buffers: list[tuple[int, memoryview]] = []
        lost = False
        try:
            buffers += [(block_id, blocks.incoming(block_id)) for _, block_id in prepared.missing]
            incoming = self._host.transfer.expect(
                ticket,
                [(place, memory) for place, (_, memory) in enumerate(buffers)],
                trailer_bytes(len(buffers)),
            )
            async with asyncio.timeout(self.policy.timeout_s):
                missing = [index for index, _ in prepared.missing]
                await self._receive(prepared.key, hashes, missing, buffers, ticket, incoming, fetch)
        except (TandemError, TimeoutError) as error:
            self._failed(error)
        finally:
            try:
                await end_receives(self._host.transfer, ticket)
            except MemoryLost as error:
                lost = True
                self._lost += buffers
                logger.critical("%d blocks are lost until a restart: %s", len(prepared.missing), error)
            self._host.engine.submit(EndFetch(prepared.key, lost))

    async def _receive(
        self,
        key: str,
        hashes: tuple[bytes, ...],
        missing: list[int],
        buffers: list[tuple[int, memoryview]],
        ticket: int,
        incoming: Incoming,
        fetch: Fetch,
    ) -> None:
        """Takes in batch by batch. Raises TandemError."""
        layout = self._host.model.layout
        began = time.perf_counter()
        num_blocks = 0
        parts = self._client.fetch(
            [hashes[index] for index in missing],
            layout.block_bytes,
            ticket,
            self._host.transfer.address,
            self.policy.timeout_s,
        )
        async with contextlib.aclosing(parts):
            async for sent in parts:
                await incoming.blocks([block.index for block in sent])
                self._host.engine.blocks.store([buffers[block.index] for block in sent])
                checksums = {missing[block.index]: block.checksum for block in sent}
                self._host.engine.submit(AdoptBlocks(key, checksums))
                num_blocks += len(sent)
                fetch.num_tokens += len(sent) * layout.block_size
                self.num_blocks.update(block.tier for block in sent)
                if self._num_local(hashes) >= min(checksums, default=0) > 0:
                    break  # computed meanwhile up to here
            else:
                await incoming.trailer()
        self.policy.note_fetch(num_blocks * layout.block_bytes, time.perf_counter() - began)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        if isinstance(error, TransferFailed):
            logger.warning("a prefix did not arrive and is computed: %s", error)
            return
        self._silent_until = time.monotonic() + RETRY_S
        if self._available:
            logger.warning("the store at %s gives no blocks for now: %s", self._client.address, error)
            self._available = False
