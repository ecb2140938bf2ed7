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
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.errors import TandemError
from shared.rpc.convert import worker_roles
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tandem import AsyncTandemClient
from tandem_cli.console import console_of, share, table_of
from tandem_cli.options import LOCAL, Connection
from tandem_cli.status import adapters, preference, right_guesses, split_line

_PIPED_WIDTH = 120
_QUIT = ("q", "Q", "\x1b", "\x03")
TITLES = {
    "prefill_compute": "prefill compute",
    "decode_step": "decode step",
    "kv_room": "KV room",
    "transfer": "transfer",
    "queueing": "queueing",
    "router": "router",
    "client": "client",
    "failure": "failure",
}
_BAR = 24
_NARROW = 92
"""Width in columns below which the blocks are shown as numbers."""
_WIDE = 132
"""Width in columns from which right guesses are shown by method."""


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
    """Set once a key that quits is pressed. A thread reads the keys, one at a time."""
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


class Steps:
    """Each worker's mean step time between two looks."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float, float]] = {}

    def mean_ms(self, name: str, load: types_pb2.Load) -> float:
        """Mean step time since the last frame, or since the start in the first one; of an idle worker the last known;
        0: none yet."""
        num_steps, busy_s, known_ms = self._before.get(name, (0, 0.0, 0.0))
        if load.num_steps < num_steps:  # another process
            num_steps, busy_s = 0, 0.0
        if load.num_steps > num_steps:
            known_ms = 1e3 * (load.busy_s - busy_s) / (load.num_steps - num_steps)
        self._before[name] = (load.num_steps, load.busy_s, known_ms)
        return known_ms


class Frame:
    """A rich renderable that fits itself to the terminal's width."""

    def __init__(self, status: inference_pb2.ClusterStatus, steps: Steps) -> None:
        self._status = status
        self._step_ms = {
            worker.worker.name: steps.mean_ms(worker.worker.name, worker.load) for worker in status.workers
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Group(*self._parts(options.max_width))

    def _parts(self, width: int) -> list[RenderableType]:
        status = self._status
        parts: list[RenderableType] = [_head(status), Text("")]
        if status.HasField("flow"):
            parts += [_flow(status, width), Text("")]
        if status.HasField("window"):
            parts += [*_goodput(status.window), Text(""), *_causes(status.window, width)]
            if status.window.HasField("split"):
                parts.append(Text.assemble(("split     ", "dim"), better_split(status.window.split)))
            parts.append(Text(""))
        splits = [status.split] if status.HasField("split") else []
        splits += [model.split for model in status.models if model.HasField("split")]
        parts += [Text(split_line(split), style="dim") for split in splits]
        if status.workers:
            parts.append(self._workers(width))
        parts += [Text(f"▲ {what}", style="yellow") for what in status.degraded]
        return parts

    def _workers(self, width: int) -> Table:
        wide = width >= _NARROW
        guessed = (
            ("right guesses" if width >= _WIDE else "guesses",)
            if any(worker.load.guesses for worker in self._status.workers)
            else ()
        )
        held = ("adapters",) if any(worker.num_adapters for worker in self._status.workers) else ()
        prefers = ("prefers",) if any(worker.preference for worker in self._status.workers) else ()
        rows = [
            (
                worker.worker.name,
                worker_roles(worker),
                *((preference(worker),) if prefers else ()),
                _state(worker),
                *(_figures(worker.load, self._step_ms[worker.worker.name]) if worker.connected else ("", "", "")),
                *(((right_guesses if width >= _WIDE else _all_right_guesses)(worker.load),) if guessed else ()),
                *((adapters(worker),) if held else ()),
                _blocks(worker.load, wide=wide) if worker.connected else Text(""),
            )
            for worker in self._status.workers
        ]
        blocks = "KV blocks: █ in use ▒ cached ░ empty" if wide else "blocks"
        text = ("worker", "role", *prefers, "state", blocks)
        return table_of((*text[:-1], "run", "wait", "step", *guessed, *held, blocks), rows, text, header_style="dim")


def _all_right_guesses(load: types_pb2.Load) -> str:
    num_guessed = sum(of.num_tokens for of in load.guesses)
    return share(sum(of.num_accepted for of in load.guesses), num_guessed) if num_guessed else ""


def _head(status: inference_pb2.ClusterStatus) -> Text:
    names = [model.name for model in status.models] or [status.model_name]
    state = ("● ready", "green") if status.ready else (f"✕ not ready: {status.not_ready_reason}", "red")
    facts = " · ".join(filter(None, (status.router_name, status.mode)))
    return Text.assemble(("tandem ", "bold"), (", ".join(names), "bold cyan"), f"  {facts}  ", state)


def _flow(status: inference_pb2.ClusterStatus, width: int) -> Text:
    flow = status.flow
    moving = flow.num_shipping
    parts = [
        ("queue", flow.num_queued + flow.num_reserved, "yellow"),
        ("prefill", flow.num_prefilling, "blue"),
        ("ship", moving, "magenta"),
        ("decode", flow.num_decoding, "green"),
    ]
    arrow = " ──▶ " if width >= _NARROW else " ▶ "
    text = Text()
    for place, (name, count, style) in enumerate(parts):
        text.append(arrow if place else "", style="dim")
        text.append(f"{name} ", style="dim")
        text.append(f"{count}", style=f"bold {style}" if count else "bold")
    return text


def _goodput(window: inference_pb2.GoodputWindow) -> list[Text]:
    share = f" ({100 * window.num_good / window.num_requests:.0f} %)" if window.num_requests else ""
    hits = f"{100 * window.num_cached_tokens / window.num_prompt_tokens:.0f} %" if window.num_prompt_tokens else "-"
    rate = window.num_output_tokens / window.window_s if window.window_s else 0.0
    return [
        Text.assemble(
            ("goodput ", "dim"), (f"{window.goodput:.2f} req/s", "bold"), share,
            (f"   of {window.num_requests} in {window.window_s:.0f} s", "dim"),
            ("   output ", "dim"), f"{rate:.0f} tokens/s", ("   prefix hits ", "dim"), hits,
        ),
        Text.assemble(*_latency("TTFT", window.ttft, window.ttft_target_ms), "   ",
                      *_latency("TPOT", window.tpot, window.tpot_target_ms)),
    ]  # fmt: skip


def _latency(name: str, found: inference_pb2.Percentiles, target_ms: float) -> list[tuple[str, str]]:
    style = "bold" if not target_ms else "bold green" if found.p95_ms <= target_ms else "bold red"
    mark = "" if not target_ms else " ✓" if found.p95_ms <= target_ms else " ✕"
    target = f" target {target_ms:g}" if target_ms else ""
    return [
        (f"{name} ", "dim"),
        (f"{found.p50_ms:.0f}", "bold"),
        (" p95 ", "dim"),
        (f"{found.p95_ms:.0f}{mark}", style),
        (f"{target} ms", "dim"),
    ]


def _causes(window: inference_pb2.GoodputWindow, width: int) -> list[Text]:
    if not window.num_requests:
        return [Text("no request has ended in this time", style="dim")]
    if window.binding:
        first = window.causes[0]
        binds = f"{TITLES.get(window.binding, window.binding)}: {first.num_lost} of {window.num_requests} lost"
        lines = [Text.assemble(("binds now ", "dim"), (binds, "bold red"))]
    else:
        lines = [Text.assemble(("binds now ", "dim"), ("nothing: no request was lost", "bold green"))]
    bar = _BAR if width >= _NARROW else _BAR // 2
    for cause in window.causes:
        if cause.num_lost or cause.time_share >= 0.005:
            filled = round(bar * cause.time_share) or (1 if cause.time_share else 0)
            lost = f"  {cause.num_lost} lost" if cause.num_lost else ""
            lines.append(
                Text.assemble(
                    f"  {TITLES.get(cause.cause, cause.cause):<16}",
                    ("█" * filled, "cyan"),
                    ("░" * (bar - filled), "dim"),
                    f" {100 * cause.time_share:3.0f} % of the time",
                    (lost, "red"),
                )
            )
    return lines


def better_split(split: inference_pb2.SplitVerdict) -> str:
    """Which split of the workers would have served the window better."""
    model = f"{split.model}: " if split.model else ""
    now = f"{split.num_decoding} of {split.num_workers} workers decoding"
    if not split.worth_it:
        return f"{model}{now} was about the best: headroom {split.headroom:.2f}"
    better = f"{split.best_decoding} of {split.num_workers} workers decoding"
    if split.best_decoding == split.num_workers:
        better = f"all {split.num_workers} workers prefilling and decoding"
    elif split.elastic:
        better += ", prompts beside answers (mode auto),"
    return f"{model}with {better} headroom would have been {split.best_headroom:.2f} instead of {split.headroom:.2f}"


def _state(worker: inference_pb2.WorkerStatus) -> Text:
    if not worker.connected:
        return Text("✕ lost", style="bold red")
    return Text("◐ draining", style="yellow") if worker.load.draining else Text("● up", style="green")


def _figures(load: types_pb2.Load, step_ms: float) -> tuple[str, str, str]:
    return f"{load.num_running}", f"{load.num_waiting}", f"{step_ms:.1f} ms" if step_ms else "-"


def _blocks(load: types_pb2.Load, *, wide: bool) -> Text:
    total, free = load.num_total_blocks, min(load.num_free_blocks, load.num_total_blocks)
    cached = min(load.num_cached_blocks, free)
    if not total:
        return Text("-")
    words = f"{total - free} of {total}"
    if not wide:
        return Text(words)
    used = round(_BAR * (total - free) / total) or (1 if free < total else 0)
    kept = min(_BAR - used, round(_BAR * cached / total))
    return Text.assemble(("█" * used, "blue"), ("▒" * kept, "blue"), ("░" * (_BAR - used - kept), "dim"), f" {words}")
