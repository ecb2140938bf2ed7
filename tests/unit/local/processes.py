"""Waiting for processes that are not one's own children."""

from __future__ import annotations

import os
import select

from tests.waiting import DEADLINE_S


def wait_for_end(pid: int, timeout_s: float = DEADLINE_S) -> bool:
    """True once process `pid` has ended; False when `timeout_s` passed first."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
