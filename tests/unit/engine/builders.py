"""Sequences with few words."""

from __future__ import annotations

from shared.engine.sampling_params import SamplingParams
from shared.engine.sequence import EngineSequence, Goal

EOS = 1


def sequence(
    sequence_id: str,
    token_ids: list[int],
    *,
    max_tokens: int = 4,
    goal: Goal = Goal.COMPLETION,
    ship_blocks: frozenset[int] = frozenset(),
    num_prompt_tokens: int | None = None,
    receiver: bytes = b"",
    **sampling: object,
) -> EngineSequence:
    num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **sampling)
    return EngineSequence(
        sequence_id=sequence_id,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt,
        sampling=params,
        hash_root=b"root-of-a-model!",
        goal=goal,
        max_tokens_total=max(num_prompt + max_tokens, len(token_ids) + 1),
        eos_token_ids=frozenset({EOS}),
        ship_blocks=ship_blocks,
        receiver=receiver,
    )
