"""What a planned step computes, as the model of step times counts it."""

from __future__ import annotations

from shared.engine.plan import StepPlan
from shared.sizing.step_time import StepWork, chunk_pairs


def step_work(plan: StepPlan) -> StepWork:
    """A sequence that computes one token counts as one that decodes, wherever the token comes from: it reads the KV
    of all before it."""
    num_sequences = num_context = num_chunk = num_pairs = 0
    for item in plan.sequences:
        count = len(item.token_ids)
        if count == 1:
            num_sequences += 1
            num_context += item.start + 1
        else:
            num_chunk += count
            num_pairs += chunk_pairs(count, item.start)
    return StepWork(num_sequences, num_context, num_chunk, num_pairs, len(plan.sequences) - num_sequences)
