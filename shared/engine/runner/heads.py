"""A head beside the steps of its model: its KV is written with the model's, and it guesses from what a step gave.

At each position it reads the model's hidden state there and the token behind that: one of the plan, or the one that the
step has just chosen. Behind a wrong guess both are written over. What it guesses with is kept from one step to the next
and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shared.engine.plan import NoToken, SampledToken, StepPlan
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.eager_steps import StepInputs
from shared.engine.runner.logprobs import TopLogprobs
from shared.engine.runner.sampler import PendingStep, Sampler
from shared.engine.speculation.head_model import HeadGuess, HeadModel
from shared.kernels.pool_view import PoolView
from shared.kv.groups import KVGroups
from shared.model.decoder import Decoder


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
    def groups(self) -> KVGroups:
        """Groups of the sequences' KV blocks."""
        return self._groups

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sequence: the model has positions for no more."""
        return self._decoder.config.max_position_embeddings

    def follow(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, tokens: Tensor) -> None:
        """Writes the head's KV of a step's tokens. hidden: [num_tokens, hidden_size], as it reads them;
        tokens: [num_samples] int64, what was chosen, below 0 where nothing can be."""
        items, send = plan.sequences, self._link.send
        behind = [token for item in items for token in (*item.token_ids[1:], item.following)]
        ends = list(accumulate(len(item.token_ids) for item in items))
        chosen = [row for item, end in zip(items, ends, strict=True) for row in range(end - len(item.samples), end)]
        token_ids = send(torch.tensor(behind, dtype=torch.int64))
        rows = send(torch.tensor(chosen, dtype=torch.int64))
        token_ids.index_copy_(0, rows, tokens.clamp(min=0))
        wanted = rows if plan.begins_guesses else rows[:0]
        batch = self._head.own_batch(inputs.batch)
        found = self._head.forward(token_ids, hidden, inputs.positions, self._pool, batch, wanted)
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

    def guess(self, guesses: Sequence[HeadGuess]) -> tuple[SampledToken | NoToken, ...]:
        """See `HeadRunner`."""
        self._compute([guess for guess in guesses if guess.token_id is not None])
        for guess in guesses:
            if guess.token_id is None:
                first, rows = self._begun[guess.sequence_id]
                self._newest[guess.sequence_id] = rows[guess.position - first]
        states = torch.stack([self._newest[guess.sequence_id] for guess in guesses])
        logits = self._head.logits(states)
        specs = [guess.spec for guess in guesses]
        tokens = self._sampler.sample(logits, [guess.sequence_id for guess in guesses], specs)
        logprobs = TopLogprobs.of(logits, tokens, specs, self._link.send)
        return PendingStep(tokens, logprobs, specs, self._link, lambda _row: None).result().sampled

    def _compute(self, guesses: Sequence[HeadGuess]) -> None:
        """One position more of each, of the guess that came last."""
        if not guesses:
            return
        send = self._link.send
        batch = self._head.batch_of(
            [guess.position for guess in guesses], [guess.block_ids for guess in guesses], self._groups
        )
        found = self._head.forward(
            send(torch.tensor([guess.token_id for guess in guesses], dtype=torch.int64)),
            torch.stack([self._newest[guess.sequence_id] for guess in guesses]),
            send(torch.tensor([guess.position for guess in guesses], dtype=torch.int64)),
            self._pool,
            batch,
            send(torch.arange(len(guesses), dtype=torch.int64)),
        )
        for guess, row in zip(guesses, found, strict=True):
            self._newest[guess.sequence_id] = row


def open_heads(heads: Heads) -> HeadModel:
    """What guesses with it."""
    return HeadModel(heads, heads.groups, heads.most_tokens)
