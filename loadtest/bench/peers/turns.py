"""Loaded engines that take turns: one process each, one task at a time, the order turned by one each round."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from loadtest.bench.peers.contestant import random_prompt

PAUSE_S = 0.3
"""Before each turn: threads of the one before, which spin for a while after their last work, have gone to sleep."""


class CannotRun(Exception):
    """Why an engine gives no figures here."""


class Process:
    """One engine's process. `start` returns when the model is loaded."""

    def __init__(self, name: str, python: Path, folder: Path, scratch: Path, num_threads: int) -> None:
        self.name = name
        self.description = ""
        self._command = [str(python), "-m", "loadtest.bench.peers.worker", name, str(folder), str(scratch)]
        self._num_threads = num_threads
        self._scratch = scratch
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Raises CannotRun, with the engine's own reason."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        with (self._scratch / f"{self.name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [*self._command, str(self._num_threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.description = self._receive("ready")

    def ask(self, **task: Any) -> Any:
        """What it measured. Raises CannotRun."""
        assert self._process is not None, "start() was not called"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CannotRun(f"its process ended, see {self._scratch / self.name}.log") from None
        return self._receive("value")

    def close(self) -> None:
        """Ends the process; twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, key: str) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotRun(f"its process ended, see {self._scratch / self.name}.log")
        message = json.loads(line)
        if "failed" in message:
            raise CannotRun(message["failed"])
        return message[key]


@dataclass(frozen=True)
class Case:
    """One figure to be measured: a prompt's length, or a batch of sequences that decode behind `context` tokens."""

    name: str
    num_prompts: int
    prompt_len: int
    num_steps: int = 0  # 0: the prompt alone

    @property
    def tokens(self) -> int:
        """Tokens in the time that a turn returns."""
        return self.num_prompts if self.num_steps else self.prompt_len

    def task(self, generator: random.Random) -> dict[str, Any]:
        """For `Process.ask`, with fresh prompts."""
        prompts = [random_prompt(self.prompt_len, generator) for _ in range(self.num_prompts)]
        if self.num_steps:
            return {"op": "decode", "prompts": prompts, "num_steps": self.num_steps}
        return {"op": "prefill", "prompt": prompts[0]}


@dataclass
class Measured:
    """Tokens a second of each engine, round by round."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, ours: str, peer: str) -> float:
        """Median over rounds of ours / peer, both of the same round."""
        return median(a / b for a, b in zip(self.rates[ours], self.rates[peer], strict=True))


def take_turns(
    processes: list[Process],
    cases: list[Case],
    num_rounds: int,
    on_round: Callable[[Measured], None] | None = None,
) -> tuple[list[Measured], dict[str, str]]:
    """Every case, `num_rounds` times, by every engine after one turn to warm up; `on_round` hears of each round.

    Returns the figures, and engine → reason for those that failed on the way: their figures are left out.
    """
    generator = random.Random(0)
    failures: dict[str, str] = {}
    results = []
    for case in cases:
        measured = Measured(case)
        for index in range(num_rounds + 1):
            for process in _rotated(processes, index):
                if process.name in failures:
                    continue
                time.sleep(PAUSE_S)
                try:
                    seconds = process.ask(**case.task(generator))
                except CannotRun as reason:
                    failures[process.name] = f"{case.name}: {reason}"
                    continue
                if index > 0:
                    measured.rates.setdefault(process.name, []).append(case.tokens / seconds)
            if on_round is not None:
                on_round(measured)
        results.append(measured)
    for measured in results:
        for name in failures:
            if len(measured.rates.get(name, [])) < num_rounds:
                measured.rates.pop(name, None)
    return results, failures


def _rotated(processes: list[Process], by: int) -> list[Process]:
    start = by % len(processes)
    return processes[start:] + processes[:start]
