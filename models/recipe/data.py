"""Token rows for training: the corpus in book order, cut at new offsets each epoch, with dialogues mixed in."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe.chat import BOS, EOS, Dialogues, render
from models.recipe.corpus import Chapter
from models.recipe.vocabulary import token_id


@dataclass(frozen=True)
class Split:
    """Chapters for training and whole chapters held out from all training, also the tokenizer's."""

    train: list[Chapter]
    held_out: list[Chapter]


def split(chapters: Sequence[Chapter], every: int = 40) -> Split:
    """Hold out each ``every``-th chapter of at least 1500 characters."""
    picked = {c.title for c in chapters[every // 2 :: every] if len(c.text) >= 1500}
    return Split([c for c in chapters if c.title not in picked], [c for c in chapters if c.title in picked])


def chapter_text(chapter: Chapter) -> str:
    """The chapter as one document with BOS and EOS."""
    return BOS + chapter.text + EOS


class Rows:
    """Endless batches of ``[batch, length + 1]`` token ids; deterministic for a seed."""

    def __init__(self, tokenizer: Tokenizer, chapters: Sequence[Chapter], chat_share: float, seed: int) -> None:
        self.tokenizer, self.chat_share = tokenizer, chat_share
        self.bos = token_id(tokenizer, BOS)
        self.random = random.Random(seed)
        self.dialogues = Dialogues(chapters, seed + 1)
        encoded = tokenizer.encode_batch([chapter_text(c) for c in chapters], add_special_tokens=False)
        self.stream = [token for document in encoded for token in document.ids]
        self.chat_buffer: list[int] = []

    def batches(self, batch: int, length: int) -> Iterator[Tensor]:
        """Batches of one length; a row that starts inside a chapter has BOS in place of its first token."""
        while True:
            offset = self.random.randrange(length)
            starts = list(range(offset, len(self.stream) - length - 1, length))
            self.random.shuffle(starts)
            rows: list[list[int]] = []
            for start in starts:
                rows.append([self.bos, *self.stream[start + 1 : start + length + 1]])
                if self.random.random() < self.chat_share / (1 - self.chat_share):
                    rows.append(self._chat_row(length))
                while len(rows) >= batch:
                    yield torch.tensor(rows[:batch])
                    del rows[:batch]

    def _chat_row(self, length: int) -> list[int]:
        self.chat_buffer.clear()
        while len(self.chat_buffer) < length + 1:
            dialogue = render(self.dialogues.draw())
            self.chat_buffer += self.tokenizer.encode(dialogue, add_special_tokens=False).ids
        return self.chat_buffer[: length + 1]
