"""Steps that a runner takes before its first request, so that no request waits while kernels compile."""

from __future__ import annotations

from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.sampling_params import SamplingParams
from shared.kv.groups import KVGroups

_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=0, max_tokens=1, logprobs=1, repetition_penalty=1.1)
_GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)

MIDDLE = 1000
"""Tokens of a chunk that is neither of the shortest nor of the longest kind."""


def warm_up_plans(
    max_tokens: int, max_num_seqs: int, groups: KVGroups, num_blocks: int, most_guesses: int = 0
) -> list[StepPlan]:
    """Prompts alone, and beside a decoding sequence where a step may have two, as short and as long as a step allows,
    over the pool's blocks; and steps with 1, 3, 7 … guesses, up to `most_guesses` rounded up.

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
    count = 2
    while count <= min(2 * most_guesses, longest):
        checked = _share("checked", count, range(size * -(-count // groups.block_size)), _GREEDY)
        specs = tuple(SampleSpec(_GREEDY, 1 + place) for place in range(count))
        plans.append(StepPlan((checked._replace(samples=specs),)))
        count *= 2
    return plans


def _share(name: str, count: int, blocks: range, params: SamplingParams) -> PlannedSequence:
    return PlannedSequence(name, (0,) * count, 0, tuple(blocks), count, (SampleSpec(params, count, (0,)),))
