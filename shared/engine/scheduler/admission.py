"""Whether one more sequence may hold blocks: room in the batch and in the pool. Pure policy, part of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.scheduler.batch_limit import BatchLimit
from shared.engine.scheduler.growth import GrowthReserve
from shared.engine.sequence import EngineSequence, Goal
from shared.errors import Overloaded
from shared.kv.pool import BlockPool


class Admission:
    """`holders` are the sequences that hold blocks already, running or receiving."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, growth: GrowthReserve, batch_limit: BatchLimit) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._growth = growth
        self._batch_limit = batch_limit

    def ended(self, sequence: EngineSequence) -> None:
        """Learns from a sequence that held blocks and will want no more."""
        self._growth.ended(sequence)

    def growth(self, holders: Sequence[EngineSequence]) -> int:
        """Blocks that the holders are expected to take beyond those they hold."""
        return self._growth.num_blocks(holders)

    def check_batch(self, newcomer: EngineSequence, holders: Sequence[EngineSequence]) -> None:
        """Raises Overloaded where the batch has no place for the newcomer."""
        num_seqs = len(holders) + 1
        if num_seqs > self._max_num_seqs:
            raise Overloaded(
                f"all {self._max_num_seqs} places of the batch are taken",
                field="max_num_seqs",
                limit=self._max_num_seqs,
            )
        if newcomer.goal is Goal.FIRST_TOKEN or self._batch_limit.target_s == 0:
            return
        if not self._batch_limit.admits(num_seqs, newcomer.num_tokens + sum(s.num_tokens for s in holders)):
            target_ms = self._batch_limit.target_s * 1e3
            raise Overloaded(
                f"a step of {num_seqs} sequences is not known to take at most {target_ms:g} ms",
                field="tpot_target_ms",
                limit=target_ms,
            )

    def check_blocks(
        self, newcomer: EngineSequence, num_blocks: int, missing: int, holders: Sequence[EngineSequence]
    ) -> None:
        """Raises Overloaded where `missing` of the newcomer's `num_blocks` may not be taken: what all are expected to
        grow must find room too. One that would have the pool to itself is not held to that: it could never start.
        """
        later = self._growth.of_newcomer(newcomer, num_blocks) if holders else 0
        free = self._pool.num_free - (self.growth(holders) if holders else 0)
        if missing + later > free:
            free = max(0, free)
            raise Overloaded(
                f"needs {missing} more KV blocks and probably {later} later, {free} are free beside what running "
                f"requests will take",
                field="num_kv_blocks",
                limit=free,
            )
