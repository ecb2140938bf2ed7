"""A backend's ops from logits to tokens. The rules for all ops are in `backend.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shared.kernels.sampling.history import Penalties, TokenHistory
from shared.kernels.sampling.rows import SamplingRows


class SamplingOps(Protocol):
    """Operations from logits to tokens."""

    def sample_tokens(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token for each row of logits, by temperature, min-p, top-k and top-p, in this order.

        Of equally likely tokens those with lower ids are kept first. The tokens that remain race: each has an
        exponentially distributed time, a function of (seed, position, token id) alone, and the one with the highest
        quotient of probability and time is chosen, of equal ones the lowest id. So each is chosen as often as it is
        likely, and two models whose probabilities are near choose alike. Temperature 0 takes the likeliest token.

        Args:
            logits: [num_rows, vocab_size] fp32, contiguous, penalties already applied, -inf where banned.
            rows: how to choose in each row.

        Returns:
            [num_rows] int64; -1 for a row with a NaN or +inf, without any finite logit, or with a temperature so low
            that the quotient overflows.
        """
        ...

    def penalize(self, logits: Tensor, history: TokenHistory, penalties: Penalties) -> None:
        """Lower the logits of tokens that their rows' sequences have had; those of all other tokens stay as they are.

        Repetition (CTRL, Keskar et al. 2019) divides positive logits of prompt and output, and multiplies the others.
        Presence and frequency (OpenAI) are then taken from those of the output: once, and as often as it has them.

        Args:
            logits: [num_rows, vocab_size] fp32, contiguous, changed in place.
            history: of the sequences.
            penalties: of the rows.
        """
        ...

    def count_tokens(self, history: TokenHistory, slots: Tensor, tokens: Tensor) -> None:
        """Add a token each to the output of some sequences.

        Args:
            history: changed in place.
            slots: [num_rows] int64, no two equal but those of -1, for rows that are not counted.
            tokens: [num_rows] int64; -1 where there is none.
        """
        ...

    def mask_tokens(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf; those of all other tokens stay as they are.

        Args:
            logits: [num_rows, vocab_size] fp32, contiguous, changed in place.
            masks: [num_masks, num_words] int32, contiguous, num_words at least vocab_size / 32 rounded up; bit i % 32
                of word i // 32 is set where token id i is allowed.
            rows: [num_masks] int64, the row that each mask is for, no two equal.
        """
        ...

    def greedy_tokens(self, logits: Tensor, masks: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """The token with the highest logit in each row, of equal ones the lowest id; in some rows among the tokens that
        are allowed.

        Args:
            logits: [num_rows, vocab_size] fp32, contiguous.
            masks: as for `mask_tokens`, or None where no row has one.
            rows: as for `mask_tokens`, given with masks.

        Returns:
            [num_rows] int64; -1 for a row with a NaN or +inf, also at a token that is not allowed, and where no allowed
            token has a finite logit.
        """
        ...
