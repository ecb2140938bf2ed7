"""Engines in processes of their own, measured in turns on fresh prompts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from loadtest.bench.peers.adapter import PLAIN, random_prompt
from loadtest.rig.measure import turns
from shared.child_process import ChildProcess
from shared.errors import TandemError

PAUSE_S = 0.3
"""Pause before each turn, in seconds: the previous engine's threads spin for a while after their last work."""
START_S = 3600.0
"""Start timeout in seconds; an engine may convert the checkpoint first."""
END_S = 20.0


class CannotRun(Exception):
    """The engine cannot run here; the message gives the reason."""


class EngineProcess:
    """One engine's process. `start` returns when the model is loaded."""

    def __init__(
        self,
        name: str,
        python: Path,
        folder: Path,
        scratch: Path,
        num_threads: int,
        cpu_isa: str = "auto",
        environment: Mapping[str, str] | None = None,
        form: str = PLAIN,
        guesses_by: str = "",
        draft: Path | None = None,
    ) -> None:
        """`python` is the interpreter of the engine's venv; its log is `scratch`/`name`.log, with the form of its
        weights where that is not plain, and how it guesses, as in its name. The others as in `Settings`."""
        command = [
            str(python), "-m", "loadtest.bench.peers.engine_process", name, str(folder), str(scratch), str(num_threads),
            cpu_isa, form, guesses_by, str(draft or ""),
        ]  # fmt: skip
        self.name = name = " ".join(filter(None, (named(name, form), guesses_by)))
        self.description = ""
        self._child = ChildProcess(name, command, scratch / f"{name}.log", environment=environment, takes_requests=True)

    async def start(self) -> None:
        """Raises CannotRun, with the engine's own reason."""
        await self._child.start()
        with _as_cannot_run():
            await self._child.ready(START_S)
        self.description = str(await self.ask(op="describe"))

    async def ask(self, **task: Any) -> Any:
        """The task's result; see engine_process.py for the tasks. Raises CannotRun."""
        with _as_cannot_run():
            return await self._child.ask(**task)

    async def close(self) -> None:
        """Ends the process; idempotent."""
        self._child.kill()
        await self._child.stop(END_S)

    async def __aenter__(self) -> EngineProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def named(engine: str, form: str) -> str:
    """An engine with weights of some form."""
    return engine if form == PLAIN else f"{engine} {form}"


@contextmanager
def _as_cannot_run() -> Iterator[None]:
    try:
        yield
    except TandemError as error:
        raise CannotRun(f"{error.message}, see {error.details.get('log')}") from None


@dataclass(frozen=True)
class Case:
    """One figure to be measured: a prompt's length, or a batch of sequences that decode after a context."""

    name: str
    num_prompts: int
    prompt_len: int
    num_steps: int = 0  # 0: only the prompts
    embeds: bool = False
    """The prompts are embedded, all at once; their lengths are a quarter of `prompt_len` to seven quarters."""

    @property
    def tokens(self) -> int:
        """Tokens computed in the time that a turn returns."""
        return self.num_prompts if self.num_steps else self.num_prompts * self.prompt_len

    def task(self, generator: random.Random) -> dict[str, Any]:
        """The arguments of `EngineProcess.ask`, with fresh prompts."""
        prompts = [random_prompt(length, generator) for length in self._lengths()]
        if self.embeds:
            generator.shuffle(prompts)
            return {"op": "embed", "prompts": prompts}
        if self.num_steps:
            return {"op": "decode", "prompts": prompts, "num_steps": self.num_steps}
        return {"op": "prefill", "prompt": prompts[0]}

    def _lengths(self) -> list[int]:
        """Lengths of the prompts; their mean is `prompt_len`."""
        if not self.embeds or self.num_prompts == 1:
            return [self.prompt_len] * self.num_prompts
        apart = 1.5 * self.prompt_len / (self.num_prompts - 1)
        lengths = [round(0.25 * self.prompt_len + apart * place) for place in range(self.num_prompts)]
        return [*lengths[:-1], self.num_prompts * self.prompt_len - sum(lengths[:-1])]


@dataclass
class Measured:
    """Tokens a second of each engine, round by round."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)


async def take_turns(
    processes: Sequence[EngineProcess],
    cases: list[Case],
    num_rounds: int,
    on_round: Callable[[Measured], None] | None = None,
) -> tuple[list[Measured], dict[str, str]]:
    """Measures every case with every engine `num_rounds` times after a warm-up turn; calls `on_round` after each round.

    Returns the figures, and engine → reason for those that failed, whose figures are left out.
    """
    generator = random.Random(0)
    failures: dict[str, str] = {}
    results = []
    for case in cases:
        measured = Measured(case)
        for place, (number, process) in enumerate(turns(processes, num_rounds + 1), 1):
            if process.name not in failures:
                await asyncio.sleep(PAUSE_S)
                try:
                    seconds = await process.ask(**case.task(generator))
                    if number > 0:
                        measured.rates.setdefault(process.name, []).append(case.tokens / seconds)
                except CannotRun as reason:
                    failures[process.name] = f"{case.name}: {reason}"
            if on_round is not None and place % len(processes) == 0:
                on_round(measured)
        results.append(measured)
    for measured in results:
        for name in failures:
            if len(measured.rates.get(name, [])) < num_rounds:
                measured.rates.pop(name, None)
    return results, failures
