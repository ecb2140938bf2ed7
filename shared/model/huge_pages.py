"""Large pages for what torch allocates on a CPU."""

from __future__ import annotations

import os

_SETTING = "THP_MEM_ALLOC_ENABLE"


def ask_for_huge_pages() -> None:
    """Has torch ask Linux for pages of 2 MiB instead of 4 KiB, wherever it allocates that much.

    Weights and KV are read from one end to the other, block by block from anywhere: with small pages a core looks up an
    address for every block and head, which in a virtual machine takes longer than reading it. Torch reads the setting
    at its first allocation, so call this before; later it does nothing. A value from outside, such as 0, stands.
    """
    os.environ.setdefault(_SETTING, "1")
