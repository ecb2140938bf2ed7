"""Texts cut into windows, and a decoder that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import PoolView, dtype_name
from shared.model.decoder import Decoder
from shared.model.text.tokenizer import Tokenizer

_BLOCK_SIZE = 16
_MOST_PROMPTS = 8


@dataclass(frozen=True)
class Texts:
    """Token ids: windows that are read each by itself, and the beginnings that answers continue."""

    windows: list[list[int]]
    num_ahead: int
    """Tokens of a window that stand ahead of the text, such as BOS, which nothing predicts."""
    prompts: list[list[int]]
    num_greedy: int
    """Tokens of an answer."""

    @property
    def num_predicted(self) -> int:
        """Tokens whose probability counts."""
        return sum(len(window) - max(1, self.num_ahead) for window in self.windows)


class Reader:
    """A decoder that reads single sequences, outside of any engine."""

    def __init__(self, decoder: Decoder, kv_dtype: torch.dtype, max_tokens: int) -> None:
        """Allocates KV of `max_tokens`."""
        self._decoder = decoder
        layout = decoder.config.block_layout(_BLOCK_SIZE, dtype_name(kv_dtype))
        num_blocks = -(-max_tokens // _BLOCK_SIZE)
        self._pool = PoolView.of(torch.zeros(layout.shape(num_blocks), dtype=torch.uint8), layout)
        self._table = list(range(num_blocks))

    def logits(self, token_ids: Sequence[int], begin: int, length: int, rows: Sequence[int]) -> Tensor:
        """[len(rows), vocab_size] fp32, of those of the tokens given, which stand at `begin`, …; `length`: of the whole
        sequence, as far as it is known."""
        count, end = len(token_ids), begin + len(token_ids)
        lengths = torch.full((count,), length) if self._decoder.rotary.needs_lengths else None
        batch = AttentionBatch.from_lists([count], [end], [self._table], _BLOCK_SIZE)
        ids, places = torch.tensor(token_ids), torch.arange(begin, end)
        return self._decoder.forward(ids, places, self._pool, batch, torch.tensor(rows), lengths)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely tokens behind a prompt, one after the other."""
        found: list[int] = []
        fed, begin = list(prompt), 0
        while len(found) < num_tokens:
            logits = self.logits(fed, begin, begin + len(fed), [len(fed) - 1])
            begin += len(fed)
            fed = [int(logits[0].argmax())]
            found += fed
        return found


def texts_of(tokenizer: Tokenizer, text: str, num_tokens: int, window: int, num_greedy: int) -> Texts:
    """The text's first `num_tokens`, cut into windows. Raises ConfigError for a text that is too short."""
    ahead = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    room = window - len(ahead)
    windows = [ahead + ids[first : first + room] for first in range(0, len(ids), room)]
    windows = [each for each in windows if len(each) > max(1, len(ahead))]
    prompt_len = min(room, 32) + len(ahead)
    prompts = [each[:prompt_len] for each in windows if len(each) >= prompt_len][:_MOST_PROMPTS]
    if not prompts:
        raise ConfigError(f"the text has {len(ids)} tokens, too few to judge a model by", field="text", value=len(ids))
    return Texts(windows, len(ahead), prompts, num_greedy)


def log_probabilities(reader: Reader, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window ([num_predicted, vocab_size] fp32 of the tokens that come next, those tokens)."""
    first = max(1, texts.num_ahead)
    for window in texts.windows:
        logits = reader.logits(window[:-1], 0, len(window), range(first - 1, len(window) - 1))
        yield logits.log_softmax(1), torch.tensor(window[first:])
