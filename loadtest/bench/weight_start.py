"""`python -m loadtest.bench weights`: how a worker starts with weights from a peer, from its disk, and by HTTP.

The peer is a worker that serves; each way takes its turn, and ends when the new worker is ready. By HTTP one stream
writes the files of a plain file server into the folder first, as a download does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

from loadtest.rig.command_line import Option, Out
from loadtest.rig.models import SHAPES, checkpoint
from loadtest.rig.results import write_text
from services.worker.weights.files import folder_files
from shared.errors import Internal

_COPY_BYTES = 1 << 20


@asynccontextmanager
async def _worker(name: str, folder: Path, *flags: str) -> AsyncIterator[tuple[str, float]]:
    """A decode worker, ended behind the block; its address, and the seconds until the model folder was there, 0 where
    it was from the start."""
    began, fetched = time.perf_counter(), 0.0
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.decode", "--name", name, "--model", str(folder), "--dtype", "bf16",
        "--num-kv-blocks", "64", "--max-model-len", "512", *flags, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while True:
            line = await process.stdout.readline()
            if not line:
                raise Internal(f"worker {name} has ended before it was ready")
            event = json.loads(line)
            if event["event"] == "error":
                raise Internal(f"worker {name}: {event['message']}")
            if event["event"] == "ready":
                break
            if event["text"] == "fetching weights":
                fetched = time.perf_counter() - began
        yield event["address"], fetched
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGTERM)
        await process.wait()


def _forget(folder: Path) -> None:
    """Drops the folder's files from the page cache, as far as the kernel follows the advice."""
    for path in folder_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _download(address: str, names: list[str], into: Path) -> None:
    for name in names:
        with urllib.request.urlopen(f"http://{address}/{name}") as source, (into / name).open("wb") as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)


async def _file_server(folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()  # Serving HTTP on 127.0.0.1 port N (…
    return process, f"127.0.0.1:{line.split(' port ')[1].split()[0]}"


async def _start(way: str, source: Path, peer: str, server: str) -> tuple[float, float]:
    """Seconds until the folder was there, and until the worker was ready."""
    names = [path.name for path in folder_files(source)]
    with tempfile.TemporaryDirectory(dir=source.parent) as made:
        folder, brought = Path(made) / source.name, 0.0
        began = time.perf_counter()
        if way == "HTTP":
            folder.mkdir()
            await asyncio.to_thread(_download, server, names, folder)
            brought = time.perf_counter() - began
        elif way != "peer":
            folder = source
            if way == "disk":
                await asyncio.to_thread(_forget, source)
                began = time.perf_counter()
        flags = ("--weights-from", peer) if way == "peer" else ()
        async with _worker("second", folder, *flags) as (_, fetched):
            return brought or fetched, time.perf_counter() - began


async def _measure(model: str, rounds: int) -> dict[str, object]:
    source = checkpoint(model) if model in SHAPES else Path(model)
    num_bytes = sum(path.stat().st_size for path in folder_files(source))
    ways = ("peer", "HTTP", "disk", "page cache")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    server, http = await _file_server(source)
    try:
        async with _worker("first", source) as (peer, _):
            for _ in range(rounds):
                for way in ways:
                    found[way].append(await _start(way, source, peer, http))
    finally:
        server.terminate()
        await server.wait()
    table: dict[str, object] = {}
    for way, times in found.items():
        brought, ready = (median(column) for column in zip(*times, strict=True))
        table[way] = {
            "bring_s": round(brought, 2),
            "bring_gb_per_s": round(num_bytes / brought / 1e9, 3) if brought else None,
            "ready_s": round(ready, 2),
            "all_ready_s": [round(each, 2) for _, each in times],
        }
    return {"model": source.name, "num_bytes": num_bytes, "rounds": rounds, "ways": table}


def main(
    model: Annotated[str, Option(help=f"a model folder, or a shape: {', '.join(SHAPES)}")] = "1b",
    rounds: Annotated[int, Option(help="turns of each way")] = 3,
    out: Out = None,
) -> None:
    """Prints the figures as JSON, and writes them where asked."""
    text = json.dumps(asyncio.run(_measure(model, rounds)), indent=2)
    print(text)
    if out is not None:
        write_text(out, text + "\n")
