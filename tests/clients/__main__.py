"""Starts a cluster as a person would, and runs the checks in the clients' own environment against it.

    python -m tests.clients FOLDER [pytest arguments]

FOLDER has a venv for each file of `requirements/`, and `node` with the packages of the examples. The checks run in that
of `sdks`, and know the cluster by TANDEM_CLIENTS_URL and TANDEM_CLIENTS_GRPC alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]


def main() -> int:
    """The checks' exit status."""
    clients, *arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the cluster ends too
    http, grpc, tools = (f"127.0.0.1:{_free_port()}" for _ in range(3))
    here = Path(__file__).parent
    python = str(Path(clients) / "sdks" / "bin" / "python")
    tandem = Path(sys.executable).parent / "tandem"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "TANDEM_ROUTER_EDGE__BATCH__FOLDER": str(Path(folder) / "batches"),
            "TANDEM_ROUTER_EDGE__MCP__ALLOWED_SERVERS": json.dumps([f"http://{tools}"]),
            "TANDEM_ROUTER_EDGE__POOLING": "mean",
        }
        server = subprocess.Popen([python, str(here / "mcp_server.py"), tools.rpartition(":")[2]], cwd=folder)
        cluster = subprocess.Popen(
            [str(tandem), "up", "--no-example", "--http", http, "--grpc", grpc, "--num-kv-blocks", "1024"],
            cwd=folder,
            env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        try:
            _wait(cluster, f"http://{http}/readyz")
            checks = [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--noconftest",
                "-c",
                os.devnull,
                *arguments,
            ]
            told = {
                "TANDEM_CLIENTS_URL": f"http://{http}",
                "TANDEM_CLIENTS_GRPC": grpc,
                "TANDEM_CLIENTS_TOOLS": f"http://{tools}/mcp",
                "TANDEM_CLIENTS_FOLDER": clients,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            return subprocess.run(
                [*checks, *(str(here / name) for name in ("checks.py", "programs.py"))],
                cwd=folder,
                env={**os.environ, **told},
                check=False,
            ).returncode
        finally:
            server.terminate()
            server.wait(DEADLINE_S)
            cluster.terminate()
            cluster.wait(DEADLINE_S)


def _wait(cluster: subprocess.Popen[bytes], url: str) -> None:
    """Until the cluster is ready; raises SystemExit where it ends or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if cluster.poll() is not None:
            raise SystemExit(f"tandem serve ended with status {cluster.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the cluster was not ready after {DEADLINE_S:.0f} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
