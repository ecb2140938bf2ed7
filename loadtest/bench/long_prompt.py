"""`python -m loadtest.bench long-prompt`: the effect of arriving long prompts on the inter-token latency of others.

A steady batch of answers streams while long prompts arrive one after the other; windows with and without them alternate
within one batch, and the systems take turns.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil

from loadtest.baseline.systems import (
    Candidate,
    Hardware,
    System,
    adaptive,
    collocated,
    disaggregated,
    make_cluster,
)
from loadtest.clients.base import Call, Client, RequestFailed
from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.records import Reply
from loadtest.rig.command_line import Option, Out, choice, names
from loadtest.rig.measure import percentile, turns
from loadtest.rig.models import SERVED, write_model
from loadtest.rig.results import Report, Result
from loadtest.workloads.tokens import Span, TokenSource
from shared.errors import DeadlineExceeded, Internal

GOAL_RATIO = 1.1
"""Goal of all but the collocated systems: a long prompt changes the p99 of the running answers by less than 10 %."""
CHUNKS_PER_PROMPT = 8
SYSTEMS = (disaggregated(1, 2), adaptive(2), collocated(2), collocated(1))
_NUM_KV_BLOCKS = 8192
"""Blocks of all workers of a system together."""
_WORKERS = ("prefill", "decode", "worker")
"""How the names of the workers' processes begin."""
_ANSWER_PROMPT, _ANSWER = 64, 4000
"""Tokens of each answer's prompt, and most of an answer. A long prompt asks for one token only: more would measure a
larger batch, not an arrival."""
_START_S = 180.0
_POLL_S = 0.01
_SETTLE_S = 0.5
"""Pause after a batch starts and after a window's last long prompt: their work must not reach the next window."""
_NAMES = [system.name for system in SYSTEMS]


@dataclass(frozen=True, slots=True)
class Pair:
    """Measurements without and with long prompts in one batch of answers. Milliseconds."""

    quiet_p50_ms: float
    quiet_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    num_prompts: int
    """Long prompts that were answered."""
    prompt_ttft_ms: float
    """Median time to first token of the long prompts."""

    @property
    def p99_ratio(self) -> float:
        """p99 with long prompts over without: 1.1 is 10 % more."""
        return self.busy_p99_ms / self.quiet_p99_ms

    @property
    def p50_ratio(self) -> float:
        """Median ITL with long prompts over the median without."""
        return self.busy_p50_ms / self.quiet_p50_ms

    @staticmethod
    def of(quiet_s: Sequence[float], busy_s: Sequence[float], prompt_ttfts_s: Sequence[float]) -> Pair:
        """Made from the gaps of the windows; each needs at least one, and there must be a long prompt."""
        assert quiet_s, "no tokens arrived"
        assert busy_s, "no tokens arrived"
        return Pair(
            quiet_p50_ms=1e3 * percentile(quiet_s, 50),
            quiet_p99_ms=1e3 * percentile(quiet_s, 99),
            busy_p50_ms=1e3 * percentile(busy_s, 50),
            busy_p99_ms=1e3 * percentile(busy_s, 99),
            num_prompts=len(prompt_ttfts_s),
            prompt_ttft_ms=1e3 * median(prompt_ttfts_s),
        )


def median_of(pairs: Iterable[Pair], figure: str) -> float:
    """Median of the pairs' figures; of a ratio, the median of the pairs' ratios."""
    return float(median(map(attrgetter(figure), pairs)))


def gaps_within(begin_s: float, end_s: float, replies: Iterable[Reply]) -> list[float]:
    """The gaps between messages with tokens, over all answers, that begin and end in this window. Seconds."""
    gaps = []
    for reply in replies:
        times = [at_s for at_s in reply.token_times_s if begin_s <= at_s <= end_s]
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return gaps


@dataclass(slots=True)
class Load:
    """One system's client. `pair` measures once; calls must not overlap."""

    client: Client
    num_answers: int
    """Number of answers that stream all the time."""
    num_long_tokens: int
    """Tokens of a long prompt."""
    window_s: float
    tokens: TokenSource
    _numbers: count[int] = field(default_factory=count)

    async def pair(self, *, busy_first: bool) -> Pair:
        """Windows of both kinds in one batch of answers, then again in reverse order: answers grow, so a kind that was
        always last would look slow. Raises Internal if an answer ended too soon, DeadlineExceeded if none started."""
        ttfts_s: list[float] = []
        gaps_s: dict[bool, list[float]] = {False: [], True: []}
        async with self._batch() as replies:
            windows = []
            for is_busy in (busy_first, not busy_first, not busy_first, busy_first):
                begin_s = time.perf_counter()
                if is_busy:
                    ttfts_s += await self._long_prompts(begin_s + self.window_s / 2)
                else:
                    await asyncio.sleep(self.window_s / 2)
                windows.append((is_busy, begin_s, time.perf_counter()))
                await asyncio.sleep(_SETTLE_S)
        for is_busy, begin_s, end_s in windows:
            gaps_s[is_busy] += gaps_within(begin_s, end_s, replies)
        return Pair.of(gaps_s[False], gaps_s[True], ttfts_s)

    async def _long_prompts(self, until_s: float) -> list[float]:
        """Sends long prompts one after the other, none after `until_s`; returns their TTFTs, seconds."""
        ttfts_s = []
        while time.perf_counter() < until_s:
            reply = await self._ask(self.num_long_tokens, 1, Reply())
            assert reply.sent_s is not None
            ttfts_s.append(reply.token_times_s[0] - reply.sent_s)
        return ttfts_s

    @asynccontextmanager
    async def _batch(self) -> AsyncIterator[list[Reply]]:
        """A context in which all answers are streaming; they are cancelled at its end."""
        replies = [Reply() for _ in range(self.num_answers)]
        answers = [asyncio.create_task(self._ask(_ANSWER_PROMPT, _ANSWER, reply)) for reply in replies]
        try:
            try:
                async with asyncio.timeout(_START_S):
                    while not all(len(reply.token_times_s) > 1 for reply in replies):
                        await asyncio.sleep(_POLL_S)
                        _check(answers)
            except TimeoutError as error:
                raise DeadlineExceeded(f"the answers had not started after {_START_S:g} s") from error
            await asyncio.sleep(_SETTLE_S)
            yield replies
            _check(answers)
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def _ask(self, num_prompt_tokens: int, max_tokens: int, reply: Reply) -> Reply:
        name = f"lp-{self.tokens.seed}-{next(self._numbers)}"
        prompt = self.tokens.span(Span(name, num_prompt_tokens))
        await self.client.generate(self.client.encode(Call(name, prompt, max_tokens)), reply)
        return reply


def _check(answers: list[asyncio.Task[Reply]]) -> None:
    for answer in answers:
        if answer.done():
            error = answer.exception()
            if isinstance(error, RequestFailed):
                raise Internal(f"an answer failed: {error.failure.message}") from error
            raise Internal("an answer ended before the window did: the batch must not change") from error


def main(
    chunk: Annotated[int, Option(help=f"chunk budget, tokens; a long prompt has {CHUNKS_PER_PROMPT} of them")] = 128,
    answers: Annotated[int, Option(help="answers that stream all the time")] = 8,
    window: Annotated[float, Option(help="seconds without and with long prompts, in two halves each")] = 6.0,
    pairs: Annotated[int, Option(help="measurements of each system, in turns")] = 5,
    shape: Annotated[str, Option(help=f"random weights in this shape: {', '.join(SERVED)}")] = "xs",
    model: Annotated[Path | None, Option(help="a model's folder instead")] = None,
    tokenizer: Annotated[Path, Option(help="model whose tokenizer a shape takes")] = Path("models/demo"),
    systems: Annotated[str, Option(help="which to measure")] = " ".join(_NAMES),
    seed: Annotated[int, Option()] = 1,
    out: Out = None,
) -> None:
    """Measure inter-token latency of running answers, with and without arriving long prompts."""
    choice(shape, "shape", SERVED)
    wanted = names(systems, "systems", _NAMES)
    compared = [system for system in SYSTEMS if system.name in wanted]
    num_long_tokens = CHUNKS_PER_PROMPT * chunk

    def load(client: Client) -> Load:
        return Load(client, answers, num_long_tokens, window, TokenSource(seed))

    async def measure(folder: Path, scratch: Path) -> dict[str, list[Pair]]:
        """Pairs by system name. All systems run at once and are measured in turns, while the others idle."""
        measured: dict[str, list[Pair]] = {system.name: [] for system in compared}
        async with AsyncExitStack() as stack:
            loads, workers = {}, []
            for system in compared:
                hardware = Hardware(folder, "cpu", _NUM_KV_BLOCKS // system.num_workers)
                cluster = await stack.enter_async_context(make_cluster(Candidate(system, chunk), hardware, scratch))
                workers += [child.pid for name, child in cluster.children.items() if name.startswith(_WORKERS)]
                client = make_client(parse_target(f"grpc://{cluster.grpc}"))
                await client.start()
                stack.push_async_callback(client.close)
                loads[system.name] = load(client)
            _pin_all_but(workers)
            for each in loads.values():  # warm-up: one-time allocations and compilations
                await each.pair(busy_first=True)
            for turn, system in turns(compared, pairs):
                measured[system.name].append(await loads[system.name].pair(busy_first=turn % 2 == 1))
        return measured

    with tempfile.TemporaryDirectory(prefix="tandem-long-prompt-") as scratch:
        folder = model or write_model(Path(scratch) / f"random-{shape}", SERVED[shape], tokenizer)
        measured = asyncio.run(measure(folder, Path(scratch)))
    print(
        f"{answers} answers, prompts of {num_long_tokens} tokens one after the other, "
        f"chunks of {chunk}, {pairs} pairs of {window:g} s"
    )
    report = Report(out)
    report.add(results(compared, measured))
    report.print()


def _pin_all_but(workers: Collection[int]) -> None:
    """Pins this process and its descendants to the first core, except these workers and their descendants.

    Otherwise the router and the client would run on any free core: next to an idle prefill worker on its core, next to
    a busy one also on the decode worker's. The figure would then describe the machine, not the system.
    """
    core = sorted(os.sched_getaffinity(0))[:1]
    kept = set(workers)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            kept |= {child.pid for child in psutil.Process(worker).children(recursive=True)}
    me = psutil.Process()
    for pid in {me.pid, *(child.pid for child in me.children(recursive=True))} - kept:
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), core)


_FIGURES = (
    ("ITL p99 without long prompts", "quiet_p99_ms", "ms"),
    ("ITL p99 with long prompts", "busy_p99_ms", "ms"),
    ("ITL p99 with over without", "p99_ratio", ""),
    ("ITL p50 with over without", "p50_ratio", ""),
    ("TTFT p50 of the long prompts", "prompt_ttft_ms", "ms"),
    ("long prompts a pair", "num_prompts", "prompts"),
)
"""Name, field of a pair, unit."""


def results(systems: Sequence[System], measured: dict[str, list[Pair]]) -> list[Result]:
    """The figures for scripts; the best collocated system is the peer of the others."""
    ratios = {system.name: median_of(measured[system.name], "p99_ratio") for system in systems}
    peers = [system for system in systems if system.mode == "collocated"]
    peer = min(peers, key=lambda system: ratios[system.name], default=None)
    found = []
    for system in systems:
        for title, figure, unit in _FIGURES:
            result = Result(f"{system.name}: {title}", median_of(measured[system.name], figure), unit)
            if figure == "p99_ratio" and system.mode != "collocated":
                result = replace(result, limit=GOAL_RATIO)
                if peer is not None:
                    result = replace(result, peer=peer.name, ratio=ratios[peer.name] / result.value)
            found.append(result)
    return found
