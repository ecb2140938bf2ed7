"""`tandem cache`: what the fleet's cache holds, and what an operator may do to it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import grpc.aio
import typer

from shared.errors import InvalidRequest
from shared.rpc.pb.tandem.v1 import cache_pb2, cache_pb2_grpc
from shared.sizes import size
from tandem import AsyncTandemClient
from tandem_cli.cache_view import show
from tandem_cli.console import console_of, json_of
from tandem_cli.dataclass_options import spread
from tandem_cli.failures import EXIT_FAILED
from tandem_cli.generate import parse_token_ids
from tandem_cli.options import LOCAL, Connection

_PIPED_WIDTH = 240
_NAME_LEN = 32

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print the router's full reply as JSON.")]
TIMEOUT_S = 30.0


def build_cache_app() -> typer.Typer:
    """The commands under `tandem cache`."""
    app = typer.Typer(
        help="Look at the fleet's cache, empty it, keep prefixes in it.", no_args_is_help=True, rich_markup_mode=None
    )
    for command in (stats, flush, pin, unpin):
        app.command()(spread(command))
    return app


def stats(as_json: AsJson = False, connection: Connection = LOCAL) -> None:
    """Show the index, each store node's tiers, tenants and pins."""
    given = _call(connection, lambda client: client.stats())
    if as_json:
        print(json_of(given))
    else:
        show(console_of(_PIPED_WIDTH), given)


def flush(
    tenant: Annotated[str | None, typer.Option("--tenant", help="This tenant's blocks only.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    connection: Connection = LOCAL,
) -> None:
    """Drop all blocks from the store nodes and the workers' pools.

    Pinned blocks are dropped too; the pins remain and keep blocks that come back. The index is rebuilt. Running
    requests are not disturbed. With --tenant only the store nodes drop blocks, because a pool does not know the
    tenants of its blocks, and the index stays.
    """
    whose = f"tenant {tenant}'s blocks" if tenant is not None else "all tenants' blocks"
    places = "all store nodes" if tenant is not None else "all store nodes and workers"
    if not yes and not typer.confirm(f"Drop {whose} from {places} of {connection.target}?", err=True):
        print("nothing was dropped", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)
    done = _call(connection, lambda client: client.flush(tenant))
    if as_json:
        print(json_of(done))
    else:
        for node in (*done.nodes, *done.workers):
            dropped = f"{node.flushed.num_blocks} blocks, {size(node.flushed.num_bytes)} dropped"
            print(f"{node.address}: {node.failure or dropped}")
        if done.index_rebuilt:
            print("index: rebuilt; workers and store nodes publish what they hold within a few seconds")
        elif done.index_failure:
            print(f"index: {done.index_failure}")
        if not (done.nodes or done.workers):
            print("no store nodes: nothing to drop")
    _fail_if(any(node.failure for node in (*done.nodes, *done.workers)) or bool(done.index_failure))


def pin(
    prefix: Annotated[str, typer.Argument(help="The prefix; @FILE reads it from a file, - from stdin.")],
    name: Annotated[str, typer.Option("--name", help="The pin's name; by default the start of the prefix.")] = "",
    system: Annotated[bool, typer.Option("--system", help="The prefix is a system message.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Plain text: no chat template.")] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="The prefix is token ids, such as 1,15,9.")] = False,
    tenant: Annotated[str, typer.Option("--tenant", help="The prefix's tenant.")] = "default",
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="The cache_salt of its requests.")] = "",
    model: Annotated[str, typer.Option(help="Served name; empty = the first model.")] = "",
    as_json: AsJson = False,
    connection: Connection = LOCAL,
) -> None:
    """Keep a prefix's blocks in the store nodes.

    This covers blocks that are stored already and those stored later. Without --system, --raw or --token-ids the
    prefix is a user message, as `tandem generate` would send it.
    """
    if system + raw + token_ids > 1:
        raise InvalidRequest("--system, --raw and --token-ids exclude each other", field="prefix")
    text = _read(prefix)
    request = cache_pb2.PinPrefixRequest(name=name or _name_of(text), tenant=tenant, cache_salt=cache_salt, model=model)
    if token_ids:
        request.tokens.ids.extend(parse_token_ids(text))
    elif raw:
        request.text = text
    elif system:
        request.system = text
    else:
        request.chat.messages.add(role="user", content=text)
    done = _call(connection, lambda client: client.pin(request))
    if as_json:
        print(json_of(done))
    else:
        held = sum(node.pin.num_held for node in done.nodes)
        print(
            f"pinned {request.name!r}: {done.num_tokens} tokens, {done.num_blocks} blocks, {held} of them stored; "
            + ("all are kept" if held == done.num_blocks else "the rest are kept once a request produces them")
        )
        _print_failures(done.nodes)
    _fail_if(any(node.failure for node in done.nodes))


def unpin(
    name: Annotated[str, typer.Argument(help="The pin's name, as `tandem cache stats` shows it.")],
    as_json: AsJson = False,
    connection: Connection = LOCAL,
) -> None:
    """End a pin; its blocks stay until they are evicted."""
    done = _call(connection, lambda client: client.unpin(name))
    if as_json:
        print(json_of(done))
    else:
        print(f"unpinned {name!r}: {sum(node.pin.num_blocks for node in done.nodes)} blocks may be evicted")
        _print_failures(done.nodes)
    _fail_if(any(node.failure for node in done.nodes))


def _call(connection: Connection, ask: Callable[[CacheClient], Awaitable[T]]) -> T:
    async def run() -> T:
        client = connection.open(CacheClient)
        async with client:
            return await ask(client)

    return asyncio.run(run())


def _read(prefix: str) -> str:
    """Raises InvalidRequest for a file that cannot be read."""
    if prefix == "-":
        return sys.stdin.read()
    if not prefix.startswith("@"):
        return prefix
    try:
        return Path(prefix[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prefix cannot be read from {prefix[1:]}: {error}", field="prefix") from error


def _name_of(text: str) -> str:
    words = " ".join(text.split())
    return words[:_NAME_LEN].rstrip() or "prefix"


def _print_failures(nodes: Sequence[cache_pb2.PinnedNode]) -> None:
    for node in nodes:
        if node.failure:
            print(f"{node.address}: {node.failure}", file=sys.stderr)


def _fail_if(failed: bool) -> None:
    if failed:
        raise typer.Exit(EXIT_FAILED)


class CacheClient(AsyncTandemClient):
    """Raises like `AsyncTandemClient.ask`; NotFound for a pin that does not exist."""

    async def stats(self) -> cache_pb2.CacheStats:
        """Index, store nodes, tenants."""
        return await self._cache(lambda stub, **call: stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), **call))

    async def flush(self, tenant: str | None) -> cache_pb2.FlushCacheResponse:
        """Drops one tenant's blocks from the store nodes, or all blocks from store nodes and workers."""
        request = cache_pb2.FlushCacheRequest(tenant=tenant)
        return await self._cache(lambda stub, **call: stub.FlushCache(request, **call))

    async def pin(self, request: cache_pb2.PinPrefixRequest) -> cache_pb2.PinPrefixResponse:
        """Keeps a prefix."""
        return await self._cache(lambda stub, **call: stub.PinPrefix(request, **call))

    async def unpin(self, name: str) -> cache_pb2.UnpinPrefixResponse:
        """Ends a pin."""
        request = cache_pb2.UnpinPrefixRequest(name=name)
        return await self._cache(lambda stub, **call: stub.UnpinPrefix(request, **call))

    async def _cache(self, call: Callable[..., Awaitable[T]]) -> T:
        def at(channel: grpc.aio.Channel) -> Awaitable[T]:
            return call(cache_pb2_grpc.CacheServiceStub(channel), metadata=self.key, timeout=TIMEOUT_S)

        return await self.ask(at)
