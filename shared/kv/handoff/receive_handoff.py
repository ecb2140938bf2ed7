"""One hand-off as its receiver sees it: receives posted into pool memory, then the trailer."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import TransferFailed
from shared.kv.handoff.receiving import receive_trailer
from shared.kv.transfer import Incoming, KVTransfer


@dataclass(frozen=True, slots=True)
class ReceivedHandoff:
    """A hand-off that ended as it should: every needed block is in place (its checksum is not checked yet)."""

    first_token: int
    checksums: dict[int, int]
    """By block index."""
    finished: bool
    """The first token ended the request."""


async def receive(
    transfer: KVTransfer,
    ticket: int,
    incoming: Incoming,
    needed: frozenset[int],
    num_tokens: int,
    timeout_s: float,
) -> ReceivedHandoff | None:
    """Waits for the trailer and for every block it names; None where the sender gave up.

    However this ends, also by an exception or a cancel of the task, no receive of the ticket can write to the pool
    any more when it does, unless it raises MemoryLost. Raises TransferFailed.
    """
    trailer = await receive_trailer(transfer, ticket, incoming, timeout_s)
    if trailer.aborted:
        return None
    missing = needed - set(trailer.block_indexes)
    if missing or trailer.num_computed_tokens != num_tokens:
        raise TransferFailed(
            f"the hand-off ended with {len(missing)} of {len(needed)} blocks missing and "
            f"{trailer.num_computed_tokens} of {num_tokens} tokens computed"
        )
    checksums = dict(zip(trailer.block_indexes, trailer.checksums, strict=True))
    return ReceivedHandoff(trailer.first_token, checksums, trailer.finished)
