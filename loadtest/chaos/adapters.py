"""Faults while adapters are loaded, join requests, and are unloaded."""

from __future__ import annotations

from pathlib import Path

from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.families.registry import load_config

LOAD, JOIN, UNLOAD = "adapter-load", "adapter-join", "adapter-unload"
"""A worker reads an adapter that the router has named; blocks of requests with adapters travel; a name is taken away
while answers under it run."""
PHASES = (LOAD, JOIN, UNLOAD)
NAMES = ("a", "b", "c", "d")
"""Names of the adapters that the cluster starts with."""
NUM_SLOTS = 2
"""Slots of a worker: fewer than adapters, so that answers wait for loads."""
LATE = "late"
"""The adapter that is loaded and unloaded meanwhile."""


def write_adapters(model: Path, folder: Path) -> None:
    """Writes all adapters of a trial, each with answers of its own."""
    config = load_config(model)
    for seed, name in enumerate((*NAMES, LATE), 1):
        write_random_adapter(folder / name, config, rank=4 * seed, seed=seed, strength=1.5)
