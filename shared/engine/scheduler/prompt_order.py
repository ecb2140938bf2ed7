"""Which prompt is computed next. Pure policy, asked by the scheduler at every step."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.sequence import EngineSequence, Status


class PromptOrder:
    """Shortest remaining first, but no prompt is overtaken later than `max_overtaken_s` after its arrival.

    Serving the shortest first gives the lowest mean time to first token, and would starve a long prompt under load.
    So those that have waited their time go before all that have not, in order of arrival; and before these go
    preempted sequences, whose clients already read tokens.
    """

    def __init__(self, max_overtaken_s: float) -> None:
        """Seconds; 0 = first come, first served."""
        self._max_overtaken_s = max_overtaken_s

    def sort(
        self, running: Sequence[EngineSequence], waiting: Sequence[EngineSequence], now_s: float
    ) -> list[EngineSequence]:
        """Both in one order: prompts that are partly computed, and those that wait, each given by arrival and
        preempted ones first."""
        if self._max_overtaken_s == 0:
            return [*running, *waiting]
        return sorted((*running, *waiting), key=lambda sequence: self._key(sequence, now_s))

    def _key(self, sequence: EngineSequence, now_s: float) -> tuple[int, int, int]:
        if sequence.started and sequence.status is Status.WAITING:
            return (0, sequence.arrival, 0)
        if now_s - sequence.arrived_s >= self._max_overtaken_s:
            return (1, sequence.arrival, 0)
        return (2, sequence.num_uncomputed_tokens, sequence.arrival)
