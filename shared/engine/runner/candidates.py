"""How many of a row's highest logits its tokens can be chosen from."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.plan import PlannedSequence, SampleSpec
from shared.engine.runner.sampler import is_plain

MOST = 64
"""Above, all logits are sent: their ids would take as many bytes again."""
ALL = 0


def num_candidates(items: Sequence[PlannedSequence]) -> int:
    """For all rows of a step: ALL where one of them needs every logit."""
    if any(item.targets for item in items):
        return ALL
    counts = [_of_row(item.sample) for item in items if item.sample is not None]
    most = max(counts, default=1)
    return ALL if ALL in counts or most > MOST else most


def _of_row(spec: SampleSpec) -> int:
    params = spec.params
    if not is_plain(spec) or params.logprobs is not None:
        return ALL
    return 1 if params.is_greedy else params.top_k
