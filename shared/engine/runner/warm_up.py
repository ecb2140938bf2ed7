"""Steps that a runner takes before its first request, so that no request waits while kernels compile."""

from __future__ import annotations

from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.sampling_params import SamplingParams
from shared.kv.groups import KVGroups

_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=0, max_tokens=1, logprobs=1, repetition_penalty=1.1)
_GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)

MIDDLE = 1000
"""Tokens of a chunk that is neither of the shortest nor of the longest kind."""


def warm_up_plans(max_tokens: int, max_num_seqs: int, groups: KVGroups, num_blocks: int) -> list[StepPlan]:
    """Prompts alone, and beside a decoding sequence where a step may have two, as short and as long as a step allows,
    over the pool's blocks.

    Attention kernels choose their sizes by the longest chunk of a step, and by nothing else that changes from step to
    step; chunks from some thousand tokens on may be computed otherwise.
    Decode-only steps are not among them: their graphs are captured.
    """
    size = groups.size
    longest = min(max_tokens - 1, (num_blocks // size - 1) * groups.block_size)
    plans = []
    for chunk in sorted({min(2, longest), min(MIDDLE, longest), longest}):
        for params in (_GREEDY, _SAMPLED):
            prompt = _share("prompt", chunk, range(size, size + size * -(-chunk // groups.block_size)), params)
            plans.append(StepPlan((prompt,)))
            if max_num_seqs > 1:
                plans.append(StepPlan((_share("decode", 1, range(size), params), prompt)))
    return plans


def _share(name: str, count: int, blocks: range, params: SamplingParams) -> PlannedSequence:
    return PlannedSequence(name, (0,) * count, 0, tuple(blocks), count, (SampleSpec(params, count, (0,)),))
