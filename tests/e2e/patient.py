"""`python -m tests.e2e.patient services.decode …`: that worker, but it waits longer for what it asks of others once,
for answers to pings, and for a connection that is being made.

On a busy machine an answer may take longer than a prefix is worth: the worker then rightly computes it, and a test that
counts fetched tokens would fail.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from shared.block_service import client, store_client
from shared.rpc import server

PATIENCE_S = 10.0
"""Forty times what a worker waits otherwise: all processes of a machine may stand still for seconds."""
CONNECTION_MS = {"grpc.min_reconnect_backoff_ms": 10_000}
"""How long an attempt to connect may last. One that is refused fails at once, and is repeated as soon as ever."""
PING_TIMEOUT_MS = 60_000


@contextmanager
def patient_pings() -> Iterator[None]:
    """Within, no connection of this process breaks, or fails to be made, because the other side's machine is busy."""

    def waiting(options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, PING_TIMEOUT_MS if name.endswith("timeout_ms") else CONNECTION_MS.get(name, value))
            for name, value in options
        )

    with patch.multiple(
        server, CHANNEL_OPTIONS=waiting(server.CHANNEL_OPTIONS), SERVER_OPTIONS=waiting(server.SERVER_OPTIONS)
    ):
        yield


def patient(command: Sequence[str]) -> list[str]:
    """A command of `python -m module …` as one of this module."""
    return [*command[:2], "tests.e2e.patient", *command[2:]]


if __name__ == "__main__":
    defaults = client.BlockClient.__init__.__kwdefaults__
    assert "look_up_timeout_s" in defaults
    defaults["look_up_timeout_s"] = PATIENCE_S
    store_client.OFFER_TIMEOUT_S *= 8
    del sys.argv[0]
    with patient_pings():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
