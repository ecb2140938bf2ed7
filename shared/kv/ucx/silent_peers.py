"""Ends UCX's TCP connections whose other side has fallen silent.

UCX probes idle connections alone, and only from the side that opened them. Otherwise a cut in the network shows after
a quarter of an hour of retransmissions, or never, and until then a receive whose message has begun keeps its memory.
UCX has no setting for that, so its sockets get options of Linux (tcp(7)). Those that it accepts inherit them from the
socket that listens.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SILENT_S = 6
"""A connection whose other host acknowledges nothing for this long ends. A process that is stopped does not count,
since the kernel answers for it. Long enough that a stalled hand-off is found first, for that names the pair that is
cut; short enough for `cancel`, which waits for receives that have begun."""
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
)


@contextmanager
def ending_silent_connections() -> Iterator[None]:
    """The TCP sockets that this process opens within end after SILENT_S without an answer, as do all connections that
    they accept."""
    before = _sockets()
    yield
    for inode, number in _sockets().items():
        if inode not in before:
            _limit_silence(number)


def _sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            state = entry.stat()
        except OSError:  # it was closed meanwhile
            continue
        if stat.S_ISSOCK(state.st_mode):
            found[state.st_ino] = int(entry.name)
    return found


def _limit_silence(number: int) -> None:
    try:
        with socket.socket(fileno=os.dup(number)) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type is socket.SOCK_STREAM:
                for level, name, value in _OPTIONS:
                    opened.setsockopt(level, name, value)
    except OSError:  # it was closed meanwhile
        return
