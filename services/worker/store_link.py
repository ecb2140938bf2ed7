"""A worker's dealings with the store: gives it blocks, has prefixes from it."""

from __future__ import annotations

from services.worker.block_offers import BlockOffers
from services.worker.fetch_policy import FetchPolicy
from services.worker.host import EngineHost
from services.worker.prefix_fetch import PrefixFetch
from services.worker.store_answers import StoreAnswers
from shared.engine.messages import BlocksHeld, FetchPrepared, PoolChanged, SequenceEnded
from shared.rpc.store_client import StoreClient


class StoreLink:
    """One store node. `start()`/`close()`; `on_event` takes the engine's words about blocks."""

    def __init__(self, host: EngineHost, client: StoreClient) -> None:
        """Owns the client. The host must be started."""
        self._client = client
        self._answers = StoreAnswers(host.engine)
        self.offers = BlockOffers(host, client, self._answers)
        self.fetches = PrefixFetch(host, client, self._answers, FetchPolicy(host.settings.prefix_fetch))

    def start(self) -> None:
        """Does not wait for the store."""
        self.offers.start()

    def on_event(self, event: PoolChanged | SequenceEnded | BlocksHeld | FetchPrepared) -> None:
        """What the engine says about blocks."""
        match event:
            case PoolChanged(sealed, evicted):
                self.fetches.on_pool(sealed, evicted)
            case SequenceEnded(hashes):
                self.offers.add(hashes)
            case BlocksHeld() | FetchPrepared():
                self._answers.on_event(event)

    async def close(self) -> None:
        """Gives what waits, within a second; twice is fine."""
        await self.fetches.close()
        await self.offers.close()
        await self._client.close()
