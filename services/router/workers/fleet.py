"""The router's view of its workers: links by role, one model and layout for all, what placement may know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from services.router.placement.views import Pool
from services.router.workers.decode_link import DecodeLink
from services.router.workers.prefill_link import PrefillLink
from shared.errors import ModelMismatch
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.rpc.convert import layout_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import end_task

AnyLink = PrefillLink | DecodeLink


class Fleet:
    """All workers of a static list. `start()` begins to connect; it does not wait for any worker."""

    def __init__(
        self,
        router_name: str,
        prefills: Mapping[str, str],
        decodes: Mapping[str, str],
        on_change: Callable[[], None],
        labels: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`prefills` and `decodes` map names to host:port, `labels` some of the names to where they stand.

        `on_change` is called when any worker's state moved.
        """
        self.layout: BlockLayout | None = None
        self.model_fingerprint = ""
        self.model_name = ""
        self.prefill_pool = Pool(router_name)
        """The connected prefill workers, for placement."""
        self.decode_pool = Pool(router_name)
        self._roots: ChainRoots | None = None
        self._longest: tuple[int, int] | None = None  # (decode workers connected, max_model_len then)
        self._tasks: list[asyncio.Task[None]] = []
        where = labels or {}
        self.prefills = {
            name: PrefillLink(
                name, address, router_name, self._check, on_change, self.prefill_pool, where.get(name, ())
            )
            for name, address in prefills.items()
        }
        self.decodes = {
            name: DecodeLink(name, address, router_name, self._check, on_change, self.decode_pool, where.get(name, ()))
            for name, address in decodes.items()
        }

    def start(self) -> None:
        """Begins to connect to all workers, and goes on for ever."""
        self._tasks = [asyncio.create_task(link.run(), name=f"link-{link.name}") for link in self.links]

    async def close(self) -> None:
        """Ends all sessions; workers free what this router held."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await end_task(task)
        self._tasks = []

    @property
    def links(self) -> tuple[AnyLink, ...]:
        """All workers, prefill first."""
        return (*self.prefills.values(), *self.decodes.values())

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that every connected decode worker can hold; 0 while there is none."""
        num_connected = len(self.decode_pool)
        if self._longest is None or self._longest[0] != num_connected:
            lengths = (link.max_model_len for link in self.decodes.values() if link.connected)
            self._longest = num_connected, min(lengths, default=0)
        return self._longest[1]

    @property
    def shared(self) -> bool:
        """Whether other routers place requests here too."""
        return self.prefill_pool.shared or self.decode_pool.shared

    def not_ready_reason(self) -> str:
        """Empty when a prompt can be served."""
        for role, links in (("decode", self.decodes), ("prefill", self.prefills)):
            if links and not any(link.connected and not link.load.draining for link in links.values()):
                reasons = "; ".join(f"{link.name}: {link.mismatch or 'connecting'}" for link in links.values())
                return f"no {role} worker is ready ({reasons})"
        return ""

    def hash_root(self, salt: str, num_prompt_tokens: int) -> bytes:
        """Root of the block hash chain of a prompt; needs a worker to have connected once."""
        assert self._roots is not None
        return self._roots.of(salt, num_prompt_tokens)

    def _check(self, welcome: types_pb2.Welcome) -> None:
        """The first worker to connect sets the fleet's model and layout; while one is there, others must match."""
        layout = layout_from_proto(welcome.layout)
        if welcome.layout.layout_version != LAYOUT_VERSION:
            raise ModelMismatch(
                f"block layout version {welcome.layout.layout_version}, the router's is {LAYOUT_VERSION}",
                field="layout_version",
            )
        self._longest = None
        if self.layout is None or not any(link.connected for link in self.links):
            self.layout = layout
            self.model_fingerprint = welcome.model_fingerprint
            self.model_name = welcome.model_name
            self._roots = ChainRoots(welcome.model_fingerprint, layout.dtype, LAYOUT_VERSION, welcome.rope_trained_len)
            return
        if welcome.model_fingerprint != self.model_fingerprint:
            raise ModelMismatch(
                f"serves model {welcome.model_fingerprint}, the fleet {self.model_fingerprint}",
                field="model_fingerprint",
            )
        self.layout.ensure_compatible(layout)
