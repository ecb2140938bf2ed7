"""`tandem up` with the real services and the demo model: it serves, and whatever ends it leaves no process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
TANDEM = [sys.executable, "-m", "services.cli.main"]
MODEL = ROOT / "models" / "demo"

pytestmark = pytest.mark.slow


@contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tandem up` on free ports, and its gRPC address; killed at the end if it still runs."""
    command = [*TANDEM, "up", "--model", str(MODEL), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command += ["--num-kv-blocks", "64"]
    with (
        (folder / "stderr").open("w") as stderr,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True) as launcher,
    ):
        assert launcher.stdout is not None
        printed = ""
        try:
            for line in launcher.stdout:
                printed += line
                if line.startswith("Serving."):
                    break
            assert launcher.poll() is None, (folder / "stderr").read_text()
            address = re.search(r"gRPC +(\S+)", printed)
            assert address is not None, printed
            assert "For example:" in printed
            assert "prefill-0 → decode-0" in printed
            yield launcher, address[1]
        finally:
            launcher.kill()


def tandem(*arguments: str) -> str:
    """What the command printed; it must succeed."""
    return subprocess.run([*TANDEM, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_answers_and_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    with running_cluster(tmp_path) as (launcher, grpc):
        status = json.loads(tandem("status", "--json", "--target", grpc))
        assert {worker["worker"]["name"] for worker in status["workers"]} == {"prefill-0", "decode-0"}
        assert status["ready"]
        arguments = ("generate", "--raw", "Then", "--json", "-n", "8", "--temperature", "0", "--target", grpc)
        first, second = json.loads(tandem(*arguments)), json.loads(tandem(*arguments))
        assert first["usage"]["num_output_tokens"] == 8
        assert first["token_ids"] == second["token_ids"]
        assert first["prefill_worker"] == "prefill-0"

        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= 5  # Valkey, KV store, two workers, router
        launcher.send_signal(number)
        assert launcher.wait(60) == (0 if number == signal.SIGINT else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
