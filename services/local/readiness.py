"""When a router serves prompts: its port opens at once, its sessions with the workers a moment later."""

from __future__ import annotations

import asyncio
import json

from shared.address import Address
from shared.child_process import ChildProcess
from shared.errors import DeadlineExceeded, WorkerLost

_POLL_S = 0.02


async def wait_until_serving(router: ChildProcess, http: str, timeout_s: float) -> None:
    """Returns once `GET /readyz` on the host:port `http` says so.

    Raises WorkerLost where the router ends meanwhile, DeadlineExceeded with the router's reason after `timeout_s`
    seconds.
    """
    reason = "it does not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while reason := await _not_ready_reason(http):
                if router.returncode is not None:
                    raise WorkerLost(
                        f"{router.name} ended before it served ({router.exit_text()})",
                        process=router.name,
                        log=str(router.log_path),
                        log_tail=router.log_tail(),
                    )
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{router.name} serves no prompts after {timeout_s:g} s: {reason}",
            process=router.name,
            log=str(router.log_path),
        ) from error


async def _not_ready_reason(http: str) -> str:
    """Empty when prompts are served, to every model."""
    server = Address.parse(http, "http")
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port)
    except OSError as error:
        return error.strerror or "it does not answer"
    try:
        writer.write(f"GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    try:
        page = json.loads(body)
        if head.split(b" ", 2)[1:2] == [b"200"]:
            return next((f"{name}: {why}" for name, why in page.get("models", {}).items() if why), "")
        return str(page["reason"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "no reason given"
