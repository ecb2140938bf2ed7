"""Several answers to one prompt (`n` > 1): a request for each, with an id and a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.router.dispatch.request import Request
from shared.seeds import derived_seed


def sub_requests(prompts: Sequence[Request], n: int) -> list[Request]:
    """`n` requests a prompt, in choice order (prompt by prompt), each with its own id and seed."""
    if len(prompts) * n == 1:
        return list(prompts)
    fanned: list[Request] = []
    for prompt in prompts:
        seed = prompt.sampling.seed
        assert seed is not None, "the input processor resolves seeds"
        for index in range(n):
            fanned.append(
                replace(
                    prompt,
                    request_id=f"{prompt.request_id}-{len(fanned)}",
                    sampling=replace(prompt.sampling, seed=derived_seed(seed, index)),
                )
            )
    return fanned
