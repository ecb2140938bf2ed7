"""Huge pages for torch's allocations on a CPU."""

from __future__ import annotations

import os

_SETTING = "THP_MEM_ALLOC_ENABLE"


def ask_for_huge_pages() -> None:
    """Makes torch ask Linux for pages of 2 MiB instead of 4 KiB for large allocations.

    Weights are read from end to end, KV in scattered blocks. With small pages a core has to translate an address for
    every block and head, which in a virtual machine takes longer than reading the data. Torch reads the setting at its
    first allocation, so call this before; later it has no effect. A value set from outside, such as 0, is kept.
    """
    os.environ.setdefault(_SETTING, "1")
