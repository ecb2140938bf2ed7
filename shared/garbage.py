"""Python's garbage collector around what allocates much that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collections within, and none that looks through what is there at the end: imported modules, say.

    Collections look for garbage in all that was allocated since the last ones, again and again while torch is
    imported, and find none: a tenth of a worker's time to start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
