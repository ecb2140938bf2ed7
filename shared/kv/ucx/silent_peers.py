"""Ends UCX's TCP connections whose other side has fallen silent.

UCX probes idle connections from the side that opened them alone. The side that accepted one would learn of a cut in the
network never, or after a quarter of an hour, and until then a receive whose message has begun keeps its memory. UCX has
no setting for that; but on Linux an accepted connection inherits the options of the socket that listens (tcp(7)).
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

SILENT_S = 4
"""A peer whose host acknowledges nothing for this long is cut off: its connection ends. A process that is stopped does
not count, since the kernel answers for it."""
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
)


def listening() -> frozenset[int]:
    """The descriptors of this process's TCP sockets that listen."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if stat.S_ISSOCK(entry.stat().st_mode) and _listens(int(entry.name)):
                found.add(int(entry.name))
        except OSError:  # it was closed meanwhile
            continue
    return frozenset(found)


def end_silent_connections(listeners: frozenset[int]) -> None:
    """Connections that these sockets accept from now on end after SILENT_S."""
    for number in listeners:
        with socket.socket(fileno=os.dup(number)) as opened:
            for level, name, value in _OPTIONS:
                opened.setsockopt(level, name, value)


def _listens(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as opened:
        is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
