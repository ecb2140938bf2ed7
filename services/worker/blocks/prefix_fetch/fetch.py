"""Brings a prompt's prefix from peers and store nodes before and while the rest is computed.

Every source sends its last blocks first. They cost most to compute: token n attends to all tokens before it.
Where they do not arrive soon, the engine computes from the front meanwhile, until both meet ("Compute or load KV
cache? Why not both?", Jin et al., 2024). So a slow link delays a request at most by the time for which it is held.
Blocks that a source fails to send are computed; the other sources continue.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.worker.blocks.exchange_client import BlockExchangeClient, LocalBlocks
from services.worker.blocks.peer_connections import Peers
from services.worker.blocks.prefix_fetch.fetch_policy import FetchPolicy, plan_fetch
from services.worker.blocks.prefix_fetch.fetch_stream import FetchStream, Source, SourceFetch
from services.worker.host import EngineHost
from shared.block_service.client import SentBlock
from shared.block_service.store_nodes import StoreNodes
from shared.engine.messages import BlocksAdopted, EndFetch
from shared.engine.sequence import EngineSequence
from shared.errors import StoreUnavailable, TandemError
from shared.kv.block_memory import BlockMemory, beside_loop
from shared.kv.handoff.receive_handoff import LostMemory, MemoryLost, end_receives
from shared.kv.handoff.shipment import trailer_bytes
from shared.kv.hashing import extend_chain
from shared.kv.rendezvous import by_keeper
from shared.kv.seal import Purpose, Seal
from shared.kv.transfer import Incoming, new_ticket
from shared.kv_index.holders import Tier
from shared.rpc.pb.tandem.v1 import worker_pb2
from shared.telemetry.trace_context import TraceContext, new_span_id
from shared.telemetry.tracing.span import Attributes, Span, SpanKind


@dataclass(frozen=True, slots=True)
class PrefixHint:
    """From the index, and possibly stale: each holder named is asked what it really has."""

    num_stored_blocks: int | None = None
    """No store node has a block behind this one of the chain; None = not known, all nodes are asked."""
    peers: tuple[tuple[str, int], ...] = ()
    """(host:port, blocks from the first one on) of workers that hold more than this one."""

    @classmethod
    def of(cls, command: worker_pb2.Submit | worker_pb2.Reserve) -> PrefixHint:
        """The hint in a router's command."""
        return cls(
            command.num_stored_blocks if command.HasField("num_stored_blocks") else None,
            tuple((peer.address, peer.num_blocks) for peer in command.peers),
        )


logger = logging.getLogger(__name__)


class Fetch:
    """One request's fetch."""

    def __init__(self, trace: TraceContext | None = None) -> None:
        """`trace`: of the request's span, where its spans are recorded."""
        self.trace = trace
        self.sources: list[Span] = []
        """A span for each source that was asked for blocks, if there is a trace."""
        self.waited_ms = 0.0
        """How long the request was held."""
        self.num_tokens = 0
        """Tokens whose blocks came until now, sound and before they were computed."""
        self.num_peer_tokens = 0
        """Tokens among `num_tokens` whose blocks came from peers' pools."""
        self.counted: frozenset[int] = frozenset()
        """Blocks that the engine was asked to prepare for, one for each block of tokens."""
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Stops the fetch: blocks that have not arrived are not needed any more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None


class PrefixFetch:
    """All fetches of one worker. Runs on the event loop; the engine takes the blocks in."""

    def __init__(
        self,
        host: EngineHost,
        nodes: StoreNodes,
        peers: Peers,
        exchange: BlockExchangeClient,
        local: LocalBlocks,
        policy: FetchPolicy,
    ) -> None:
        """Owns none of them."""
        self._host = host
        self._nodes = nodes
        self._peers = peers
        self._exchange = exchange
        self._local = local
        self.policy = policy
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = LostMemory()
        self.num_blocks: Counter[Tier] = Counter()
        """Blocks of tokens that came from others, by the tier in which they lay: `DEVICE` are those of peers' pools."""
        self.num_failed = 0
        """Sources that failed in a fetch: what was missing of theirs was computed."""

    def num_tokens(self, tier: Tier) -> int:
        """Tokens whose blocks came from a tier."""
        return self.num_blocks[tier] * self._host.model.layout.block_size

    def may_bring(self, hint: PrefixHint) -> bool:
        """Whether a fetch from any source is possible."""
        return self.policy.enabled and bool(hint.peers or (self._nodes.live and hint.num_stored_blocks != 0))

    async def hold(self, sequence: EngineSequence, hint: PrefixHint, fetch: Fetch) -> None:
        """Returns when the sequence should start: its prefix is here, or cannot come, or takes too long."""
        began = time.perf_counter()
        groups = self._host.model.layout.groups
        block_size = groups.block_size
        extend_chain(sequence.block_hashes, sequence.hash_root, sequence.token_ids, block_size, num_groups=groups.size)
        hashes = tuple(sequence.block_hashes[: (sequence.num_tokens - 1) // block_size * groups.size])
        missing = [index for index, name in enumerate(hashes) if name not in self._local]
        plan = await self._plan(hashes, missing, hint)
        if plan:
            fetch.task = asyncio.create_task(self._bring(hashes, missing[0], plan, fetch))
            self._tasks.add(fetch.task)
            fetch.task.add_done_callback(self._tasks.discard)
            block_bytes = self._host.model.layout.block_bytes
            num_bytes = {source.name: block_bytes * len(indexes) for source, indexes in plan.items()}
            num_tokens = block_size * sum(index % groups.size == 0 for indexes in plan.values() for index in indexes)
            await asyncio.wait({fetch.task}, timeout=self.policy.hold_s(num_bytes, num_tokens))
        fetch.waited_ms = (time.perf_counter() - began) * 1e3

    async def close(self) -> None:
        """Ends all fetches."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- planning

    async def _plan(self, hashes: Sequence[bytes], missing: Sequence[int], hint: PrefixHint) -> dict[Source, list[int]]:
        """Which blocks to fetch from which source, after asking each what it really has."""
        asked = {source: indexes for source, indexes in self._asked(hashes, missing, hint) if indexes}
        found = await asyncio.gather(*(self._ask(source, hashes, indexes) for source, indexes in asked.items()))
        peers = {source.name: held for source, held in zip(asked, found, strict=True) if source.is_peer}
        stores = {source.name: held for source, held in zip(asked, found, strict=True) if not source.is_peer}
        plan = plan_fetch(self._useful(hashes, missing, [*peers.values(), *stores.values()]), peers, stores)
        return {source: plan[source.name] for source in asked if source.name in plan}

    def _useful(
        self, hashes: Sequence[bytes], missing: Sequence[int], held: Sequence[AbstractSet[int]]
    ) -> Sequence[int]:
        """The missing blocks that are needed behind the longest prefix that can be had; `held`: what each source
        has."""
        groups = self._host.model.layout.groups
        if groups.is_plain:
            return missing
        absent = set(missing).difference(*held)
        longest = groups.longest(lambda place: place not in absent, len(hashes) // groups.size)
        wanted = set(groups.seen_behind(longest))
        return [place for place in missing if place in wanted]

    def _asked(
        self, hashes: Sequence[bytes], missing: Sequence[int], hint: PrefixHint
    ) -> list[tuple[Source, list[int]]]:
        """The missing blocks that each source may have; sources whose link is too slow are left out."""
        asked: list[tuple[Source, list[int]]] = []
        layout = self._host.model.layout
        num_groups = layout.groups.size
        for address, num_blocks in hint.peers:
            peer = self._peers.client(address)
            if peer is not None:
                source = Source(address, peer, is_peer=True)
                asked.append((source, [index for index in missing if index < num_blocks * num_groups]))
        limit = len(hashes) if hint.num_stored_blocks is None else hint.num_stored_blocks * num_groups
        stored = by_keeper(hashes, (index for index in missing if index < limit), self._nodes.live)
        asked += [(Source(name, self._nodes.client(name), is_peer=False), indexes) for name, indexes in stored.items()]
        whole_bytes = layout.block_bytes * num_groups
        return [item for item in asked if self.policy.pays(item[0].name, whole_bytes, layout.block_size)]

    async def _ask(self, source: Source, hashes: Sequence[bytes], indexes: Sequence[int]) -> set[int]:
        """Which of these blocks the source has."""
        try:
            held = await source.client.look_up([hashes[index] for index in indexes])
        except TandemError as error:
            self._failed(source, error)
            return set()
        return {index for index, here in zip(indexes, held, strict=True) if here}

    # --- receiving

    async def _bring(
        self, hashes: Sequence[bytes], num_local: int, plan: Mapping[Source, Sequence[int]], fetch: Fetch
    ) -> None:
        """Never raises but when cancelled, and then too leaves nothing behind."""
        groups = self._host.model.layout.groups
        indexes = [*range(num_local), *sorted(index for blocks in plan.values() for index in blocks)]
        asked = tuple(hashes[index] for index in indexes)
        fetch.counted = frozenset(number for number, index in enumerate(indexes) if index % groups.size == 0)
        asking = asyncio.create_task(self._exchange.prepare(asked, self.policy.mode == "auto"))
        try:
            prepared = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._host.engine.submit(EndFetch((await asking).key))
            raise
        places = {indexes[place]: (place, block_id) for place, block_id in prepared.missing}
        sources = [
            SourceFetch(source, prepared.key, asked, [places[index] for index in blocks if index in places])
            for source, blocks in plan.items()
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for item in sources:
                    if item.blocks:
                        group.create_task(self._bring_from(item, fetch))
        finally:
            self._end(prepared.key, sources)
            for item in sources:
                if item.unsafe is not None:
                    self._lost.keep(item.unsafe.closed(), functools.partial(self._on_safe, item, sources))

    def _end(self, key: str, parts: Sequence[SourceFetch]) -> None:
        """Gives back what did not arrive, but for the parts whose silent sender may still write to it."""
        unsafe = frozenset(block_id for part in parts if part.unsafe is not None for _, block_id in part.blocks)
        self._host.engine.submit(EndFetch(key, unsafe))

    def _on_safe(self, part: SourceFetch, parts: Sequence[SourceFetch]) -> None:
        logger.warning("%d blocks that %s did not bring are safe again", len(part.blocks), part.source.name)
        part.unsafe = None
        self._end(part.key, parts)

    async def _bring_from(self, part: SourceFetch, fetch: Fetch) -> None:
        """One source's blocks. Never raises but when cancelled, and then too no receive is left behind."""
        transfer, access = self._host.transfer, self._host.engine.blocks
        ticket = new_ticket()
        seal = self._host.seal(Purpose.FETCH, ticket)
        buffers: list[tuple[int, BlockMemory]] = []
        incoming: Incoming | None = None
        began = time.perf_counter()
        num_bytes = 0
        span_id = new_span_id()
        try:
            block_ids = [block_id for _, block_id in part.blocks]
            buffers += zip(block_ids, access.incoming(block_ids), strict=True)
            memory = [(number, buffer) for number, (_, buffer) in enumerate(buffers)]
            incoming = transfer.expect(ticket, memory, trailer_bytes(len(buffers), seal))
            async with asyncio.timeout(self.policy.timeout_s):
                num_bytes = await self._receive(part, buffers, ticket, incoming, fetch, seal, span_id)
        except TimeoutError:
            self.num_failed += 1
            num_bytes = sum(memory.nbytes for _, memory in buffers)
            logger.warning("%s took too long to bring a prefix, which is computed", part.source.name)
        except TandemError as error:
            self._failed(part.source, error)
        finally:
            try:
                await end_receives(transfer, ticket)
            except MemoryLost as error:
                part.unsafe = incoming
                logger.critical("%d blocks are lost until their sender ends: %s", len(buffers), error)
        now = time.perf_counter()
        self.policy.note_fetch(part.source.name, num_bytes, now - began)
        if fetch.trace is not None:
            attributes: Attributes = {"tandem.source": part.source.name, "tandem.bytes": num_bytes}
            fetch.sources.append(
                Span("fetch from source", span_id, fetch.trace.span_id, began, now, SpanKind.CLIENT, attributes)
            )

    async def _receive(
        self,
        part: SourceFetch,
        buffers: Sequence[tuple[int, BlockMemory]],
        ticket: int,
        incoming: Incoming,
        fetch: Fetch,
        seal: Seal | None,
        span_id: int,
    ) -> int:
        """Takes in batch by batch, and returns how many bytes came. Raises TandemError, and TimeoutError where the
        source is silent."""
        layout, names = self._host.model.layout, part.names
        num_blocks = 0
        parts = part.source.client.fetch(
            names,
            layout.block_bytes,
            ticket,
            self._host.transfer.address,
            self.policy.timeout_s,
            traceparent=fetch.trace.under(span_id).traceparent if fetch.trace is not None else "",
        )
        async with FetchStream(parts, self.policy.silence_s) as stream:
            while (sent := await stream.next()) is not None:
                await stream.unless_broken(incoming.blocks([block.index for block in sent]))
                sound = await _opened(sent, buffers, seal)
                self._host.engine.blocks.store([buffers[block.index] for block in sound])
                places = {part.blocks[block.index][0]: block for block in sound}
                tiers = {place: block.tier for place, block in places.items()}
                checksums = {place: block.checksum for place, block in places.items()}
                adopted = functools.partial(self._adopted, tiers=tiers, fetch=fetch)
                self._exchange.adopt(part.key, checksums, len(sent) - len(sound), adopted)
                num_blocks += len(sent)
                rest = names[: min((block.index for block in sent), default=0)]
                if rest and all(name in self._local for name in rest):
                    break  # computed meanwhile up to here
            else:
                await stream.unless_broken(incoming.trailer())
        return num_blocks * layout.block_bytes

    def _adopted(self, adopted: BlocksAdopted, *, tiers: Mapping[int, Tier], fetch: Fetch) -> None:
        """The engine has taken in what arrived."""
        found = [tiers[place] for place in adopted.indexes if place in fetch.counted]
        self.num_blocks.update(found)
        block_size = self._host.model.layout.block_size
        fetch.num_tokens += block_size * len(found)
        fetch.num_peer_tokens += block_size * found.count(Tier.DEVICE)

    def _failed(self, source: Source, error: TandemError) -> None:
        self.num_failed += 1
        if not isinstance(error, StoreUnavailable):
            logger.warning("%s did not bring a prefix, which is computed: %s", source.name, error)
        elif source.is_peer:
            self._peers.failed(source.name, error)
        else:
            self._nodes.failed(source.name, error)


async def _opened(
    sent: Sequence[SentBlock], buffers: Sequence[tuple[int, BlockMemory]], seal: Seal | None
) -> Sequence[SentBlock]:
    """The blocks that have arrived as they were sealed; the engine compares their checksums."""
    if seal is None:
        return sent
    arrived = [(block.index, buffers[block.index][1], block.tag) for block in sent]
    opened = await beside_loop(sum(place.nbytes for _, place, _ in arrived), lambda: seal.open_blocks(arrived))
    return [block for block, is_ours in zip(sent, opened, strict=True) if is_ours]
