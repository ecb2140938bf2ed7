"""Memory of LoRA adapters: what one takes by its class of rank, and what a worker keeps for all that are ready."""

from __future__ import annotations

RANK_CLASSES = (8, 16, 32, 64, 128, 256)
"""Ranks that memory is counted by: kernels pad ranks, and what one of a lower rank leaves is too little for another."""


def rank_class(rank: int) -> int:
    """The class that a rank, from 1 to the last class, is counted by."""
    return next(each for each in RANK_CLASSES if rank <= each)


def adapter_bytes(values: float, rank: int, bytes_per_value: float) -> int:
    """Bytes of one adapter. `values`: those of rank 1, `ModelShape.adapter_values`."""
    return round(values * rank_class(rank) * bytes_per_value)


def largest_class(values: float, num_slots: int, budget_bytes: int, bytes_per_value: float, least: int = 8) -> int:
    """The largest class of rank of which a budget holds an adapter for every slot; 0 where not even `least`, the
    smallest that the kernels lay out."""
    fitting = (
        rank
        for rank in RANK_CLASSES
        if rank >= least and num_slots * adapter_bytes(values, rank, bytes_per_value) <= budget_bytes
    )
    return max(fitting, default=0)


def share_of_rank(budget_bytes: int, tensor: int, expert: int = 1) -> int:
    """The most that one rank of a worker keeps of a budget for all its ranks: those that split a layer have equal
    parts, a stage may have all of an adapter's layers, and a rank with whole experts all of an adapter's experts."""
    return budget_bytes if expert > 1 else -(-budget_bytes // tensor)
