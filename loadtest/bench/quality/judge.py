"""Forms of a model beside the plain model: perplexity, divergence, equal choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.bench.quality.reader import Reader, Texts, log_probabilities


@dataclass(frozen=True)
class Quality:
    """One form's figures; all but the first two are beside the plain model."""

    name: str
    weight_bytes: int
    """Bytes of the projections as they lie in memory."""
    perplexity: float
    change: float
    """Relative change of the perplexity."""
    kl: float
    """Kullback-Leibler divergence of its next tokens' distribution from the plain model's, mean in nats a token."""
    top1: float
    """Share of tokens for which both find the same one the most likely."""
    greedy: float
    """Share of the tokens of greedy answers before the first that differs."""


class Judge:
    """Compares forms of a model with the plain one, whose log probabilities lie in a file."""

    def __init__(self, plain: Reader, texts: Texts, vocab_size: int, scratch: Path) -> None:
        """Reads all texts with the plain model; `scratch`: a folder for the file."""
        self._texts = texts
        shape = (texts.num_predicted, vocab_size)
        self._plain = torch.from_file(str(scratch / "plain"), shared=True, size=math.prod(shape)).view(shape)
        total, first = 0.0, 0
        for found, tokens in log_probabilities(plain, texts):
            self._plain[first : first + len(tokens)] = found
            total -= float(found.gather(1, tokens[:, None]).double().sum())
            first += len(tokens)
        self._loss = total / texts.num_predicted
        self._answers = [plain.greedy(prompt, texts.num_greedy) for prompt in texts.prompts]

    def quality(self, name: str, weight_bytes: int, reader: Reader) -> Quality:
        """A form's figures."""
        total, kl, same, first = 0.0, 0.0, 0, 0
        for found, tokens in log_probabilities(reader, self._texts):
            plain = self._plain[first : first + len(tokens)]
            total -= float(found.gather(1, tokens[:, None]).double().sum())
            # A distribution has no mass where its logarithm is -inf, and 0 times that would be no number.
            kl += float((plain.exp() * (plain - found)).nan_to_num(nan=0.0).double().sum())
            same += int((plain.argmax(1) == found.argmax(1)).sum())
            first += len(tokens)
        count, texts = self._texts.num_predicted, self._texts
        answers = [reader.greedy(prompt, texts.num_greedy) for prompt in texts.prompts]
        equal = sum(_num_equal(a, b) for a, b in zip(answers, self._answers, strict=True))
        return Quality(
            name,
            weight_bytes,
            perplexity=math.exp(total / count),
            change=math.expm1(total / count - self._loss),
            kl=kl / count,
            top1=same / count,
            greedy=equal / (len(answers) * texts.num_greedy),
        )


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
