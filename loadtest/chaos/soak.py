"""`python -m loadtest.chaos.soak`: a part is killed every few seconds, in turn, under clients that ask without end.

One part of each kind is spared, so that there is something whose memory can be watched for long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import psutil

from loadtest.chaos.cluster import ChaosCluster, chaos_cluster
from loadtest.chaos.streams import Stream, ask, prompts, undisturbed
from loadtest.rig.command_line import Option, run
from loadtest.rig.markdown import bold, table
from loadtest.rig.results import write_text
from shared.errors import ConfigError

NUM_MEANS = 10
"""Samples a second apart depend on each other; the means of this number of stretches nearly do not."""
TWO_SIDED_95 = 2.306
"""Student's t for 95 % with NUM_MEANS - 2 degrees of freedom."""
FLAT_MIB_A_MINUTE = 1.0
"""Growth that is more than this for certain is a leak."""
AGE_STEP_S = 5.0
"""Ages at which lives are compared are multiples of this."""

Sample = tuple[float, float]
"""Age of the process in seconds, resident MiB."""


@dataclass(frozen=True, slots=True)
class Growth:
    """MiB a minute, by least squares over the means of NUM_MEANS stretches."""

    slope: float
    error: float
    """Half the width of the interval that holds the true slope with 95 %."""

    @property
    def flat(self) -> bool:
        """Whether growth above FLAT_MIB_A_MINUTE is not certain."""
        return self.slope - self.error <= FLAT_MIB_A_MINUTE

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.error:.2f}"


class Memory:
    """Resident memory of parts by name; each process id is a life of its own."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))

    def sample(self, pids: dict[str, int], now: float) -> None:
        """Takes one sample of each part, with its age; parts that have just died are passed over."""
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                age = now - process.create_time()
                if resident := process.memory_info().rss:  # 0: dead, and not yet waited for
                    self._lives[name][pid].append((age, resident / 2**20))
            except psutil.Error:
                continue

    def spared(self, names: Collection[str]) -> dict[str, tuple[Sequence[Sample], Growth | None]]:
        """The samples of those that lived all the time, with their growth in the second half: by then the pools, which
        are touched block by block, have been touched. A part that died after all is left out."""
        lives = {name: list(self._lives[name].values()) for name in names if name in self._lives}
        return {name: (one[0], growth(second_half(one[0]))) for name, one in lives.items() if len(one) == 1}

    def died(self, spared: Collection[str]) -> list[str]:
        """Which of those have had more than one life."""
        return sorted(name for name in spared if len(self._lives.get(name, ())) > 1)

    def killed(self, spared: Collection[str]) -> dict[str, tuple[float, list[float]]]:
        """For each part that was killed an age in seconds, and the size in MiB that each of its lives had at it."""
        others = {name: list(lives.values()) for name, lives in self._lives.items() if name not in spared}
        return {name: at_equal_age(lives) for name, lives in others.items() if lives}


def second_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples of the second half of the time."""
    middle = (samples[0][0] + samples[-1][0]) / 2 if samples else 0.0
    return [sample for sample in samples if sample[0] >= middle]


def growth(samples: Sequence[Sample]) -> Growth | None:
    """None where there are too few samples."""
    size = len(samples) // NUM_MEANS
    if size < 2:
        return None
    stretches = [samples[number * size : (number + 1) * size] for number in range(NUM_MEANS)]
    points = [(fmean(age for age, _ in each) / 60, fmean(mib for _, mib in each)) for each in stretches]
    middle = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread
    rest = sum((y - middle[1] - slope * (x - middle[0])) ** 2 for x, y in points)
    return Growth(slope, TWO_SIDED_95 * (rest / (NUM_MEANS - 2) / spread) ** 0.5)


def at_equal_age(lives: Sequence[Sequence[Sample]]) -> tuple[float, list[float]]:
    """The oldest age that all lives but the last reached, and the size at it of each life that reached it."""
    ends = [life[-1][0] for life in lives]
    age = min(ends[:-1] or ends) // AGE_STEP_S * AGE_STEP_S
    return age, [next(mib for when, mib in life if when >= age) for life in lives if life[-1][0] >= age]


def report(memory: Memory, spared: Collection[str]) -> str:
    """The memory of spared and of killed parts, as tables in Markdown."""
    living = [
        (
            name,
            f"{samples[0][1]:.0f}",
            f"{samples[-1][1]:.0f}",
            bold(str(found or "too short"), bool(found and not found.flat)),
        )
        for name, (samples, found) in sorted(memory.spared(spared).items())
    ]
    dying = [
        (name, f"{age:.0f}", str(len(sizes)), ", ".join(f"{mib:.0f}" for mib in sizes))
        for name, (age, sizes) in sorted(memory.killed(spared).items())
    ]
    return "\n".join(
        (
            *(f"- {name} was spared, and died\n" for name in memory.died(spared)),
            table(("spared", "MiB at first", "at the end", "second half, MiB a minute (95 %)"), living),
            "",
            table(("killed", "age, s", "lives", "MiB at that age, life by life"), dying, left=(0, 3)),
        )
    )


NUM_CLIENTS = 20
SAMPLE_S = 1.0
SPARED = "router, prefill-0, decode-0, kvstore"
OURSELVES = "supervisor and clients"
"""The supervisor runs in the process of the clients."""


@dataclass(slots=True)
class Tally:
    """What the clients saw so far."""

    num_answers: int = 0
    lost: int = 0
    wrong: int = 0
    num_reconnects: int = 0
    longest_pause_s: float = 0.0
    errors: set[str] = field(default_factory=set)

    def add(self, stream: Stream, expected: list[int]) -> None:
        """Counts one answer."""
        self.num_answers += 1
        self.num_reconnects += stream.num_reconnects
        self.longest_pause_s = max(self.longest_pause_s, stream.longest_gap_s)
        if stream.error or len(stream.tokens) != len(expected):
            self.lost += 1
            self.errors.add(stream.error)
        self.wrong += stream.tokens != expected[: len(stream.tokens)]


class Soak:
    """One soak over one started cluster."""

    def __init__(self, cluster: ChaosCluster, spared: Collection[str], *, resuming: bool) -> None:
        """The `spared` parts are not killed. Raises ConfigError where there is none of such a name, or none is left."""
        parts = {*cluster.local.children, "redis"}
        if unknown := sorted({*spared} - parts):
            raise ConfigError(f"no part is named {unknown[0]!r}: {', '.join(sorted(parts))}", field="spare")
        if not parts - {*spared}:
            raise ConfigError("all parts are spared: nothing is left to be killed", field="spare")
        self.spared = {*spared, OURSELVES}
        self.tally = Tally()
        self.memory = Memory()
        self.num_kills = 0
        self._cluster = cluster
        self._resuming = resuming
        self._texts = prompts(NUM_CLIENTS)
        self._expected: list[list[int]] = []

    async def run(self, duration_s: float, interval_s: float) -> None:
        """Learns the answers undisturbed, then kills for `duration_s` seconds. Raises Internal where that fails."""
        calm = await undisturbed(self._cluster.targets, self._texts, "calm")
        self._expected = [stream.tokens for stream in calm]
        end = time.monotonic() + duration_s
        sampling = asyncio.create_task(self._sample())
        killing = asyncio.create_task(self._kill(end, interval_s))
        await asyncio.gather(*(self._ask(number, end) for number in range(NUM_CLIENTS)))
        await killing
        sampling.cancel()

    async def leaked(self) -> int:
        """Blocks that stay held when all is over; -1 where the cluster does not come back."""
        return -1 if await self._cluster.until_whole() is None else await self._cluster.num_leaked()

    async def _ask(self, number: int, end: float) -> None:
        turn = 0
        while time.monotonic() < end:
            turn += 1
            salt = f"{number}-{turn}"
            (one,) = await ask(self._cluster.targets, [self._texts[number]], salt, resuming=self._resuming)
            self.tally.add(one, self._expected[number])

    async def _kill(self, end: float, interval_s: float) -> None:
        victims = [name for name in self._pids() if name not in self.spared]
        while time.monotonic() + interval_s < end:
            await asyncio.sleep(interval_s)
            name = victims[self.num_kills % len(victims)]
            pid = self._pids()[name]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # the last kill of a slow one
                continue
            finally:
                self.num_kills += 1

    async def _sample(self) -> None:
        while True:
            self.memory.sample(self._pids(), time.time())
            await asyncio.sleep(SAMPLE_S)

    def _pids(self) -> dict[str, int]:
        pids = {name: child.pid for name, child in self._cluster.local.children.items()}
        return {**pids, "redis": self._cluster.local.index_pid or 0, OURSELVES: os.getpid()}


def main(
    duration: Annotated[float, Option(help="seconds of kills")] = 600.0,
    interval: Annotated[float, Option(help="seconds between two kills")] = 10.0,
    out: Annotated[Path | None, Option(help="file for the result, in Markdown", writes="file")] = None,
    model: Annotated[Path, Option(help="model folder")] = Path("models/demo"),
    folder: Annotated[Path, Option(help="where logs go")] = Path(".tandem/soak"),
    resuming: Annotated[bool, Option(help="clients ask again where their connection broke")] = True,
    spare: Annotated[str, Option(help="parts that are never killed, with commas; empty = none")] = SPARED,
) -> None:
    """Kills all parts but the spared ones in turn, and reports what the clients lost and how memory grew. Status 1
    where an answer was lost or wrong, a block leaked, or a spared part or this process died or grew for certain."""
    spared = [name.strip() for name in spare.split(",") if name.strip()]
    text, good = asyncio.run(_soak(duration, interval, model, folder, spared, resuming))
    print(text)
    if out is not None:
        write_text(out, f"{text}\n")
    if not good:
        sys.exit(1)


async def _soak(
    duration: float, interval: float, model: Path, folder: Path, spared: Collection[str], resuming: bool
) -> tuple[str, bool]:
    """The report, and whether nothing but pauses is in it."""
    async with chaos_cluster(model, folder) as cluster:
        soak = Soak(cluster, spared, resuming=resuming)
        await soak.run(duration, interval)
        leaked = await soak.leaked()
    tally = soak.tally
    watched = soak.memory.spared(soak.spared).values()
    held = not soak.memory.died(soak.spared) and all(found is None or found.flat for _, found in watched)
    lines = (
        f"soak SIGKILL {interval:g}s: {tally.lost}|{tally.wrong}|{leaked}|{tally.longest_pause_s:.2f} s",
        "",
        f"{tally.num_answers} answers, {soak.num_kills} kills in {duration:g} s, {tally.num_reconnects} reconnects.",
        *(f"- lost: {error}" for error in sorted(tally.errors)),
        "",
        report(soak.memory, soak.spared),
    )
    return "\n".join(lines), held and not (tally.lost or tally.wrong or leaked)


if __name__ == "__main__":
    run(main, name="python -m loadtest.chaos.soak")
