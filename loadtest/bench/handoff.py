"""`python -m loadtest.bench gpu-handoff`: what requests with long prompts wait for the hand-off of their blocks.

A prefill and a decode worker share one device; prompts without a common prefix come one after the other. The *exposed*
part of a hand-off is what its request waits for it: the time between its first two tokens without the decode step, as
the router measures it. Beside it, the time to the first token (TTFT) of one worker that does both.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.cluster_smoke import DIRECT, IN_MEMORY, STAGED
from loadtest.bench.cluster_smoke import ways as ways_of
from loadtest.bench.kernels.limits import cuda_device
from loadtest.clients.base import Call, Client
from loadtest.records import Reply
from loadtest.rig.clients import started
from loadtest.rig.command_line import Option, Out, choice, names
from loadtest.rig.models import DEMO, ON_GPU, write_model
from loadtest.rig.results import Report, Result
from loadtest.workloads.tokens import Span, TokenSource
from services.local.cluster import LocalCluster
from shared.errors import ConfigError, Internal

GOAL_PERCENT = 5.0
"""Goal for the exposed part of a hand-off of 8,192 tokens, in percent of the prompt's TTFT."""
MAX_TOKENS = 4
COLLOCATED = "collocated"
WAYS = {way.name: way for way in (IN_MEMORY, STAGED, DIRECT)}
_MEMORY = 0.9
"""Share of a GPU's memory for all workers together."""
_LEAN = ("--max-num-seqs", "8", "--host-swap-bytes", "0")
"""One request is served at a time: fewer graphs and no host memory for others start faster."""
_ANSWER_S = 120.0


@dataclass(slots=True)
class Figures:
    """Times of one way's answers, one for each prompt. Milliseconds."""

    ttft: list[float] = field(default_factory=list)
    """TTFT at the client, seconds."""
    compute: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        """Takes a whole answer. Raises Internal for one that was not measured."""
        if reply.sent_s is None or reply.split is None or not reply.token_times_s:
            raise Internal("an answer came without its times")
        if reply.num_cached_tokens:
            raise Internal(f"{reply.num_cached_tokens} tokens of a prompt were cached: it was to be computed")
        self.ttft.append(1e3 * (reply.token_times_s[0] - reply.sent_s))
        self.compute.append(reply.split.prefill_compute_ms)
        self.exposed.append(reply.split.ship_exposed_ms)
        self.tokens.append(reply.token_ids)

    @property
    def exposed_percent(self) -> float:
        """Exposed time in percent of TTFT, the median over the prompts."""
        return median(100 * exposed / ttft for exposed, ttft in zip(self.exposed, self.ttft, strict=True))


async def ask(client: Client, prompts: Sequence[Sequence[int]], is_collocated: bool) -> Figures:
    """Sends the prompts one after the other; the first is not counted, whatever starts with it has then started."""
    figures = Figures()
    for number, prompt in enumerate(prompts):
        reply = Reply()
        async with asyncio.timeout(_ANSWER_S):
            await client.generate(client.encode(Call(f"hand-off-{number}", prompt, MAX_TOKENS)), reply)
        has_handoff = bool(reply.prefill_worker) and reply.prefill_worker != reply.decode_worker
        if has_handoff == is_collocated:
            raise Internal(f"{reply.prefill_worker!r} and {reply.decode_worker!r} served a request of this cluster")
        if number:
            figures.add(reply)
    return figures


def cluster_of(name: str, device: str, model: Path, scratch: Path, share: float, max_len: int) -> LocalCluster:
    """A cluster for a way of hand-off, or of one worker for COLLOCATED; not started. `share`: of the GPU's memory."""
    spec: dict[str, object] = {"gpu_memory": share, "max_model_len": max_len}
    way = replace(WAYS.get(name, IN_MEMORY), worker_flags=(*WAYS.get(name, IN_MEMORY).worker_flags, *_LEAN))
    if name == COLLOCATED:
        spec |= {"mode": "collocated", "num_prefill": 0}
    return way.cluster(device, model, scratch / name, **spec)


def results(name: str, figures: Figures, beside: Figures | None) -> list[Result]:
    """Rows of one way. `beside`: figures of one worker alone, where these were measured."""
    ttft = Result(f"{name}, TTFT", median(figures.ttft), "ms")
    if beside is not None:
        ttft = replace(ttft, peer=COLLOCATED, ratio=median(beside.ttft) / ttft.value)
    found = [
        ttft,
        Result(f"{name}, prompt computed in", median(figures.compute), "ms"),
    ]
    if name != COLLOCATED:
        found.append(Result(f"{name}, hand-off exposed", median(figures.exposed), "ms"))
        found.append(Result(f"{name}, exposed of TTFT", figures.exposed_percent, "%"))
    return found


def main(
    device: Annotated[str, Option("cpu, cuda:0, …")] = "cuda:0",
    shape: Annotated[str, Option(f"random weights in this shape: {', '.join(ON_GPU)}")] = "8b",
    model: Annotated[Path | None, Option("a model's folder instead")] = None,
    prompt_tokens: Annotated[int, Option("of each prompt")] = 8192,
    prompts: Annotated[int, Option("that are counted, of each way")] = 6,
    ways: Annotated[str, Option(f"of {COLLOCATED}, {', '.join(WAYS)}; empty = what the device has")] = "",
    at_once: Annotated[int, Option("ways whose clusters share the device; their starts take less time together")] = 1,
    scratch: Annotated[Path | None, Option("folder that keeps the shape's weights for a further call")] = None,
    out: Out = None,
) -> None:
    """Measure what is exposed of hand-offs of long prompts, beside one worker that computes and decodes."""
    choice(shape, "shape", ON_GPU)
    if device != "cpu":
        cuda_device("a device that is not the CPU", ": --device cpu measures there")
    if at_once < 1:
        raise ConfigError(f"--at-once must be at least 1, got {at_once}", field="at_once", limit=1)
    wanted = names(ways, "ways", (COLLOCATED, *WAYS)) or [COLLOCATED, *(way.name for way in ways_of(device))]
    source = TokenSource(1)
    asked = [source.span(Span(f"hand-off-{number}", prompt_tokens)) for number in range(prompts + 1)]
    max_len = prompt_tokens + MAX_TOKENS
    report, found = Report(out), dict[str, Figures]()

    async def measure(together: Sequence[str], folder: Path, state: Path) -> None:
        begin, share = time.perf_counter(), _MEMORY / len(together)
        clusters = [cluster_of(name, device, folder, state, share, max_len) for name in together]
        async with started(clusters) as clients:
            report.add([Result(f"{' and '.join(together)}, ready", time.perf_counter() - begin, "s")])
            for name, client in zip(together, clients, strict=True):
                found[name] = await ask(client, asked, name == COLLOCATED)
                report.add(results(name, found[name], found.get(COLLOCATED) if name != COLLOCATED else None))

    with tempfile.TemporaryDirectory(prefix="tandem-handoff-") as temporary:
        begin = time.perf_counter()
        if (folder := model) is None:
            kept = (scratch or Path(temporary)) / shape
            folder = write_model(kept, ON_GPU[shape], DEMO, max_len=max_len, device=device)
            if device != "cpu":
                torch.cuda.empty_cache()  # the rest of the GPU's memory is the workers'
            report.add([Result("weights written", time.perf_counter() - begin, "s")])
        for first in range(0, len(wanted), at_once):
            asyncio.run(measure(wanted[first : first + at_once], folder, Path(temporary)))
    report.print()
    print(f"\nprompts of {prompt_tokens} tokens one after the other, medians of {prompts}")
    for name, figures in found.items():
        if name != COLLOCATED:
            met = "met" if figures.exposed_percent <= GOAL_PERCENT else "missed"
            print(f"{met}: {name}: {figures.exposed_percent:.1f} % of TTFT is exposed, the goal is {GOAL_PERCENT:g} %")
            same = sum(a == b for a, b in zip(figures.tokens, next(iter(found.values())).tokens, strict=True))
            print(f"{name}: {same} of {prompts} answers are those of {next(iter(found))}")
