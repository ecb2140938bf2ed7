"""Ways to make one part of a real cluster slow."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

NUM_SPINNERS = 3
_NICE = 10


@contextlib.contextmanager
def starved(pid: int, others: list[int]) -> Iterator[None]:
    """The process gets a few percent of one core, which others compute on; the cluster's `others` keep off that core.
    Needs two cores."""
    cores = sorted(os.sched_getaffinity(0))
    before: dict[int, set[int]] = {}
    for tid in (tid for other in (pid, *others) for tid in _threads(other)):
        with contextlib.suppress(ProcessLookupError):
            before[tid] = os.sched_getaffinity(tid)
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_SPINNERS)]
    try:
        for spinner in spinners:
            os.sched_setaffinity(spinner.pid, cores[:1])
        for other in others:
            _pin(other, cores[1:])
        _pin(pid, cores[:1])
        for tid in _threads(pid):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, tid, min(19, os.getpriority(os.PRIO_PROCESS, tid) + _NICE))
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
        for tid, had in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(tid, had)


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _pin(pid: int, cores: list[int]) -> None:
    for tid in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(tid, cores)


def narrow_connection(address: str, body: bytes, request_id: str) -> socket.socket:
    """A client that has asked for a stream over HTTP, takes little at once, and has read nothing yet."""
    host, port = address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection
