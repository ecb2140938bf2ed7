"""How a cluster's start looks: a bar for each process on a terminal, a line for each change elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shared import process_events


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
