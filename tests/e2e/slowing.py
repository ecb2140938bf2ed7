"""Ways to make one part of a real cluster slow."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

STOPPED_S, RUNNING_S = 0.15, 0.01
"""In turn; a worker that says nothing for a second would be given no work."""


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process computes for 10 ms of each 160, however busy the machine is."""
    over = threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(RUNNING_S)

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        yield
    finally:
        over.set()
        turns.join()


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
