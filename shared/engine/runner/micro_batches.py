"""A step in parts that follow each other through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.plan import PlannedSequence


def micro_batches(items: Sequence[PlannedSequence], count: int) -> list[tuple[PlannedSequence, ...]]:
    """The sequences in their order, in at most `count` parts of about as many tokens; none is empty."""
    share = -(-sum(len(item.token_ids) for item in items) // count)
    parts: list[tuple[PlannedSequence, ...]] = []
    part: list[PlannedSequence] = []
    num_tokens = 0
    for item in items:
        part.append(item)
        num_tokens += len(item.token_ids)
        if num_tokens >= share and len(parts) < count - 1:
            parts.append(tuple(part))
            part, num_tokens = [], 0
    return [*parts, tuple(part)] if part else parts
