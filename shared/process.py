"""How every process of Tandem runs: events for the launcher on stdout, logs on stderr, drain on SIGTERM.

stdout carries one JSON object a line and nothing else:

    {"event": "progress", "fraction": 0.4, "text": "loading weights"}       any number of times
    {"event": "ready", "address": "127.0.0.1:50070"}                        once, when the service serves; more
                                                                            addresses by name, where it has them
    {"event": "error", "kind": "ConfigError", "message": …, "field": …}     instead, when it cannot start

The log is text or JSON, as the settings say (shared/telemetry/logs.py).

Exit status: 0 after a drain, 2 when a TandemError prevented the start, 1 on a bug.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, runtime_checkable

import uvloop

from shared import failpoints
from shared.config import S, load_settings
from shared.errors import Internal, TandemError
from shared.telemetry.logs import set_up_logs

logger = logging.getLogger(__name__)

EXIT_BUG = 1
EXIT_REFUSED = 2
"""Exit status when the start failed for a reason that the operator can act on."""


class Service(Protocol):
    """A service that `run_service` runs."""

    @property
    def address(self) -> str:
        """host:port that it listens on."""

    @property
    def endpoints(self) -> Mapping[str, str]:
        """host:port of further listeners by name: the APIs where there are several, and `metrics`."""

    async def close(self) -> None:
        """Drains and frees everything; called once."""


@runtime_checkable
class HurriedService(Service, Protocol):
    """A service whose drain can be cut short."""

    def hurry(self) -> None:
        """While `close()` runs: it waits for no request any more. What runs ends with an error that its client sees."""


def ready_event(address: str, endpoints: Mapping[str, str]) -> None:
    """Reports that the service listens on `address`, and on `endpoints` by name."""
    _emit(event="ready", address=address, **endpoints)


def error_event(error: TandemError) -> None:
    """Reports why this process could not start."""
    _emit(event="error", kind=type(error).__name__, message=error.message, field=error.field)


def progress_event(fraction: float, text: str) -> None:
    """Reports the progress of the start; `fraction` in [0, 1]."""
    _emit(event="progress", fraction=round(min(max(fraction, 0.0), 1.0), 3), text=text)


def run_service(service: str, settings_class: type[S], start: Callable[[S], Awaitable[Service]]) -> int:
    """`run_process` of a service whose settings come from flags, environment and file; `start` gets them."""

    async def begin() -> Service:
        settings = load_settings(settings_class)
        set_up_logs(service, settings.log_format, settings.log_level)
        if faults := failpoints.check_allowed(settings.failpoints, production=settings.production):
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, failpoints.arm, faults)
        return await start(settings)

    return run_process(service, begin)


def run_process(service: str, start: Callable[[], Awaitable[Service]]) -> int:
    """Runs one service until SIGTERM or SIGINT and returns the process's exit status.

    `service` is its name in the log. `start` returns the service once it serves; it runs on the event loop and is
    cancelled when a signal comes first. A second signal ends the process without waiting for the drain: that of a
    `HurriedService` by cutting the drain short, and only a third one at once.
    """
    set_up_logs(service)  # for what happens before the settings are known
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(start))
    except TandemError as error:
        logger.error("cannot start: %s", error)
        error_event(error)
        return EXIT_REFUSED
    except Exception as error:
        logger.exception("a bug stopped the service")
        error_event(Internal(f"{type(error).__name__}: {error}"))
        return 1


async def _serve(start: Callable[[], Awaitable[Service]]) -> int:
    loop = asyncio.get_running_loop()
    this_task = asyncio.current_task()
    assert this_task is not None
    stop = asyncio.Event()
    service: Service | None = None

    def on_signal(signal_number: int) -> None:
        hurried = stop.is_set()
        logger.info("%s: %s", signal.Signals(signal_number).name, "no time to drain" if hurried else "draining")
        stop.set()
        if service is None:
            this_task.cancel()
        if isinstance(service, HurriedService):
            if not hurried:
                return  # one more signal is ours
            service.hurry()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        service = await start()
    except asyncio.CancelledError:
        if stop.is_set():
            return 0
        raise
    ready_event(service.address, service.endpoints)
    await stop.wait()
    await service.close()
    return 0


def _emit(**fields: object) -> None:
    print(json.dumps(fields, ensure_ascii=False), flush=True)
