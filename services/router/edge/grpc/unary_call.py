"""One unary call of a client or an administrator: its key is checked, its errors are typed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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
        metadata = dict(context.invocation_metadata() or ())
        key = metadata.get("authorization")
        check(key if isinstance(key, str) else None)
        return await work(request)
    except TandemError as error:
        await abort(context, error)
    except Exception as error:
        logger.exception("a call failed")
        await abort(context, Internal(f"internal error ({type(error).__name__})"))
