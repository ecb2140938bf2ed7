"""A local cluster that lives as long as the command that started it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.local.cluster import LocalCluster
from services.local.commands import ServiceCommands
from services.local.model_pools import ModelPools
from services.local.spec import ClusterSpec
from services.local.supervisor import Died, Restarted
from shared import process_events
from shared.errors import TandemError, WorkerLost
from tandem import AsyncTandemClient, Options
from tandem_cli import EXIT_INTERRUPTED
from tandem_cli.failures import report
from tandem_cli.split_view import print_summary

EXAMPLE_PROMPT = "In the beginning"
EXAMPLE_SAMPLING = Options(temperature=0.5, seed=1, max_tokens=40)
"""Cool enough to make sense and warm enough not to repeat itself; the same answer each time."""


class ProgressView:
    """A context manager that shows `update`s; the bars are removed on exit."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.fields[process]:<10}"),
            BarColumn(bar_width=28),
            TextColumn("{task.description}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def update(self, process: str, progress: process_events.Progress) -> None:
        """Shows a report of LocalCluster. Until its first progress event a process has an indeterminate bar."""
        if not self._console.is_terminal:
            if self._shown.get(process) != progress.text:
                self._shown[process] = progress.text
                self._console.print(f"{process}: {progress.text}", markup=False, soft_wrap=True)
            return
        if process not in self._tasks:
            self._tasks[process] = self._bars.add_task("", total=1.0, process=process)
        self._bars.update(self._tasks[process], completed=progress.fraction, description=progress.text, refresh=True)


class Foreground:
    """Starts a cluster, shows it, waits for Ctrl-C or SIGTERM, stops it. `run()` once, on the main thread."""

    def __init__(
        self, spec: ClusterSpec, console: Console, *, example: bool, commands: ServiceCommands | None = None
    ) -> None:
        """`example`: stream one answer when the cluster is up; `commands` as in LocalCluster."""
        self._spec = spec
        self._example = example
        self._console = console
        self._view = ProgressView(console)
        self._cluster = LocalCluster(spec, on_progress=self._view.update, commands=commands)
        self._stop = asyncio.Event()
        self._hurried = False

    async def run(self) -> int:
        """The command's exit status: 0 after a stop that was asked for, 130 where it came before the start ended, or
        once more while answers ran.

        Raises the TandemError that kept the cluster from starting, or ended it.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _run(self) -> int:
        try:
            status = await self._serve()
        finally:
            await self._cluster.stop()
            if self._stop.is_set():
                self._print("stopped")
        return EXIT_INTERRUPTED if self._hurried else status

    async def _serve(self) -> int:
        started_at = time.perf_counter()
        with self._view:
            if not await self._until_stop(self._cluster.start()):
                return EXIT_INTERRUPTED
        self._announce(time.perf_counter() - started_at)
        if not self._example or await self._until_stop(self._stream_example()):
            self._print("Serving. Ctrl-C stops the cluster.")
            await self._until_stop(self._watch())
        return 0

    def _on_signal(self) -> None:
        if self._hurried:
            self._cluster.kill()
        elif self._stop.is_set():
            self._hurried = True
            self._cluster.hurry()
            self._print("ending what runs; once more kills")
        else:
            self._stop.set()
            self._print("\nstopping when the running answers end; once more ends them now")

    async def _until_stop(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work`; False where a signal came first and it was cancelled."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _announce(self, took_s: float) -> None:
        spec, cluster = self._spec, self._cluster
        served = ", ".join(pools.name for pools in spec.pools)
        workers = "; ".join(map(_pools_text, spec.pools))
        self._print(f"Tandem serves {served} after {took_s:.1f} s: {workers}")
        for router in cluster.routers:
            self._print(f"  page        http://{router.http}/")
            self._print(f"  OpenAI API  http://{router.http}/v1")
            self._print(f"  gRPC        {router.grpc} (tandem.v1.InferenceService)")
        self._print(f"  logs        {cluster.spec.log_dir}/")

    async def _stream_example(self) -> None:
        """One answer, streamed the way a client sees it; a failure is shown and the cluster continues."""
        self._print("\nFor example:\n")
        self._write(EXAMPLE_PROMPT)
        try:
            async with AsyncTandemClient([self._cluster.grpc]) as client:
                stream = client.stream(EXAMPLE_PROMPT, **EXAMPLE_SAMPLING)
                answer = stream.answer
                async for delta in stream:
                    self._write(delta.text)
        except TandemError as error:
            self._print("")
            report(error)
            return
        self._print(" …\n" if answer.finish_reason == "length" else "\n")
        print_summary(self._console, answer)
        self._print("")

    async def _watch(self) -> None:
        """Shows each process that ends by itself, or is back. Returns never; raises WorkerLost where the last router
        stays away."""
        serving = {router.name for router in self._cluster.routers}
        while True:
            match await self._cluster.next_change():
                case Died(name, _, log_path, again_in_s) as death:
                    child = self._cluster.children.get(name)
                    tail = child.log_tail() if child is not None else ""
                    error = WorkerLost(str(death), process=name, log=str(log_path), log_tail=tail)
                    if name in serving and again_in_s is None:
                        serving.discard(name)
                        if not serving:
                            raise error
                    report(error)
                case Restarted() as back:
                    self._print(str(back))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def _pools_text(pools: ModelPools) -> str:
    if pools.mode == "collocated":
        return f"{pools.num_decode} decode, collocated"
    if pools.mode == "auto":
        return f"{len(pools.workers)} workers that prefill and decode"
    return f"{pools.num_prefill} prefill + {pools.num_decode} decode"
