"""`tandem top`: the cluster, live in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from services.cli.options import LOCAL, Connection
from services.cli.tables import console_of
from services.cli.top_view import Frame, Steps
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2
from tandem import AsyncTandemClient

_PIPED_WIDTH = 120
_QUIT = ("q", "Q", "\x1b", "\x03")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two frames.")] = 1.0,
    window: Annotated[
        float, typer.Option("--window", min=1.0, max=3600.0, help="Seconds that goodput and its losses are over.")
    ] = 60.0,
    connection: Connection = LOCAL,
) -> None:
    """Show goodput, what binds it, and the workers, live; q quits."""
    client = connection.open(AsyncTandemClient)
    console = console_of(_PIPED_WIDTH)
    live = not once and sys.stdout.isatty() and sys.stdin.isatty()
    asyncio.run(_follow(client, console, every, window) if live else _once(client, console, window))


async def _once(client: AsyncTandemClient, console: Console, window_s: float) -> None:
    async with client:
        console.print(Frame(await client.status(window_s=window_s), Steps()))


async def _follow(client: AsyncTandemClient, console: Console, every_s: float, window_s: float) -> None:
    steps = Steps()
    async with client, _quit_key() as quit_pressed:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not quit_pressed.is_set():
                live.update(await _frame(client, steps, window_s), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(quit_pressed.wait(), every_s)


async def _frame(client: AsyncTandemClient, steps: Steps, window_s: float) -> Frame:
    """The router's status now, or a notice that it does not answer."""
    try:
        return Frame(await client.status(window_s=window_s), steps)
    except TandemError as error:
        return Frame(inference_pb2.ClusterStatus(not_ready_reason=str(error)), steps)


@contextlib.asynccontextmanager
async def _quit_key() -> AsyncIterator[asyncio.Event]:
    """An event that is set once a key that quits is pressed. A thread reads the keys, one at a time."""
    pressed, loop, ended = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

    def read() -> None:
        while not ended.is_set():
            if select.select([sys.stdin], [], [], 0.2)[0] and os.read(sys.stdin.fileno(), 1).decode("latin-1") in _QUIT:
                loop.call_soon_threadsafe(pressed.set)
                return

    with _single_keys():
        reader = threading.Thread(target=read, name="keys", daemon=True)
        reader.start()
        try:
            yield pressed
        finally:
            ended.set()
            await asyncio.to_thread(reader.join)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """The terminal gives each key at once, and shows none."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
