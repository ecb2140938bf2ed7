"""`python -m loadtest.bench cluster-smoke`: a whole cluster on this machine, two workers, gives one answer.

The prompt is computed by one worker and the answer by the other; on a GPU both share it, once with blocks that pass
through host memory and once by device pointers. The answers must be the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from loadtest.rig.cluster import Extras, local_cluster, print_logs
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from services.local.cluster import LocalCluster
from services.local.spec import DEMO_MODEL

PROMPT = "Once upon a time there was a small kitchen where " * 12
NUM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Way:
    """How blocks pass from one worker to the other."""

    name: str
    worker_flags: tuple[str, ...] = ()

    def cluster(self, device: str, model: Path, state_dir: Path, **spec: Any) -> LocalCluster:
        """Not started; of a prefill and a decode worker, both on the device, unless `spec` says otherwise: see
        `local_cluster`."""
        fields = {"mode": "disaggregated", "num_prefill": 1, "num_decode": 1}
        extras = Extras(self.worker_flags)
        return local_cluster(extras, model=model, device=device, state_dir=state_dir, **{**fields, **spec})


IN_MEMORY, STAGED = Way("in-memory"), Way("staged", ("--gpu-direct", "false"))
DIRECT = Way("direct", ("--gpu-direct", "true"))
"""By device pointers, which is the default where UCX has them."""


def ways(device: str) -> tuple[Way, ...]:
    """The ways that the device has."""
    return (IN_MEMORY,) if device == "cpu" else (STAGED, DIRECT)


async def answer(device: str, way: Way, model: Path, scratch: Path) -> tuple[str, float, float]:
    """(text, seconds until the cluster was ready, seconds of the answer)."""
    begin = time.perf_counter()
    made = way.cluster(device, model, scratch)
    try:
        async with made as cluster:
            ready = time.perf_counter()
            text = await asyncio.to_thread(_complete, cluster.http)
            return text, ready - begin, time.perf_counter() - ready
    except Exception:
        print_logs(made)
        raise


def _complete(address: str) -> str:
    body = {"model": "", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=60) as answered:
        body["model"] = json.load(answered)["data"][0]["id"]
    asked = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as answered:
        return str(json.load(answered)["choices"][0]["text"])


def main(
    device: Annotated[str, Option("cpu, cuda:0, …; empty = the GPU where torch sees one")] = "",
    model: Annotated[Path, Option("model folder")] = DEMO_MODEL,
    out: Out = None,
) -> None:
    """Ask a cluster of two workers for an answer. Fails where the ways of hand-off give different ones."""
    chosen = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    report, texts = Report(out), {}
    for way in ways(chosen):
        with tempfile.TemporaryDirectory(prefix="tandem-smoke-") as scratch:
            text, ready_s, answer_s = asyncio.run(answer(chosen, way, model, Path(scratch)))
        texts[way.name] = text
        report.add(
            [Result(f"{way.name}, ready", ready_s, "s"), Result(f"{way.name}, {NUM_TOKENS} tokens", answer_s, "s")]
        )
        print(f"{way.name}: {text!r}", flush=True)
    report.print()
    if len(set(texts.values())) != 1 or not all(texts.values()):
        sys.exit(f"answers differ or are empty: {texts}")
