"""The router's view of its workers: a link to each, one model and layout, the pools that placement reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import grpc

from services.router.placement.views import Pool
from services.router.workers.adapter_names import AdapterDirectory
from services.router.workers.discovery import DiscoveredWorker, Discovery
from services.router.workers.link import WorkerLink
from services.router.workers.liveness import LivenessLimits
from services.router.workers.sessions import Greeting
from services.router.workers.weights import FleetWeights
from shared.errors import DeadlineExceeded, ModelMismatch
from shared.fingerprints import difference
from shared.identity import WorkerRole
from shared.kv.encryption_modes import NO_ENCRYPTION
from shared.kv.hashing import ChainRoots
from shared.kv.layout import LAYOUT_VERSION, BlockLayout
from shared.rpc.convert import layout_from_proto, roles_from_proto
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.tasks import end_task

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Time for the workers to close a session, seconds."""
COMING_BACK_S = 300.0
"""A role whose last worker the discovery stopped naming less than this ago is expected to get one again. Seconds."""


class Fleet:
    """Connects to the workers that a discovery names, and follows it.

    A worker that it names anew is connected. One that it names no more is retired: it gets no new work, its running
    requests continue until they end, then its session is closed. A worker whose address, role or label changed is
    retired and connected anew under the same name. Nothing of this touches another worker's requests.

    Runs on the event loop. `start()` begins to connect and does not wait for any worker.
    """

    def __init__(
        self,
        router_name: str,
        discovery: Discovery,
        on_change: Callable[[], None],
        *,
        collocated: bool = False,
        limits: LivenessLimits | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        texts_digest: str = "",
        tpot_target_s: float = 0.0,
    ) -> None:
        """Owns the discovery. `on_change` is called when any worker's state changed, or the set of workers.
        `collocated`: no prefill worker is needed to serve a prompt. `limits`: when a silent worker is given up.
        `token`: `FleetKey.token()`, for orders to workers. `texts_digest`: of the router's model folder; a worker that
        has another one is refused. `tpot_target_s`: what workers bound their steps by; 0 = nothing."""
        self.layout: BlockLayout | None = None
        """Layout of the workers that compute prompts."""
        self.model_fingerprint = ""
        self.block_encryption = ""
        self.prefill_pool = Pool(router_name)
        """The connected prefill workers, for placement."""
        self.decode_pool = Pool(router_name)
        """The connected decode workers, for placement; every name in a pool has its link in `prefills`, `decodes`."""
        self.prefills: dict[str, WorkerLink] = {}
        self.decodes: dict[str, WorkerLink] = {}
        """A worker with both roles has one link, which is in both."""
        self.retiring: list[WorkerLink] = []
        """Workers that the discovery names no more and that still have requests of this router."""
        self.adapters = AdapterDirectory(lambda: self.links)
        """What the names of adapters mean."""
        self.weights = FleetWeights(lambda: self.links)
        """Changes of all workers' weights, and their sleep."""
        self._discovery = discovery
        self._on_change = on_change
        self._collocated = collocated
        self._limits = limits or LivenessLimits()
        self._greeting = Greeting(router_name, self._limits, tpot_target_s=tpot_target_s)
        self._credentials = credentials
        self._texts_digest = texts_digest
        self._token = token
        self._roots: dict[WorkerRole, ChainRoots] = {}  # by what holds a prompt
        self._longest: tuple[int, int] | None = None  # (decode workers connected, max_model_len then)
        self._last_longest = 0  # max_model_len of the decode worker that connected last
        self._misfits: set[str] = set()  # workers that were refused because of their model
        self._named_until: dict[WorkerRole, float] = {}  # when a worker of the role was last named no more
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to follow the discovery and to connect to its workers."""
        self._discovery.start(self._follow)
        self._follow()

    async def close(self) -> None:
        """Ends all sessions; workers free what this router held. Twice is fine."""
        await self._discovery.close()
        await self.adapters.close()
        await self.weights.close()
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            await end_task(task)

    def keep_trace(self, workers: frozenset[str], trace_id: bytes) -> None:
        """See `WorkerLink.keep_trace`, for each of these workers that is here, by name."""
        for link in (*self.links, *self.retiring):
            if link.name in workers:
                link.keep_trace(trace_id)

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """The workers that the discovery names, prefill first."""
        return tuple({**self.prefills, **self.decodes}.values())

    @property
    def discovery_failure(self) -> str:
        """Why the set of workers may be out of date; empty while it is not."""
        return self._discovery.failure

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that every connected decode worker can hold, or could while one was connected; 0
        until the first one is."""
        num_connected = len(self.decode_pool)
        if self._longest is None or self._longest[0] != num_connected:
            lengths = (link.max_model_len for link in self.decodes.values() if link.connected)
            self._longest = num_connected, min(lengths, default=self._last_longest)
        return self._longest[1]

    @property
    def shared(self) -> bool:
        """Whether other routers place requests here too."""
        return self.prefill_pool.shared or self.decode_pool.shared

    def not_ready_reason(self) -> str:
        """Empty when every role has a worker that takes requests; else which one has none, and why."""
        return next((self._why_missing(role) for role in self._needed if not _has_ready(self._links_of(role))), "")

    def refusal_reason(self) -> str:
        """Why a prompt cannot be served soon either; empty where it can be, or may be queued: for a worker that is lost
        or draining and expected back. A role is given up where it has only workers of another model, or where the
        discovery has named none for COMING_BACK_S."""
        for role in self._needed:
            if self._is_given_up(role):
                return self._why_missing(role)
        return ""

    @property
    def lacks_prefill(self) -> bool:
        """Whether decode workers have to compute prompts because no prefill worker takes any."""
        return not self._collocated and not self.converts and not _has_ready(self.prefills)

    @property
    def converts(self) -> bool:
        """Whether decode workers get prompts in another format than theirs, converted: they never compute one then."""
        return self.layout is not None and self.layout.format.is_converted

    @property
    def _needed(self) -> tuple[WorkerRole, ...]:
        return (WorkerRole.DECODE,) if self._collocated else (WorkerRole.DECODE, WorkerRole.PREFILL)

    def _links_of(self, role: WorkerRole) -> dict[str, WorkerLink]:
        return self.prefills if role is WorkerRole.PREFILL else self.decodes

    def _why_missing(self, role: WorkerRole) -> str:
        links = self._links_of(role)
        if not links:
            failure = self.discovery_failure
            return f"no {role} worker is known" + (f" ({failure})" if failure else "")
        reasons = "; ".join(f"{link.name}: {_why_idle(link)}" for link in links.values())
        return f"no {role} worker is ready ({reasons})"

    def _is_given_up(self, role: WorkerRole) -> bool:
        links = self._links_of(role)
        if links:
            return not _has_ready(links) and links.keys() <= self._misfits
        return time.monotonic() - self._named_until.get(role, -math.inf) > COMING_BACK_S

    async def heard(self) -> None:
        """Returns once every connected worker has sent a message since the call, or is lost or suspected: it is known
        by then which workers died together."""
        limit_s = self._limits.suspect_after_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(link.heard() for link in self.links))

    def hash_root(
        self, salt: str, num_prompt_tokens: int, adapter: str = "", holder: WorkerRole = WorkerRole.PREFILL
    ) -> bytes:
        """Root of the block hash chain of a prompt, of an adapter's digest, as workers that compute prompts have it, or
        as decode workers do where it reaches them converted. Needs a worker to have connected once."""
        return self._roots[holder].of(salt, num_prompt_tokens, adapter)

    async def close_session(self, tenant: str, session: str) -> int:
        """Workers retain nothing for the sake of a tenant's session any more; returns the number of blocks that this
        frees. Raises WorkerLost where a worker goes away meanwhile, DeadlineExceeded where one does not answer."""
        links = [link for link in (*self.links, *self.retiring) if link.connected]
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                return sum(await asyncio.gather(*(link.calls.close_session(tenant, session) for link in links)))
        except TimeoutError:
            raise DeadlineExceeded(
                f"a worker did not answer within {CLOSE_TIMEOUT_S:g} s: it may retain blocks of the session still",
                limit=CLOSE_TIMEOUT_S,
            ) from None

    def expect_session(
        self, tenant: str, session: str, next_turn_s: float, workers: Collection[str] | None = None
    ) -> None:
        """Workers evict what is retained for other sessions first where those come back later than this one, which
        does that many seconds from now. `workers`: only those of these names; None: all."""
        for link in (*self.links, *self.retiring):
            if link.connected and (workers is None or link.name in workers):
                link.calls.expect_session(tenant, session, next_turn_s)

    def take_over(self, request_id: str, tenant: str) -> None:
        """A client continues the request on this router: other routers' attempts at it are ended on the workers."""
        for link in (*self.links, *self.retiring):
            link.take_over(types_pb2.TakeOver(request_id=request_id, tenant=tenant))

    def _follow(self) -> None:
        """Makes the links those of the discovery's view."""
        view = {worker.name: worker for worker in self._discovery.workers}
        old = [link for link in self.links if view.get(link.name) != link.worker]
        for link in old:
            self.prefills.pop(link.name, None)
            self.decodes.pop(link.name, None)
            self._misfits.discard(link.name)
            self._named_until |= dict.fromkeys(link.roles, time.monotonic())
            self.retiring.append(link)
            self.adapters.forget(link.name)
            link.retire()
        known = self.prefills.keys() | self.decodes.keys()
        new = [worker for worker in view.values() if worker.name not in known]
        for worker in new:
            self._connect(worker)
        if old or new:
            self._longest = None
            self._on_change()

    def _connect(self, worker: DiscoveredWorker) -> None:
        link = WorkerLink(
            worker,
            # Its sessions replace each other, and not those of a retired link to the same process.
            replace(self._greeting, router_incarnation=secrets.randbits(64)),
            partial(self._check, worker.name),
            self._on_change,
            {WorkerRole.PREFILL: self.prefill_pool, WorkerRole.DECODE: self.decode_pool},
            on_lost=self._on_worker_lost,
            credentials=self._credentials,
            token=self._token,
            on_adapters=self.adapters.report,
            on_weights=self._on_weights,
        )
        for role in worker.roles:
            self._links_of(role)[worker.name] = link
        task = asyncio.create_task(self._serve(link), name=f"link-{worker.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_worker_lost(self, lost: types_pb2.PeerLost) -> None:
        """Workers that still wait for the lost one, for requests that this router cancelled, need not wait longer."""
        for link in (*self.links, *self.retiring):
            link.peer_lost(lost)

    async def _serve(self, link: WorkerLink) -> None:
        """Keeps a worker's session up until the worker is retired and drained."""
        await link.run()
        self.retiring.remove(link)

    def _check(self, name: str, welcome: types_pb2.Welcome) -> None:
        """Notes whether the worker fits. Raises ModelMismatch."""
        self._misfits.add(name)
        self._ensure_fits(welcome)
        self._misfits.discard(name)
        if name in self.decodes:
            self._last_longest = welcome.max_model_len

    def _on_weights(self, link: WorkerLink) -> None:
        """A worker has connected, has other weights, or begins or ceases to take requests.

        The fleet's are those of the workers that take requests: it gets other ones when none of the old ones' does and
        a worker of new ones."""
        found, roots = link.model_fingerprint, self._roots
        if not roots:
            return
        if not link.load.model_fingerprint:
            self.weights.bring(link, found)  # as it started
        else:
            self.weights.seen(found)
        taking = [
            other.model_fingerprint
            for other in (link, *self.links)
            if other.connected and not (other.retired or other.load.draining)
        ]
        if taking and self.model_fingerprint not in taking:
            found = self.model_fingerprint = taking[0]
            logger.info("the workers' weights have changed: model %s", found)
            self._roots = {role: replace(of_role, model_fingerprint=found) for role, of_role in roots.items()}
        for other in self.links:
            is_same = other.model_fingerprint == self.model_fingerprint
            other.fit("" if is_same else difference(other.model_fingerprint, self.model_fingerprint))

    def _ensure_fits(self, welcome: types_pb2.Welcome) -> None:
        """The first worker to connect sets the fleet's model, layout and block encryption; while one is connected,
        others must match."""
        layout = layout_from_proto(welcome.layout)
        if welcome.layout.layout_version != LAYOUT_VERSION:
            raise ModelMismatch(
                f"block layout version {welcome.layout.layout_version}, the router's is {LAYOUT_VERSION}",
                field="layout_version",
            )
        if self._texts_digest and welcome.texts_digest not in ("", self._texts_digest):
            raise ModelMismatch(
                f"it serves {welcome.model_name}, whose config.json and tokenizer.json are not those of the router's "
                "model folder",
                field="model",
            )
        if layout.format.is_converted and self._collocated:
            raise ModelMismatch(
                f"its KV is {layout.handed_off.name}, prompts that prefill workers convert: mode is collocated, "
                "without any",
                field="mode",
            )
        self._longest = None
        if self.layout is None or not any(link.connected for link in (*self.links, *self.retiring)):
            self.layout = layout.computed
            self.model_fingerprint = welcome.model_fingerprint
            self.block_encryption = welcome.block_encryption or NO_ENCRYPTION
            self._roots = {
                role: ChainRoots(welcome.model_fingerprint, form.name, LAYOUT_VERSION, welcome.rope_trained_len)
                for role, form in ((WorkerRole.PREFILL, layout.computed), (WorkerRole.DECODE, layout.handed_off))
            }
            return
        # One that starts again after an update has its settings' folder: it connects, and gets the fleet's weights.
        if welcome.model_fingerprint != self.model_fingerprint and not self.weights.may_bring():
            raise ModelMismatch(
                difference(welcome.model_fingerprint, self.model_fingerprint), field="model_fingerprint"
            )
        is_decode = WorkerRole.DECODE in roles_from_proto(welcome.roles)
        (self.layout.handed_off if is_decode else self.layout).ensure_compatible(layout)
        if (theirs := welcome.block_encryption or NO_ENCRYPTION) != self.block_encryption:
            raise ModelMismatch(
                f"block_encryption is {theirs} here and {self.block_encryption} in the fleet", field="block_encryption"
            )


def _has_ready(links: Mapping[str, WorkerLink]) -> bool:
    for link in links.values():  # noqa: SIM110  # no generator: asked three times a request
        if link.connected and not link.load.draining and not link.mismatch:
            return True
    return False


def _why_idle(link: WorkerLink) -> str:
    """Why a worker that cannot take requests cannot."""
    if link.mismatch or not link.connected:
        return link.mismatch or "connecting"
    return "asleep" if link.load.asleep else "draining"
