"""Python's garbage collector around what allocates much that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

NUM_NEW = 20_000
"""New objects at which the collector looks for garbage: most of a step's or a request's are gone before that, and each
of hundreds of answers has several in every step."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collections within, and none that looks through what is there at the end: imported modules, say. Behind it
    they are seldom, see NUM_NEW.

    Collections look for garbage in all that was allocated since the last ones, again and again while torch is
    imported, and find none: a tenth of a worker's time to start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(NUM_NEW)
        gc.enable()
