"""`tandem.v1.CacheService`, which `tandem cache` calls, and the prefixes that its calls name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio

from services.router.edge.grpc.unary_call import answer_admin
from services.router.edge.model_names import ModelNames
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.edge.tenants.rate_limits import chain_salt
from services.router.views.metrics import TenantCounts
from services.router.workers.fleet import Fleet
from shared.block_service.client import BlockClient
from shared.block_service.store_client import OPERATOR_TIMEOUT_S
from shared.block_service.store_nodes import Answer, StoreNodes, ask_all
from shared.errors import InvalidRequest, NotFound, StoreUnavailable, TandemError, WorkerLost
from shared.kv.hashing import chain
from shared.kv.rendezvous import by_keeper
from shared.kv_index.client import KVStoreClient
from shared.kv_index.holders import join_hashes
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc, kvstore_pb2

_PROBES = ("a", "1")
"""Two user messages that begin with different tokens: the tokens that their prompts share are the system prompt's."""


class PrefixReader:
    """Tokenizes a prefix in the same way as a request that begins with it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def token_ids(self, request: cache_pb2.PinPrefixRequest) -> list[int]:
        """The prefix's tokens. Raises InvalidRequest naming the field."""
        match request.WhichOneof("prefix"):
            case "text":
                return list(self._tokenizer.encode(request.text))
            case "tokens":
                return self._checked(list(request.tokens.ids))
            case "chat":
                return self._render([{"role": m.role, "content": m.content} for m in request.chat.messages])
            case "system":
                system = {"role": "system", "content": request.system}
                return _common(*(self._render([system, {"role": "user", "content": probe}]) for probe in _PROBES))
            case _:
                raise InvalidRequest("prefix is missing: set text, tokens, chat or system", field="prefix")

    def _render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False))

    def _checked(self, token_ids: list[int]) -> list[int]:
        limit = self._tokenizer.vocab_size
        if token_ids and max(token_ids) >= limit:
            raise InvalidRequest(
                f"prefix: token id {max(token_ids)} is outside the vocabulary of {limit}",
                field="prefix",
                limit=limit - 1,
            )
        return token_ids


def _common(first: list[int], second: list[int]) -> list[int]:
    """The longest common prefix."""
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return first[:same]


logger = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.CacheService"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model, as far as its cache goes."""

    names: ModelNames
    fleet: Fleet
    reader: PrefixReader
    stores: tuple[str, ...]
    """The names of its store nodes."""


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Operates on index, store nodes and workers for an administrator. Every call needs an admin API key."""

    def __init__(
        self,
        models: Sequence[CachedModel],
        index: KVStoreClient | None,
        nodes: StoreNodes,
        tenants: Mapping[str, TenantCounts],
        settings: EdgeSettings,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
    ) -> None:
        """Does not close its arguments. `models`: at least one; the first is that of a prefix without a model's name.
        `nodes`: of all models. `credentials` and `token` as in `BlockClient`."""
        self._models = models
        self._index = index
        self._nodes = nodes
        self._tenants = tenants
        self._settings = settings
        self._credentials = credentials
        self._token = token
        self._keys = ApiKeys.of(settings)

    def register(self, server: grpc.aio.Server) -> None:
        """The `register` of `RpcServer`."""
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self, server)

    async def GetCacheStats(  # noqa: N802
        self, request: cache_pb2.GetCacheStatsRequest, context: Context
    ) -> cache_pb2.CacheStats:
        """Statistics of the store nodes, the tenants and the index."""
        return await answer_admin(self._keys, self._stats, request, context)

    async def FlushCache(  # noqa: N802
        self, request: cache_pb2.FlushCacheRequest, context: Context
    ) -> cache_pb2.FlushCacheResponse:
        """Drops a tenant's blocks from the store nodes; without a tenant all blocks, also of the workers' pools."""
        return await answer_admin(self._keys, self._flush, request, context)

    async def PinPrefix(  # noqa: N802
        self, request: cache_pb2.PinPrefixRequest, context: Context
    ) -> cache_pb2.PinPrefixResponse:
        """Keeps a prefix's blocks on the store nodes until it is unpinned."""
        return await answer_admin(self._keys, self._pin, request, context)

    async def UnpinPrefix(  # noqa: N802
        self, request: cache_pb2.UnpinPrefixRequest, context: Context
    ) -> cache_pb2.UnpinPrefixResponse:
        """Ends a pin."""
        return await answer_admin(self._keys, self._unpin, request, context)

    async def _stats(self, _request: cache_pb2.GetCacheStatsRequest) -> cache_pb2.CacheStats:
        stats = cache_pb2.CacheStats()
        for answer in await self._nodes.ask_all(lambda _, client: client.stats()):
            stats.nodes.add(address=answer.address, failure=_reason(answer), stats=answer.value)
        for tenant, counts in self._tenants.items():
            stats.tenants.add(tenant=tenant, **asdict(counts))
        try:
            index = await self._known_index().stats()
        except TandemError as error:
            stats.index_failure = error.message
        else:
            stats.index.CopyFrom(kvstore_pb2.StoreStats(**asdict(index)))
        return stats

    async def _flush(self, request: cache_pb2.FlushCacheRequest) -> cache_pb2.FlushCacheResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        response = cache_pb2.FlushCacheResponse()
        for answer in await self._nodes.ask_all(lambda _, client: client.flush(tenant, OPERATOR_TIMEOUT_S)):
            response.nodes.add(address=answer.address, failure=_reason(answer), flushed=answer.value)
        if tenant is None:
            for answer in await self._flush_pools():
                response.workers.add(address=answer.address, failure=_reason(answer), flushed=answer.value)
            try:
                await self._known_index().rebuild()
                response.index_rebuilt = True
            except TandemError as error:
                response.index_failure = error.message
        return response

    async def _flush_pools(self) -> list[Answer[kvstore_pb2.FlushResponse]]:
        # Also workers without a session: they may be alive and keep their pools.
        pools = {
            link.address: BlockClient(link.address, credentials=self._credentials, token=self._token)
            for model in self._models
            for link in model.fleet.links
        }
        try:
            return await ask_all(pools, lambda _, client: client.flush(None, OPERATOR_TIMEOUT_S))
        finally:
            for client in pools.values():
                await client.close()

    async def _pin(self, request: cache_pb2.PinPrefixRequest) -> cache_pb2.PinPrefixResponse:
        model = self._model(request.model)
        self._require_nodes(model.stores)
        layout = model.fleet.layout
        if layout is None:
            raise WorkerLost("no worker has connected yet: the model's block size is not known")
        token_ids = model.reader.token_ids(request)
        tenant = request.tenant or "default"
        salt = chain_salt(self._settings.tenants, tenant, request.cache_salt)
        groups = layout.groups
        root = model.fleet.hash_root(salt, len(token_ids))
        hashes = chain(root, token_ids, layout.block_size, groups.size)
        if not hashes:
            raise InvalidRequest(
                f"the prefix has {len(token_ids)} tokens, less than one block of {layout.block_size}: nothing "
                "can be kept",
                field="prefix",
                limit=layout.block_size,
            )
        places = groups.seen_behind(len(hashes) // groups.size)
        kept = by_keeper(hashes, places, model.stores)
        requests = {
            name: kvstore_pb2.PinRequest(
                name=request.name,
                tenant=tenant,
                block_hashes=join_hashes([hashes[index] for index in indexes]),
                block_bytes=layout.block_bytes,
            )
            for name, indexes in kept.items()
        }
        answers = await self._nodes.ask_all(lambda name, client: client.pin(requests[name]), among=requests)
        if refused := next((answer.error for answer in answers if isinstance(answer.error, InvalidRequest)), None):
            # A prefix with missing blocks is of little use.
            await self._nodes.ask_all(lambda _, client: client.unpin(request.name), among=requests)
            raise refused
        response = cache_pb2.PinPrefixResponse(num_tokens=len(token_ids), num_blocks=len(places))
        for answer in answers:
            response.nodes.add(address=answer.address, failure=_reason(answer), pin=answer.value)
        return response

    async def _unpin(self, request: cache_pb2.UnpinPrefixRequest) -> cache_pb2.UnpinPrefixResponse:
        self._require_nodes(self._nodes.names)
        answers = await self._nodes.ask_all(lambda _, client: client.unpin(request.name))
        if all(isinstance(answer.error, NotFound) for answer in answers):
            raise NotFound(f"there is no pin {request.name!r}", field="name", value=request.name)
        response = cache_pb2.UnpinPrefixResponse()
        for answer in answers:
            if not isinstance(answer.error, NotFound):
                response.nodes.add(address=answer.address, failure=_reason(answer), pin=answer.value)
        return response

    def _model(self, name: str) -> CachedModel:
        """Raises NotFound (`model`)."""
        for model in self._models:
            if model.names.include(name):
                return model
        self._models[0].names.check(name, "")
        return self._models[0]

    def _require_nodes(self, names: Sequence[str]) -> None:
        if not names:
            raise StoreUnavailable("no store node is configured: `tandem serve --store-host-bytes …` starts one")

    def _known_index(self) -> KVStoreClient:
        if self._index is None:
            raise StoreUnavailable("the router has no index: its setting kvstore is empty")
        return self._index


def _reason(answer: Answer[Any]) -> str:
    return answer.error.message if answer.error is not None else ""
