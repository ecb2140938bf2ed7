"""The best of several answers that were computed for each prompt: of a beam search, or of answers that were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.router.dispatch.request import Request, TokenDelta
from services.router.edge.output_stream import OutputDelta, OutputStream, output_processor
from shared.model.text.tokenizer import Tokenizer

Best = tuple[Request, Sequence[OutputDelta]]


async def best_answers(
    outputs: OutputStream, plan: Sequence[Request], num_computed: int, n: int, tokenizer: Tokenizer
) -> list[Best]:
    """The `n` best answers of each prompt, prompt by prompt, the best first. `plan`: the requests of `outputs`, one a
    beam search, else `num_computed` a prompt. Raises what `outputs` does."""
    computed: list[list[OutputDelta]] = [[] for _ in plan]
    async for index, delta in outputs:
        computed[index].append(delta)
    best: list[Best] = []
    if plan[0].sampling.beams is not None:
        for request, deltas in zip(plan, computed, strict=True):
            best += await _found(request, deltas, tokenizer)
        return best
    for begin in range(0, len(plan), num_computed):
        order = sorted(range(begin, begin + num_computed), key=lambda index: -_mean_logprob(computed[index]))
        best += [(plan[index], computed[index]) for index in order[:n]]
    return best


async def _found(request: Request, deltas: Sequence[OutputDelta], tokenizer: Tokenizer) -> list[Best]:
    """The answers of a search, as if each were a request of its own."""
    last = deltas[-1]
    assert last.finish is not None
    found: list[Best] = []
    for place, beam in enumerate(last.beams):
        answer = replace(
            request,
            request_id=f"{request.request_id}-{place}" if len(last.beams) > 1 else request.request_id,
            sampling=replace(request.sampling, beams=None),
        )
        processor = await output_processor(answer, last.finish.record, tokenizer)
        found.append((answer, [processor.process(TokenDelta(beam.token_ids, (), beam.finish_reason))]))
    return found


def _mean_logprob(deltas: Sequence[OutputDelta]) -> float:
    logprobs = [position.logprob for delta in deltas for position in delta.logprobs]
    return sum(logprobs) / len(logprobs)
