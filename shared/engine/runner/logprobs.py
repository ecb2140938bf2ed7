"""Log-probabilities of the unmodified logits: of the tokens that rows choose, and of a prompt's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.plan import PlannedSequence, SampledToken, SampleSpec
from shared.engine.runner.device_link import DeviceLink

Send = Callable[[Tensor], Tensor]
"""Brings a host tensor to the device of the logits."""
_MORE = 32
"""Tokens beyond those that are asked for: of as many equal ones, those of the lowest ids are found."""


def likeliest(logprobs: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` largest values of each row of [num_rows, vocab_size], falling, and their ids; of equal ones the lower
    id comes first, which `topk` decides by what else is in the batch."""
    values, ids = logprobs.topk(min(most + _MORE, logprobs.shape[1]) if most else 0)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :most], ids.gather(1, order)[:, :most]


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """Log-probabilities of the unmodified logits, for the rows that ask for some."""

    chosen: Tensor  # [num_asking] fp32, of the chosen token
    values: Tensor  # [num_asking, most] fp32, falling
    ids: Tensor  # [num_asking, most] int64

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, specs: Sequence[SampleSpec], send: Send) -> TopLogprobs | None:
        """Computes them from `logits` [num_rows, vocab_size] and the chosen `tokens` [num_rows]; None where no row asks
        for any."""
        asking = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
        if not asking:
            return None
        rows = send(torch.tensor(asking))
        logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1)
        most = min(max(specs[i].params.logprobs or 0 for i in asking), logits.shape[1])
        values, ids = likeliest(logprobs, most)
        chosen = logprobs.gather(1, tokens.index_select(0, rows).clamp(min=0)[:, None])[:, 0]
        return cls(chosen, values, ids)

    @classmethod
    def joined(cls, parts: Sequence[TopLogprobs | None]) -> TopLogprobs | None:
        """Those of several steps' rows, one step after the other; all ask for as many tokens. None where none asks."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return cls(*(torch.cat(each) for each in zip(*(vars(part).values() for part in found), strict=True)))


def logit_rows(items: Sequence[PlannedSequence]) -> list[int]:
    """Rows of the step's tokens whose logits are wanted, rising: those that tell of targets, and the last ones
    that a token is chosen for."""
    rows: list[int] = []
    end = 0
    for item in items:
        begin, end = end, end + len(item.token_ids)
        if item.targets:
            rows += range(begin, begin + len(item.targets))
        rows += range(end - len(item.samples), end)
    return rows


def split(logits: Tensor, items: Sequence[PlannedSequence], link: DeviceLink) -> tuple[Tensor, PendingTargets | None]:
    """Splits `logits` [num_logits, vocab_size] of `logit_rows` into those to sample from and the targets'
    log-probabilities."""
    if not any(item.targets for item in items):
        return logits, None
    is_sampled = [flag for item in items for flag in [False] * len(item.targets) + [True] * len(item.samples)]
    sampled = link.send(torch.tensor([row for row, flag in enumerate(is_sampled) if flag], dtype=torch.int64))
    others = link.send(torch.tensor([row for row, flag in enumerate(is_sampled) if not flag]))
    return logits.index_select(0, sampled), PendingTargets.of(logits.index_select(0, others), items, link)


@dataclass(frozen=True, eq=False, slots=True)
class PendingTargets:
    """Values on their way to the host."""

    items: tuple[PlannedSequence, ...]  # those with targets
    chosen: Tensor  # [num_targets] fp32
    values: Tensor  # [num_targets, most] fp32, falling
    ids: Tensor  # [num_targets, most] int64

    @classmethod
    def of(cls, logits: Tensor, items: Sequence[PlannedSequence], link: DeviceLink) -> PendingTargets:
        """The targets' log-probabilities, from `logits` [num_targets, vocab_size], a row for each target."""
        asking = tuple(item for item in items if item.targets)
        targets = link.send(torch.tensor([token_id for item in asking for token_id in item.targets]))
        logprobs = torch.log_softmax(logits, dim=-1)
        most = min(max(item.num_alternatives for item in asking), logits.shape[1])
        values, ids = likeliest(logprobs, most)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        return cls(asking, link.fetch(chosen), link.fetch(values), link.fetch(ids))

    def result(self) -> tuple[tuple[SampledToken, ...], ...]:
        """For each sequence with targets one entry a target; the step is done."""
        rows = zip(self.chosen.tolist(), self.values.tolist(), self.ids.tolist(), strict=True)
        return tuple(
            tuple(
                _entry(token_id, next(rows), item.num_alternatives)
                for token_id in item.targets
            )
            for item in self.items
        )  # fmt: skip


def _entry(token_id: int, row: tuple[float, list[float], list[int]], count: int) -> SampledToken:
    logprob, values, ids = row
    return SampledToken(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
