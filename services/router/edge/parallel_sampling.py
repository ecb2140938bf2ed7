"""Several answers to one prompt (`n` > 1): a request for each, with an id and a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from services.router.request import Request


def derived_seed(seed: int, index: int) -> int:
    """Seed of answer `index` to one prompt, 64 bits: the request's own for the first, else hashed from it."""
    if index == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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
