"""`python -m tests.e2e.patient services.decode …`: that worker, but it waits longer for what it asks of others once.

On a busy machine an answer may take longer than a prefix is worth: the worker then rightly computes it, and a test that
counts fetched tokens would fail.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from shared.block_service import client, store_client

PATIENCE_S = 2.0
"""Eight times what a worker waits otherwise."""


def patient(command: Sequence[str]) -> list[str]:
    """A command of `python -m module …` as one of this module."""
    return [*command[:2], "tests.e2e.patient", *command[2:]]


if __name__ == "__main__":
    defaults = client.BlockClient.__init__.__kwdefaults__
    assert "look_up_timeout_s" in defaults
    defaults["look_up_timeout_s"] = PATIENCE_S
    store_client.OFFER_TIMEOUT_S *= 8
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
