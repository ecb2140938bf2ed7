"""Which store node keeps which blocks: rendezvous hashing of runs. Policy only.

Highest random weight (Thaler & Ravishankar, "Using name-based mappings to increase hit rates", 1998): for every run
each node gets a weight, a hash of both names; the node with the highest weight keeps the run. All processes that know
the same nodes agree without messages. Losing a node moves only its own runs, evenly to the others; a new node takes
over only the runs that it now keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

RUN_BLOCKS = 4
"""Number of consecutive blocks of a chain that stay on one node. The run in which a shared system prompt ends also
holds the first blocks behind it, of all conversations, on one node: with runs of 16, 800 conversations of 16 own blocks
put 63 % of all blocks on one node of four, with runs of 4 it is 34 %. Longer runs ask fewer nodes for a prefix; a node
gets one request for all its runs either way."""


def run_start(index: int) -> int:
    """Position in the chain of the first block of the run of block `index`; that block's hash identifies the run."""
    return index - index % RUN_BLOCKS


def keeper(run_hash: bytes, nodes: Collection[str]) -> str:
    """The node that keeps the run that begins with this block. `nodes` has at least one; their order does not
    matter."""
    return max(nodes, key=lambda node: (_weight(run_hash, node), node))


def by_keeper(chain: Sequence[bytes], indexes: Iterable[int], nodes: Collection[str]) -> dict[str, list[int]]:
    """Groups these blocks of a chain by the node that keeps them, in their order; empty without nodes.

    `chain` has the hashes from the first block on: a block's run depends on its position.
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
