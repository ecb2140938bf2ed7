"""Drafters that no answer may depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import Draft


class HostileDrafter:
    """Guesses by chance, sometimes more than it may, behind an answer's end too. What it says of its guesses is
    wrong."""

    method = "hostile"

    def __init__(self, seed: int = 0, tokens: int = 4) -> None:
        self._random = Random(seed)
        self._tokens = tokens

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        count = self._random.choice([0, 1, 2, most, most + 3])
        return Draft(tuple(self._random.randrange(1, self._tokens) for _ in range(count)), (1.0,) * count)

    def forget(self, sequence_id: str) -> None:
        pass


class KnowingDrafter:
    """Knows every answer, by its prompt, and may guess something else instead."""

    method = "knowing"

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], list[int]],
        twist: Callable[[int, int], int] = lambda _place, token: token,
    ) -> None:
        """`twist` makes a guess of the right token `place` steps behind the next one."""
        self._answers = answers
        self._twist = twist

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        rest = self._answers.get(prompt, [])[sequence.num_output_tokens :]
        # Behind the answer's end, the prompt's tokens.
        tokens = [self._twist(place, token) for place, token in enumerate([*rest, *prompt][:most])]
        return Draft(tuple(tokens), (1.0,) * len(tokens))

    def forget(self, sequence_id: str) -> None:
        pass
