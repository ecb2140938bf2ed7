"""Connects a worker's pool with store nodes and peers: offloads blocks, serves them, fetches prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from services.worker.blocks.exchange_client import BlockExchangeClient, ExchangeEvent, LocalBlocks
from services.worker.blocks.peers import Peers
from services.worker.blocks.prefix_fetch.fetch import PrefixFetch
from services.worker.blocks.prefix_fetch.fetch_policy import FetchPolicy
from services.worker.blocks.server import BlockServer
from services.worker.blocks.store_offloader import StoreOffloader
from services.worker.host import EngineHost
from shared.block_service.store_nodes import StoreNodes
from shared.engine.messages import BlocksAdopted, BlocksHeld, CacheFlushed, FetchPrepared, PoolChanged, SequenceEnded
from shared.kv.fleet_key import token_of
from shared.kv.rendezvous import by_keeper


class KVConnector:
    """Owns the offloaders, the fetches and the server of this worker's blocks. `start()`/`close()`; `on_event` takes
    the engine's events about blocks."""

    def __init__(
        self, host: EngineHost, stores: Mapping[str, str], credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`stores` are the store nodes, host:port by name. The host must be started."""
        self._exchange = BlockExchangeClient(host.engine)
        self._local = LocalBlocks()
        token = token_of(host.fleet_key)
        self._peers = Peers(credentials, token)
        self.nodes = StoreNodes(stores, credentials, token)
        self.offers = {name: StoreOffloader(host, name, self.nodes, self._exchange) for name in self.nodes.names}
        policy = FetchPolicy(host.settings.prefix_fetch)
        self.fetches = PrefixFetch(host, self.nodes, self._peers, self._exchange, self._local, policy)
        self.server = BlockServer(host, self._exchange, self._local)

    def start(self) -> None:
        """Does not wait for any store node."""
        for offers in self.offers.values():
            offers.start()

    def on_event(self, event: PoolChanged | SequenceEnded | ExchangeEvent) -> None:
        """An event of the engine about blocks."""
        match event:
            case PoolChanged(sealed, evicted):
                self._local.on_pool(sealed, evicted)
            case SequenceEnded():
                self._offer(event)
            case BlocksHeld() | FetchPrepared() | BlocksAdopted() | CacheFlushed():
                self._exchange.on_event(event)

    async def close(self) -> None:
        """Offers the waiting blocks for at most one second, then closes. Idempotent."""
        await self.fetches.close()
        await asyncio.gather(self.server.close(), *(offers.close() for offers in self.offers.values()))
        await self._peers.close()
        await self.nodes.close()

    def _offer(self, ended: SequenceEnded) -> None:
        """Offers each run of blocks to the reachable node that is responsible for it."""
        hashes = ended.block_hashes
        for name, indexes in by_keeper(hashes, range(ended.num_arrived, len(hashes)), self.nodes.live).items():
            self.offers[name].add(tuple(hashes[index] for index in indexes), ended.tenant)
