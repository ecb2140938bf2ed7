"""A head beside the steps of its model: its KV is written with the model's, and it guesses from what a step gave.

At each position it reads the model's hidden state there and the token behind that: one of the plan, or the one that the
step has just chosen. Behind a wrong guess both are written over. What it guesses with is kept from one step to the next
and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shared.engine.plan import NoToken, SampledToken, StepPlan
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.logprobs import TopLogprobs
from shared.engine.runner.sampler import PendingStep, Sampler
from shared.engine.speculation.head_model import HeadGuess, HeadModel
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView
from shared.kv.groups import KVGroups
from shared.model.decoder import Decoder


class HeadInputs(NamedTuple):
    """What a head takes over from its model's step."""

    positions: Tensor  # [num_rows] int64
    batch: AttentionBatch
    hidden: Tensor  # [num_rows, hidden_size], as the head reads it: the step's tokens, and padding behind them

    def at(self, kv_lens: tuple[int, ...]) -> HeadInputs:
        """Of a graph that was captured at other lengths: these are the sequences' now, by which attention is planned
        anew."""
        groups = tuple(replace(each, kv_lens=kv_lens, groups=()) for each in self.batch.groups)
        return self._replace(batch=replace(self.batch, kv_lens=kv_lens, groups=groups))


class Heads:
    """Part of a runner; implements `HeadRunner`. The engine thread alone calls it."""

    def __init__(self, decoder: Decoder, pool: PoolView, groups: KVGroups, link: DeviceLink, max_num_seqs: int) -> None:
        """`pool`: the runner's, of blocks with a head's layer; `groups`: of its KV."""
        assert decoder.head is not None, "no head was loaded"
        self._decoder = decoder
        self._head = decoder.head
        self._pool = pool
        self._groups = groups
        self._link = link
        self._sampler = Sampler(decoder.kernels, link, max_num_seqs)
        # Of the last step, by sequence: (position of the first row, what the head gives there [num_rows, hidden_size]).
        self._begun: dict[str, tuple[int, Tensor]] = {}
        self._newest: dict[str, Tensor] = {}  # [hidden_size], behind the newest guess

    @property
    def is_queued(self) -> bool:
        """See `HeadRunner`."""
        return self._link.is_async

    @property
    def groups(self) -> KVGroups:
        """Groups of the sequences' KV blocks."""
        return self._groups

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sequence: the model has positions for no more."""
        return self._decoder.config.max_position_embeddings

    def follow(self, plan: StepPlan, step: HeadInputs, tokens: Tensor) -> None:
        """Writes the head's KV of a step's tokens. tokens: [num_samples] int64, what was chosen, below 0 where nothing
        can be."""
        items, send = plan.sequences, self._link.send
        behind = [token for item in items for token in (*item.token_ids[1:], item.following)]
        behind += [0] * (step.hidden.shape[0] - len(behind))
        ends = list(accumulate(len(item.token_ids) for item in items))
        chosen = [row for item, end in zip(items, ends, strict=True) for row in range(end - len(item.samples), end)]
        token_ids = send(torch.tensor(behind, dtype=torch.int64))
        rows = send(torch.tensor(chosen, dtype=torch.int64))
        token_ids.index_copy_(0, rows, tokens.clamp(min=0))
        wanted = rows if plan.begins_guesses else rows[:0]
        batch = self._head.own_batch(step.batch)
        found = self._head.forward(token_ids, step.hidden, step.positions, self._pool, batch, wanted)
        self._begun, self._newest = {}, {}
        if not plan.begins_guesses:
            return
        place = 0
        for item in items:
            count = len(item.samples)
            if count:
                self._begun[item.sequence_id] = item.end - count, found[place : place + count]
            place += count

    def is_ready(self, sequence_id: str, position: int) -> bool:
        """See `HeadRunner`."""
        first, rows = self._begun.get(sequence_id, (0, None))
        return rows is not None and first <= position < first + rows.shape[0]

    def guess(self, guesses: Sequence[HeadGuess]) -> list[tuple[SampledToken | NoToken, ...]]:
        """See `HeadRunner`. Host and device meet once, at the end."""
        states = self._states(guesses)
        names, send = [guess.sequence_id for guess in guesses], self._link.send
        by_place = list(zip(*(guess.specs for guess in guesses), strict=True))
        tokens: list[Tensor] = []
        logprobs: list[TopLogprobs | None] = []
        for place, specs in enumerate(by_place):
            if tokens:
                states = self._forward(guesses, place, tokens[-1].clamp(min=0), states)
            logits = self._head.logits(states)
            tokens.append(self._sampler.sample(logits, names, specs))
            logprobs.append(TopLogprobs.of(logits, tokens[-1], specs, send))
        self._newest |= dict(zip(names, states, strict=True))
        in_a_row = [spec for specs in by_place for spec in specs]
        step = PendingStep(torch.cat(tokens), TopLogprobs.joined(logprobs), in_a_row, self._link, lambda _row: None)
        sampled = step.result().sampled
        return [sampled[row :: len(guesses)] for row in range(len(guesses))]

    def warm_up(self, plan: StepPlan) -> None:
        """Two guesses behind a step that began some, so that their kernels are compiled."""
        groups, items = self._groups, plan.sequences
        room = min(len(item.block_ids) // groups.size * groups.block_size - item.end for item in items)
        if room > 0:
            self.guess(
                [
                    HeadGuess(item.sequence_id, item.end - 1, None, item.samples[-1:] * 2, item.block_ids)
                    for item in items
                ]
            )

    def _states(self, guesses: Sequence[HeadGuess]) -> Tensor:
        """[num_guesses, hidden_size], what each first guess is chosen from."""
        behind = [guess for guess in guesses if guess.token_id is not None]
        if behind:
            token_ids = self._link.send(torch.tensor([guess.token_id for guess in behind], dtype=torch.int64))
            states = torch.stack([self._newest[guess.sequence_id] for guess in behind])
            rows = self._forward(behind, 0, token_ids, states)
            self._newest |= {guess.sequence_id: row for guess, row in zip(behind, rows, strict=True)}
        found = []
        for guess in guesses:
            if guess.token_id is None:
                first, rows = self._begun[guess.sequence_id]
                found.append(rows[guess.position - first])
            else:
                found.append(self._newest[guess.sequence_id])
        return torch.stack(found)

    def _forward(self, guesses: Sequence[HeadGuess], ahead: int, token_ids: Tensor, states: Tensor) -> Tensor:
        """[num_guesses, hidden_size]: one position more of each, `ahead` of its own, of the guess that came last."""
        send, positions = self._link.send, [guess.position + ahead for guess in guesses]
        batch = self._sent(self._head.batch_of(positions, [guess.block_ids for guess in guesses], self._groups))
        at = send(torch.tensor(positions, dtype=torch.int64))
        rows = send(torch.arange(len(guesses), dtype=torch.int64))
        return self._head.forward(token_ids, states, at, self._pool, batch, rows)

    def _sent(self, batch: AttentionBatch) -> AttentionBatch:
        if not self._link.is_async:
            return batch
        tables = batch.block_tables
        slots, query_start, seq_lens, flat = self._link.send_all(
            [part.reshape(-1).numpy() for part in (batch.slots, batch.query_start, batch.seq_lens, tables)]
        )
        sent = replace(
            batch,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=flat.view(tables.shape),
            slots=slots,
            groups=(),
        )
        return sent.with_groups(()) if batch.groups else sent


def open_heads(heads: Heads) -> HeadModel:
    """The guessing model over a head."""
    return HeadModel(heads, heads.groups, heads.most_tokens)
