"""A real edge (HTTP and gRPC servers, tokenizer, limits) over a ticking core, in a process of its own.

    python -m tests.fuzz.edge_process '{"limits": {…}}'

Prints one JSON line with its addresses, then serves until its standard input ends. `/metrics` shows its `Health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
import uvloop

from services.router.edge.catalog import Catalog
from services.router.edge.grpc.servicer import SERVICE_NAME, InferenceServicer, server_options
from services.router.edge.http.app import build_app
from services.router.edge.http.server.http_server import HttpServer
from services.router.edge.settings import EdgeSettings
from shared.model.text.tokenizer import Tokenizer
from shared.rpc.pb.tandem.v1 import inference_pb2
from shared.rpc.server import RpcServer
from tests.fuzz.ticking_core import TickingCore
from tests.unit.router.edge.fixed_view import FixedView
from tests.unit.router.edge.scripted_core import MODEL, byte_tokenizer, make_input_processor
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
CONTEXT_LEN = 4096
_PROBE_S = 0.001


@dataclass(frozen=True, slots=True)
class Health:
    """What `/metrics` of the process shows."""

    loop_lag_ms: float  # largest since the last look, by the clock: the machine's other work counts too
    loop_busy_ms: float  # largest likewise, of the loop's own computing between two turns
    rss_mb: float
    num_requests: int  # that reached the core


@dataclass(frozen=True, slots=True)
class EdgeProcess:
    """A running one, as its parent sees it."""

    http: str  # host:port
    grpc: str
    process: subprocess.Popen[str]

    def health(self) -> Health:
        """Raises where it does not answer."""
        with urlopen(f"http://{self.http}/metrics", timeout=DEADLINE_S) as answer:
            return Health(**json.load(answer))


class LagProbe:
    """Wakes every millisecond and keeps the largest delay, and the most computing between two wakes."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._busiest_s = 0.0

    async def run(self) -> None:
        while True:
            begun, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_PROBE_S)
            self._worst_s = max(self._worst_s, time.perf_counter() - begun - _PROBE_S)
            self._busiest_s = max(self._busiest_s, time.thread_time() - computed)

    def take(self) -> tuple[float, float]:
        """The largest of both since the last call, seconds."""
        found = (self._worst_s, self._busiest_s)
        self._worst_s = self._busiest_s = 0.0
        return found


@contextlib.contextmanager
def edge_process(**settings: object) -> Iterator[EdgeProcess]:
    """Starts one with these `EdgeSettings`; it ends with the block."""
    command = [sys.executable, "-m", "tests.fuzz.edge_process", json.dumps(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = json.loads(process.stdout.readline())
            yield EdgeProcess(addresses["http"], addresses["grpc"], process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


async def serve(settings: EdgeSettings) -> None:
    """Until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(DEMO) if (DEMO / "tokenizer.json").is_file() else byte_tokenizer(Path(folder))
    core = TickingCore(tokenizer.encode("a", add_special_tokens=False)[0], CONTEXT_LEN)
    probe = LagProbe()
    probing = asyncio.create_task(probe.run())

    def metrics() -> bytes:
        rss_mb = psutil.Process().memory_info().rss / 2**20
        lag_s, busy_s = probe.take()
        health = Health(lag_s * 1e3, busy_s * 1e3, rss_mb, core.num_requests)
        return json.dumps(asdict(health)).encode()

    view = FixedView(inference_pb2.ClusterStatus(router_name="router-0", model_name=MODEL, ready=True))

    processor = make_input_processor(core, tokenizer, settings)  # type: ignore[arg-type]
    http = HttpServer("127.0.0.1:0", build_app(processor, settings, metrics, view), settings.limits)
    servicer = InferenceServicer(
        processor,
        Catalog([processor]),
        settings,
        view.status,
        lambda name: inference_pb2.Explanation(request_id=name),
        lambda name: inference_pb2.RequestInfo(request_id=name),
    )
    rpc = RpcServer(
        "127.0.0.1:0",
        servicer.register,
        (SERVICE_NAME,),
        options=server_options(settings.limits),
        max_calls=settings.limits.max_grpc_calls,
    )
    await http.start()
    await rpc.start()
    print(json.dumps({"http": http.address, "grpc": rpc.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    probing.cancel()
    await http.stop(0)
    await rpc.stop(0)


if __name__ == "__main__":
    uvloop.run(serve(EdgeSettings.model_validate_json(sys.argv[1])))
