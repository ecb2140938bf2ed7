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
from pathlib import Path
from typing import Annotated

import torch

from loadtest.rig.cluster import Extras, local_cluster
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from services.local.spec import DEMO_MODEL

PROMPT = "Once upon a time there was a small kitchen where " * 12
NUM_TOKENS = 48
_MOST_OF_A_LOG = 4000
"""Characters of each log that are printed where there is no answer."""


async def answer(device: str, worker_flags: tuple[str, ...], model: Path, scratch: Path) -> tuple[str, float, float]:
    """(text, seconds until the cluster was ready, seconds of the answer)."""
    begin = time.perf_counter()
    made = local_cluster(
        Extras(worker_flags), model=model, device=device, mode="disaggregated", num_prefill=1, num_decode=1,
        state_dir=scratch,
    )  # fmt: skip
    try:
        async with made as cluster:
            ready = time.perf_counter()
            text = await asyncio.to_thread(_complete, cluster.http)
            return text, ready - begin, time.perf_counter() - ready
    except Exception:
        for log in sorted(made.spec.log_dir.glob("*.log")):  # they go with the cluster's folder
            print(f"== {log.name}", log.read_text(errors="replace")[-_MOST_OF_A_LOG:], sep="\n", flush=True)
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
    ways = {"staged": (), "direct": ("--gpu-direct", "true")} if chosen != "cpu" else {"in memory": ()}
    report, texts = Report(out), {}
    for way, flags in ways.items():
        with tempfile.TemporaryDirectory(prefix="tandem-smoke-") as scratch:
            text, ready_s, answer_s = asyncio.run(answer(chosen, tuple(flags), model, Path(scratch)))
        texts[way] = text
        report.add([Result(f"{way}, ready", ready_s, "s"), Result(f"{way}, {NUM_TOKENS} tokens", answer_s, "s")])
        print(f"{way}: {text!r}", flush=True)
    report.print()
    if len(set(texts.values())) != 1 or not all(texts.values()):
        sys.exit(f"answers differ or are empty: {texts}")
