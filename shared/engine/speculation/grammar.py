"""Guesses the tokens of a structured answer that its structure leaves no choice about, such as the name of the next
property.

The structure forces bytes, and a model may write them in other tokens than the usual ones: so these are guesses too, of
which it is learned how often they are right.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.engine.sequence import EngineSequence
from shared.engine.speculation.drafter import NO_DRAFT, Draft
from shared.errors import Overloaded
from shared.structure.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

FIRST_CHANCE, FIRST_WEIGHT = 0.9, 8.0
"""Chance of one forced token, before any was seen; and the observations that this counts for."""
KEPT = 0.98
"""Weight that is left of what was seen, one observation later."""
ENDED = "EndOfSentence"


@dataclass(slots=True)
class _Answer:
    """One sequence's answer, as far as its tokens are known."""

    token_ids: list[int]  # the sequence's own list, which grows
    prepared: Future[LLMatcher]
    matcher: LLMatcher | None = None
    num_seen: int = 0  # of the answer's tokens
    forced: list[int] = field(default_factory=list)  # behind those
    is_broken: bool = False
    right: float = 0.0
    seen: float = 0.0


class GrammarDrafter:
    """See `Drafter`."""

    method = "grammar"

    def __init__(self, prepare: Callable[[StructuredOutput], Future[LLMatcher]]) -> None:
        """`prepare`: a structure's matcher before its first token, which is copied; see `StructureCompiler`."""
        self._prepare = prepare
        self._answers: dict[str, _Answer] = {}

    def propose(self, sequence: EngineSequence, most: int) -> Draft:
        """See `Drafter`. Nothing while the structure is being compiled."""
        structure = sequence.sampling.structured_output
        if structure is None:
            return NO_DRAFT
        answer = self._answers.get(sequence.sequence_id)
        if answer is None or answer.token_ids is not sequence.token_ids:
            try:
                answer = _Answer(sequence.token_ids, self._prepare(structure))
            except Overloaded:
                return NO_DRAFT
            self._answers[sequence.sequence_id] = answer
        if answer.is_broken or not self._catch_up(answer, sequence.num_prompt_tokens):
            return NO_DRAFT
        chance = (answer.right + FIRST_WEIGHT * FIRST_CHANCE) / (answer.seen + FIRST_WEIGHT)
        tokens = tuple(answer.forced[:most])
        return Draft(tokens, tuple(chance ** (place + 1) for place in range(len(tokens))))

    def forget(self, sequence_id: str) -> None:
        """See `Drafter`."""
        self._answers.pop(sequence_id, None)

    @staticmethod
    def _catch_up(answer: _Answer, num_prompt_tokens: int) -> bool:
        """Takes in the tokens that came since the last call; False where nothing is known of what follows."""
        if answer.matcher is None:
            if not answer.prepared.done():
                return False
            if answer.prepared.exception() is not None:  # the runner says so to the client
                answer.is_broken = True
                return False
            answer.matcher = answer.prepared.result().deep_copy()
        matcher, new = answer.matcher, answer.token_ids[num_prompt_tokens + answer.num_seen :]
        if not new and answer.num_seen:
            return True
        for token_id, forced in zip(new, answer.forced, strict=False):
            answer.right = KEPT * answer.right + (token_id == forced)
            answer.seen = KEPT * answer.seen + 1.0
            if token_id != forced:
                break
        answer.num_seen += len(new)
        answer.forced = []
        if new and (matcher.stop_reason() == ENDED or not matcher.consume_tokens(new)):
            answer.is_broken = True
            return False
        if not matcher.is_stopped():
            answer.forced = matcher.compute_ff_tokens()
        return True
