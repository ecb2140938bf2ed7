"""Which store node keeps which blocks: rendezvous hashing of runs. Policy only.

Highest random weight (Thaler & Ravishankar, "Using name-based mappings to increase hit rates", 1998): every node draws
a weight for every run from both their names, and the highest keeps it. All that know the same nodes agree
without messages; losing a node moves its own runs alone, evenly to the others; a new one takes only what it now keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

RUN_BLOCKS = 4
"""Neighbouring blocks of a chain that stay together. The run in which a shared system prompt ends also holds the first
blocks behind it, of all conversations, on one node: with runs of 16, 800 conversations of 16
blocks of their own left 63 % of all on one node of four, with runs of 4 it is 34 %. Longer runs ask fewer nodes for a
prefix; a node is asked once for all its runs either way."""


def run_start(index: int) -> int:
    """Place in the chain of the first block of the run that block `index` is in; the run is known by its hash."""
    return index - index % RUN_BLOCKS


def keeper(run_hash: bytes, nodes: Collection[str]) -> str:
    """The one of these nodes, at least one, that keeps the run that begins with this block. Their order is no
    matter."""
    return max(nodes, key=lambda node: (_weight(run_hash, node), node))


def by_keeper(chain: Sequence[bytes], indexes: Iterable[int], nodes: Collection[str]) -> dict[str, list[int]]:
    """These blocks of a chain, by the node that keeps them and in their order; nothing without nodes.

    `chain` are the hashes from the first block on: a block's run depends on its place.
    """
    kept: dict[str, list[int]] = {}
    start, node = -1, ""
    for index in indexes if nodes else ():
        if run_start(index) != start:
            start = run_start(index)
            node = keeper(chain[start], nodes)
        kept.setdefault(node, []).append(index)
    return kept


def _weight(run_hash: bytes, node: str) -> bytes:
    return blake2b(run_hash + node.encode(), digest_size=8).digest()
