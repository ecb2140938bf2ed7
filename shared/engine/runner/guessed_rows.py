"""What guesses change for the sequences whose earlier tokens change their next ones: each guessed position has the
tokens before it, those that are guessed among them, as if they had been chosen in steps of their own.

Nothing waits for the host: which guesses were right is found on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.runner.device_link import DeviceLink
from shared.kernels.sampling.history import Penalties, TokenHistory
from shared.kernels.sampling_ops import SamplingOps

NO_GUESS = -1
"""Stands for the guess before a row that is behind a sequence's newest token."""


@dataclass(frozen=True, eq=False)
class GuessedRows:
    """The rows of one step's sequences that are followed, of which some are behind guesses."""

    slots: Tensor  # [num_sequences] int64, theirs in `SequenceHistories`
    rows: Tensor  # [num_sequences, most + 1] int64, of the step, the last one again where a sequence has fewer
    guesses: Tensor  # [num_sequences, most] int64, NO_GUESS where a sequence has fewer
    sequences: Tensor  # [num_rows] int64, index of the row's sequence among these; 0 where it is none of these
    counts: Tensor  # [num_rows] int64, the row's guesses before it: the first ones of its sequence
    behind: Tensor  # [num_behind] int64, rows with a guess before them

    @classmethod
    def of(cls, slots: Mapping[int, int], guesses: Sequence[int], link: DeviceLink) -> GuessedRows | None:
        """`slots`: by row, rising, the slot of its sequence, for the rows that are followed. `guesses`: of every row of
        the step, the guess right before it. None where no row that is followed has any."""
        behind = [row for row in slots if guesses[row] != NO_GUESS]
        if not behind:
            return None
        rows: list[list[int]] = []
        sequences, counts = [0] * len(guesses), [0] * len(guesses)
        for row in slots:
            if guesses[row] == NO_GUESS:
                rows.append([])
            sequences[row], counts[row] = len(rows) - 1, len(rows[-1])
            rows[-1].append(row)
        most = max(map(len, rows))
        padded = [of_one + of_one[-1:] * (most - len(of_one)) for of_one in rows]
        guessed = [[guesses[row] for row in of_one[1:]] + [NO_GUESS] * (most - len(of_one)) for of_one in rows]
        firsts = [slots[of_one[0]] for of_one in rows]
        return cls(*(link.send(torch.tensor(each)) for each in (firsts, padded, guessed, sequences, counts, behind)))

    def penalize(self, ops: SamplingOps, logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
        """`SamplingOps.penalize`, as if the guesses before each row were tokens of its sequence's output."""
        sequences, counts = self.sequences.index_select(0, self.behind), self.counts.index_select(0, self.behind)
        tokens = self.guesses.index_select(0, sequences)
        is_before = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        # In place of those that are not before a row stands the first one, which always is: it is changed alike.
        tokens = torch.where(is_before, tokens, tokens[:, :1])
        slots = penalties.slots.index_select(0, self.behind)
        plain = logits.index_select(0, self.behind).gather(1, tokens)
        ops.penalize(logits, history, penalties)
        times = ((tokens[:, :, None] == tokens[:, None, :]) & is_before[:, None, :]).sum(dim=2)
        times += _counted(history, slots.clamp(min=0), tokens)
        own = torch.arange(tokens.shape[0], device=tokens.device)
        assert tokens.shape[1] < 32, "one word has a bit for each guess"
        seen = torch.full((tokens.shape[0], 1), (1 << tokens.shape[1]) - 1, dtype=torch.int32, device=tokens.device)
        factors = (penalties.repetition, penalties.presence, penalties.frequency)
        ops.penalize(
            plain,
            TokenHistory(seen, times.to(torch.int32)),
            Penalties(torch.where(slots < 0, -1, own), *(each.index_select(0, self.behind) for each in factors)),
        )
        before = logits.index_select(0, self.behind).gather(1, tokens)
        logits[self.behind[:, None], tokens] = torch.where(slots[:, None] < 0, before, plain)

    def chosen(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that were chosen for each sequence's rows [num_sequences, most + 1], and how many of them count
        [num_sequences]. tokens: [num_rows] int64."""
        found = tokens[self.rows]
        right = (found[:, :-1] == self.guesses) & (self.guesses != NO_GUESS)
        return found, 1 + right.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def count(self, ops: SamplingOps, history: TokenHistory, penalties: Penalties, tokens: Tensor) -> None:
        """`SamplingOps.count_tokens` of those that count."""
        found, counts = self.chosen(tokens)
        slots = penalties.slots.index_select(0, self.rows[:, 0])
        for place in range(found.shape[1]):
            ops.count_tokens(history, torch.where(place < counts, slots, -1), found[:, place].contiguous())

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The guesses of the sequences of `rows` [n, most], and how many of them are before each row [n]."""
        return self.guesses.index_select(0, self.sequences.index_select(0, rows)), self.counts.index_select(0, rows)


def _counted(history: TokenHistory, slots: Tensor, tokens: Tensor) -> Tensor:
    """How often the outputs of `slots` [n] have each of `tokens` [n, most]."""
    words = history.seen[slots[:, None], tokens // 32]
    return torch.where((words >> (tokens % 32).to(torch.int32)) & 1 == 1, history.counts[slots[:, None], tokens], 0)
