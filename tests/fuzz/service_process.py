"""A real worker or KV store in a process of its own, for its messages to be fuzzed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.edge_process import DEMO, ROOT


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A running one."""

    address: str  # host:port of its gRPC server
    process: subprocess.Popen[str]

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None


@contextlib.contextmanager
def service_process(module: str, *flags: str) -> Iterator[ServiceProcess]:
    """Starts `python -m module flags`; it ends with the block."""
    command = [sys.executable, "-m", module, "--bind", "127.0.0.1:0", "--metrics", "", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            events = (json.loads(line) for line in process.stdout)
            ready = next(event for event in events if event["event"] != "progress")
            assert ready["event"] == "ready", ready
            yield ServiceProcess(ready["address"], process)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def worker_process(role: str) -> contextlib.AbstractContextManager[ServiceProcess]:
    """A prefill or decode worker with the demo model."""
    flags = ("--name", f"{role}-0", "--model", str(DEMO), "--num-kv-blocks", "64", "--num-threads", "1")
    return service_process(f"services.{role}", *flags)
