"""Over many seeds, tokens that were guessed are spread as the model's probabilities say, not as guesses are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shared.engine.messages import AddSequence
from shared.engine.runner.runner import RunnerConfig
from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft
from shared.engine.speculation.speculator import MOST_ROWS, Speculator
from shared.kernels.batch import AttentionBatch
from shared.model.decoder import Decoder
from tests.demo import DEMO
from tests.integration.engine.engine_run import BLOCK_SIZE, EngineRun
from tests.unit.kernels.attention_case import pool_of_nan

PROMPT = [5 + (i * 7) % 300 for i in range(8)]
TOP_K, TEMPERATURE, LENGTH = 4, 1.3, 3
BATCH = MOST_ROWS // (LENGTH - 1)  # all have guesses behind their first token


class OneAnswer:
    """Guesses that every answer is this one."""

    method = "one"

    def __init__(self, answer: tuple[int, ...]) -> None:
        self._answer = answer

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        rest = self._answer[sequence.num_output_tokens :][:most]
        return Draft(rest, (1.0,) * len(rest))

    def forget(self, sequence_id: str) -> None:
        pass


class Exact:
    """The model's own probabilities, each answer computed by itself."""

    def __init__(self) -> None:
        self._decoder = Decoder.load(DEMO, torch.float32, "cpu")

    def next(self, answer: tuple[int, ...], temperature: float) -> dict[int, float]:
        """Of the token behind an answer, of the TOP_K likeliest."""
        tokens, config = [*PROMPT, *answer], self._decoder.config
        table = list(range(-(-len(tokens) // BLOCK_SIZE)))
        pool = pool_of_nan(
            (len(table), config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim), torch.float32
        )
        batch = AttentionBatch.from_lists([len(tokens)], [len(tokens)], [table], BLOCK_SIZE)
        last = torch.tensor([len(tokens) - 1])
        with torch.inference_mode():
            logits = self._decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), pool, batch, last)[0]
        top = logits.double().topk(TOP_K)
        return dict(zip(top.indices.tolist(), (top.values / temperature).softmax(0).tolist(), strict=True))

    def answers(self, temperature: float) -> dict[tuple[int, ...], float]:
        """All of LENGTH tokens."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(LENGTH):
            found = {
                (*answer, token): chance * of_token
                for answer, chance in found.items()
                for token, of_token in self.next(answer, temperature).items()
            }
        return found


def at(place: int, chances: dict[tuple[int, ...], float]) -> dict[int, float]:
    """Of the tokens at one place of the answers."""
    found: Counter[int] = Counter()
    for answer, chance in chances.items():
        found[answer[place]] += chance
    return dict(found)


def p_value(counts: Counter[int], chances: dict[int, float]) -> float:
    """Pearson's: how likely so uneven counts are, or more uneven ones. Rare tokens are counted together."""
    total = counts.total()
    assert set(counts) <= set(chances)
    frequent = {token for token, chance in chances.items() if chance * total >= 20}
    cells = [(counts[token], chances[token] * total) for token in sorted(frequent)]
    rest = sum(chance for token, chance in chances.items() if token not in frequent) * total
    if rest > 0:
        cells.append((sum(count for token, count in counts.items() if token not in frequent), rest))
    square = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "num_seeds", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_guessed_tokens_are_spread_as_the_model_says(num_seeds):
    exact = Exact()
    chances = exact.answers(TEMPERATURE)
    guessed = max(chances, key=chances.__getitem__)
    speculator = Speculator([OneAnswer(guessed)], num_guesses=LENGTH)
    counts: list[Counter[int]] = [Counter() for _ in range(LENGTH)]
    config = RunnerConfig(max_num_seqs=BATCH)
    with EngineRun(
        DEMO, num_blocks=4 * BATCH, max_num_batched_tokens=BATCH * BLOCK_SIZE, config=config, speculator=speculator
    ) as run:
        for first in range(0, num_seeds, BATCH):
            sequences = [
                run.sequence(PROMPT, LENGTH, seed=seed, temperature=TEMPERATURE, top_k=TOP_K)
                for seed in range(first, min(first + BATCH, num_seeds))
            ]
            for sequence in sequences:
                run.engine.submit(AddSequence(sequence))
            for answer in run.collect([sequence.sequence_id for sequence in sequences]):
                for place, token in enumerate(answer):
                    counts[place][token] += 1
    assert 0 < speculator.counters.num_accepted["one"] < speculator.counters.num_guesses["one"]
    others = exact.answers(1.1 * TEMPERATURE)
    for place, found in enumerate(counts):
        assert found.total() == num_seeds
        assert p_value(found, at(place, chances)) > 1e-3, f"place {place}"
        if num_seeds >= 100_000:
            assert p_value(found, at(place, others)) < 1e-6, "a temperature a tenth higher shows"
