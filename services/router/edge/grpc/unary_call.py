"""One call of a client or an administrator: its key is checked, its errors are typed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc.aio

from services.router.edge.tenants.auth import ApiKeys
from shared.errors import Internal, TandemError
from shared.rpc.errors import abort

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
T = TypeVar("T")


async def answer_admin(
    keys: ApiKeys,
    work: Callable[[RequestT], Awaitable[T]],
    request: RequestT,
    context: grpc.aio.ServicerContext[Any, Any],
) -> T:
    """As `answer_client`, but without an admin key where keys are set it ends with Unauthenticated."""
    return await answer_client(keys.check_admin, work, request, context)


async def answer_client(
    check: Callable[[str | None], object],
    work: Callable[[RequestT], Awaitable[T]],
    request: RequestT,
    context: grpc.aio.ServicerContext[Any, Any],
) -> T:
    """What `work` makes of the request. Ends the call with the TandemError that `check` raises for its key, or `work`;
    anything else is a bug and becomes Internal, without a word of what gRPC would send by itself: all of its text."""
    try:
        check(_key_of(context))
        return await work(request)
    except Exception as error:
        await _fail(context, error)


async def stream_admin(
    keys: ApiKeys,
    work: Callable[[AsyncIterator[RequestT]], AsyncIterator[T]],
    requests: AsyncIterator[RequestT],
    context: grpc.aio.ServicerContext[Any, Any],
) -> AsyncIterator[T]:
    """As `answer_admin`, of a call whose messages stream both ways."""
    try:
        keys.check_admin(_key_of(context))
        async for message in work(requests):
            yield message
    except Exception as error:
        await _fail(context, error)


def _key_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    key = dict(context.invocation_metadata() or ()).get("authorization")
    return key if isinstance(key, str) else None


async def _fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, TandemError):
        await abort(context, error)
    logger.error("a call failed", exc_info=error)
    await abort(context, Internal(f"internal error ({type(error).__name__})"))
