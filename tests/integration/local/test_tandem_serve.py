"""`tandem serve` with the real services and the demo model: it serves, and whatever ends it leaves no process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]
TANDEM = [sys.executable, "-m", "tandem_cli.main"]
MODEL = ROOT / "models" / "demo"
TWO_MODELS = {
    "models": [
        {"model": str(MODEL), "num_kv_blocks": 64},
        {"model": str(MODEL), "num_kv_blocks": 64, "name": "two", "mode": "disaggregated"},
    ]
}
"""A model in the default mode, and one with a pool for each role."""


@contextmanager
def running_cluster(folder: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`tandem serve` on free ports, its HTTP and its gRPC address; killed at the end if it still runs. Without a `mode`
    it serves TWO_MODELS."""
    (folder / "models.json").write_text(json.dumps(TWO_MODELS))
    command = [*TANDEM, "serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    one = ["--model", str(MODEL), "--num-kv-blocks", "64", "--mode", mode]
    command += one if mode else ["--config", str(folder / "models.json")]
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
            http = re.search(r"OpenAI API +(\S+)/v1", printed)
            assert address is not None, printed
            assert http is not None, printed
            assert "For example:" in printed
            assert ("prefill-0 → decode-0" if mode else "alone") in printed
            yield launcher, http[1], address[1]
        finally:
            launcher.kill()


def tandem(*arguments: str) -> str:
    """What the command printed; it must succeed."""
    return subprocess.run([*TANDEM, *arguments], check=True, capture_output=True, text=True).stdout


def end_of_a_stream_that_is_cut(launcher: subprocess.Popen[str], http: str) -> str:
    """Ctrl-C twice while an answer streams; the stream's last event."""
    # Enough that they do not end before a busy machine has let the launcher say that it stops.
    body = {"prompt": "Then", "n": 16, "stream": True, "max_tokens": 900, "ignore_eos": True}
    with httpx.stream("POST", f"{http}/v1/completions", json=body, timeout=DEADLINE_S) as response:
        lines = filter(None, response.iter_lines())
        assert next(lines).startswith("data: ")
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None
        assert any(line.startswith("stopping") for line in launcher.stdout)
        launcher.send_signal(signal.SIGINT)
        return list(lines)[-1]


@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGINT, ""), pytest.param(signal.SIGKILL, "disaggregated", marks=pytest.mark.slow)]
)
def test_it_answers_and_leaves_no_process_behind(tmp_path: Path, number: signal.Signals, mode: str) -> None:
    with running_cluster(tmp_path, mode) as (launcher, http, grpc):
        status = json.loads(tandem("status", "--json", "--target", grpc))
        prefills, decodes = {"prefill-0"}, {"decode-0"}
        if not mode:
            prefills, decodes = {"two-prefill-0"}, {"worker-0", "worker-1", "two-decode-0"}
        assert {worker["worker"]["name"] for worker in status["workers"]} == prefills | decodes
        assert status["ready"]
        arguments = ("generate", "--raw", "Then", "--json", "-n", "8", "--temperature", "0", "--target", grpc)
        first = json.loads(tandem(*arguments))
        second = json.loads(tandem(*arguments, *([] if mode else ["--model", "two"])))
        assert first["usage"]["num_output_tokens"] == 8
        assert first["token_ids"] == second["token_ids"]
        assert first["decode_worker"] in decodes - {"two-decode-0"}
        assert second["decode_worker"] == ("decode-0" if mode else "two-decode-0")

        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= (5 if mode else 7)  # Valkey, KV store, two workers a model, router
        if number == signal.SIGINT:
            end = json.loads(end_of_a_stream_that_is_cut(launcher, http).removeprefix("data: "))
            assert "shutting down" in end["error"]["message"]
            assert launcher.wait(DEADLINE_S) == 130
        else:
            launcher.send_signal(number)
            assert launcher.wait(DEADLINE_S) == -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
        assert alive == []
