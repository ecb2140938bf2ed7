"""Choosing tokens from logits. Each row depends on its own logits and (seed, position) alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from shared.engine.philox import uniform
from shared.engine.plan import SampledToken, SampleSpec


def sample(logits: Tensor, specs: Seq[SampleSpec]) -> tuple[SampledToken, ...]:
    """One token a row.

    logits: [num_rows, vocab_size] float32, left unchanged; specs: as many as rows. The order is vLLM's: banned tokens
    and penalties, temperature, min-p, top-k, top-p.
    """
    assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows for {len(specs)} specs"
    greedy_rows = [i for i, spec in enumerate(specs) if spec.params.is_greedy and not _is_modified(spec)]
    tokens: dict[int, int] = {}
    if greedy_rows:
        rows = logits if len(greedy_rows) == len(specs) else logits[greedy_rows]
        tokens = dict(zip(greedy_rows, rows.argmax(dim=-1).tolist(), strict=True))
    result = []
    for i, spec in enumerate(specs):
        token = tokens[i] if i in tokens else _choose(logits[i], spec)
        result.append(_with_logprobs(logits[i], token, spec))
    return tuple(result)


def _is_modified(spec: SampleSpec) -> bool:
    return bool(spec.banned_token_ids) or spec.params.has_penalties


def _choose(row: Tensor, spec: SampleSpec) -> int:
    """The token for one row; row: [vocab_size] float32."""
    params = spec.params
    if _is_modified(spec):
        row = row.clone()
        if params.has_penalties:
            _apply_penalties(row, spec)
        if spec.banned_token_ids:
            row[list(spec.banned_token_ids)] = float("-inf")
    if params.is_greedy:
        return int(row.argmax())
    assert params.seed is not None
    probabilities, order = torch.softmax(row / params.temperature, dim=-1).sort(descending=True, stable=True)
    kept = _num_kept(probabilities, spec)
    cumulative = probabilities[:kept].double().cumsum(0)
    threshold = uniform(params.seed, spec.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, torch.tensor(threshold, dtype=torch.float64), right=True))
    return int(order[min(index, kept - 1)])


def _num_kept(probabilities: Tensor, spec: SampleSpec) -> int:
    """How many of the sorted probabilities [vocab_size] survive min-p, top-k and top-p, at least one."""
    params = spec.params
    kept = probabilities.shape[0]
    if params.min_p > 0.0:
        kept = int((probabilities >= params.min_p * probabilities[0]).sum())
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    if params.top_p < 1.0:
        cumulative = probabilities[:kept].double().cumsum(0)
        # The token that crosses top_p is still in: keep those with less than top_p before them.
        before = cumulative - probabilities[:kept].double()
        kept = int((before < params.top_p * float(cumulative[-1])).sum())
    return max(1, kept)


def _apply_penalties(row: Tensor, spec: SampleSpec) -> None:
    """Changes row [vocab_size] in place. Repetition (CTRL, Keskar et al. 2019) counts prompt and output, presence and
    frequency (OpenAI) the output alone."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*spec.prompt_token_ids, *spec.output_token_ids}), device=row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if spec.output_token_ids and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        counted = Counter(spec.output_token_ids)
        counts = torch.tensor(list(counted.values()), dtype=row.dtype, device=row.device)
        row[list(counted)] -= params.presence_penalty + params.frequency_penalty * counts


def _with_logprobs(row: Tensor, token: int, spec: SampleSpec) -> SampledToken:
    """Adds the log-probabilities asked for, of the unmodified row [vocab_size]."""
    if spec.params.logprobs is None:
        return SampledToken(token)
    logprobs = torch.log_softmax(row, dim=-1)
    values, ids = logprobs.topk(min(spec.params.logprobs, row.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
