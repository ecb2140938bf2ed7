"""The tokenizer, and rows of tokens: the corpus in book order, cut anew each epoch, with dialogues mixed in."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from models.recipe.chat import BOS, EOS, SPECIAL_TOKENS, TEMPLATE, Dialogues, render
from models.recipe.corpus import Chapter

SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's, digits by three


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the BPE merges. The first ids are the special tokens; encoding prepends BOS; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token; ValueError if it does not exist."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return found


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_position: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
