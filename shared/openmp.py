"""How the threads of OpenMP, which torch computes with on a CPU, wait for work."""

from __future__ import annotations

import os

_SETTING, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_ROUNDS = 20_000


def wait_briefly() -> None:
    """Lets these threads look for work for about half a millisecond before they sleep, instead of several.

    Meanwhile they keep cores from the C++ kernels' own threads, and from other workers of the machine. Where all is
    torch's, its next loop still finds them awake. Call it before torch is imported: later it has no effect. What the
    environment says already is kept, and a process's children get the same.
    """
    if _SETTING not in os.environ and _POLICY not in os.environ:
        os.environ[_SETTING] = str(_ROUNDS)
