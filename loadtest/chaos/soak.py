"""`python -m loadtest.chaos.soak`: a part is killed every few seconds, in turn, under clients that ask without end.

One part of each kind is spared, so that there is something whose memory can be watched for long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from loadtest.chaos.cluster import ChaosCluster, chaos_cluster
from loadtest.chaos.memory import Memory, report
from loadtest.chaos.streams import Stream, ask, prompts, undisturbed
from loadtest.rig.command_line import Option, run
from loadtest.rig.results import write_text
from shared.errors import ConfigError

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
    out: Annotated[Path | None, Option(help="file for the result, in Markdown")] = None,
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
