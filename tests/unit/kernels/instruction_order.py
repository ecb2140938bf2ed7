"""What a kernel's code does in which order: does a softmax run beside a matrix product, or after a wait for it?

Works on PTX and on the machine code that `nvdisasm` prints: the one says what was asked for, the other what the
assembler made of it. Only loops are looked at, and of nested ones the innermost that hold products of warpgroups. Each
warpgroup of a specialised kernel has such a loop of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx

PRODUCT, EXPONENTIAL, WAIT = "product", "exponential", "wait"

_EVENTS = (
    (re.compile(r"\bwgmma\.mma_async|\bHGMMA\b"), PRODUCT),
    (re.compile(r"\bex2\.approx|\bMUFU\.EX2\b"), EXPONENTIAL),
    (re.compile(r"\bwgmma\.wait_group|\bWARPGROUP\.DEPBAR"), WAIT),
)
_ALLOWED = re.compile(r"wait_group\S*\s+(\d+)|DEPBAR\S*\s+gsb0,\s*(0x[0-9a-f]+)")
_LABEL = re.compile(r"^\s*([$.]L\w+):")  # labels of inline assembly, such as a barrier's own loop, hold nothing
_JUMP = re.compile(r"\b(?:bra|BRA)\b[^;]*?([$.]L\w+)\)?\s*;")
_CONDITIONAL = re.compile(r"@!?[%\w]+\s+(?:bra|BRA)|\bBRA\S*\s+!?U?P\d")
_LEAVES = re.compile(r"^\s*(?:/\*.*?\*/)?\s*(?:ret|exit|EXIT|RET\S*)\b[^;]*;")


@dataclass(frozen=True)
class Event:
    """One instruction that matters here."""

    kind: str
    allowed: int = 0
    """Groups of products that may stay in flight behind a wait."""


@dataclass(frozen=True)
class Loop:
    """One turn of an innermost loop with products, in the order of the code."""

    events: tuple[Event, ...]

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    def exposed(self) -> int:
        """Exponentials of a turn, after the first one, that no product is in flight beside."""
        flying, exposed = 0, 0
        for number, event in enumerate(self.events * 2):
            before = self.events[(number - 1) % len(self.events)].kind
            if event.kind == WAIT:
                flying = min(flying, event.allowed)
            elif event.kind == PRODUCT and (before != PRODUCT or flying == 0):
                flying += 1
            elif event.kind == EXPONENTIAL and number >= len(self.events):
                exposed += flying == 0
        return exposed

    def waits_between_products_and_softmax(self) -> int:
        """Waits that come after a product and before an exponential, counted over one turn and what follows it."""
        order = [event.kind for event in self.events]
        first = next((i for i, kind in enumerate(order) if kind == PRODUCT), 0)
        order = order[first:] + order[:first]  # the scores of the next keys begin a turn
        last = max((i for i, kind in enumerate(order) if kind == EXPONENTIAL), default=0)
        return order[:last].count(WAIT)

    def letters(self) -> str:
        """P, E and W in order, for messages."""
        return "".join(event.kind[0].upper() for event in self.events)


def product_loops(code: str) -> list[Loop]:
    """The innermost loops with products, in the order of the code."""
    blocks, jumps = _blocks(code)
    loops = sorted(_innermost(jumps, set(blocks), blocks), key=min)
    return [Loop(tuple(event for block in _in_turn(jumps, loop) for event in blocks[block])) for loop in loops]


def _in_turn(jumps: networkx.DiGraph, loop: set[int]) -> list[int]:
    """The loop's blocks as one turn passes them: compilers lay them out in another order."""
    turn = networkx.DiGraph(jumps.subgraph(loop))
    entry = min(_entries(jumps, loop))
    turn.remove_edges_from(list(turn.in_edges(entry)))
    parts = networkx.condensation(turn)  # a loop in it that waits for a barrier is one part
    order = networkx.lexicographical_topological_sort(parts, key=lambda part: min(parts.nodes[part]["members"]))
    return [block for part in order for block in sorted(parts.nodes[part]["members"])]


def _entries(jumps: networkx.DiGraph, loop: set[int]) -> set[int]:
    return {block for block in loop if any(source not in loop for source in jumps.predecessors(block))} or {min(loop)}


def _innermost(jumps: networkx.DiGraph, inside: set[int], blocks: dict[int, list[Event]]) -> Iterator[set[int]]:
    """The basic blocks of each loop among those `inside` that has products and no smaller such loop in it."""
    graph = jumps.subgraph(inside)
    for part in networkx.strongly_connected_components(graph):
        is_loop = len(part) > 1 or any(graph.has_edge(block, block) for block in part)
        if not is_loop or not any(event.kind == PRODUCT for block in part for event in blocks[block]):
            continue
        smaller = list(_innermost(jumps, part - _entries(jumps, part), blocks))
        yield from smaller or [part]


def _blocks(code: str) -> tuple[dict[int, list[Event]], networkx.DiGraph]:
    """(events of each basic block, numbered in the order of the code; which block may follow which)."""
    blocks: dict[int, list[Event]] = {0: []}
    labels: dict[str, int] = {}
    targets: list[tuple[int, str]] = []
    graph = networkx.DiGraph()
    graph.add_node(0)
    here = 0

    def begin(*, is_reached: bool) -> None:
        nonlocal here
        here += 1
        blocks[here] = []
        graph.add_node(here)
        if is_reached:
            graph.add_edge(here - 1, here)

    is_live = True  # False behind a jump, until the next label
    for line in code.splitlines():
        if label := _LABEL.match(line):
            begin(is_reached=is_live)
            labels[label[1]] = here
            is_live = True
        event = _event(line)
        if event is not None:
            blocks[here].append(event)
        if jump := _JUMP.search(line):
            targets.append((here, jump[1]))
            is_live = _CONDITIONAL.search(line) is not None
            begin(is_reached=is_live)
        elif _LEAVES.match(line):
            is_live = False
            begin(is_reached=False)
    graph.add_edges_from((source, labels[target]) for source, target in targets if target in labels)
    return blocks, graph


def _event(line: str) -> Event | None:
    for pattern, kind in _EVENTS:
        if pattern.search(line):
            allowed = _ALLOWED.search(line) if kind == WAIT else None
            return Event(kind, int(allowed[1] or allowed[2], 0) if allowed else 0)
    return None


def overlaps(loops: Sequence[Loop]) -> bool:
    """Whether every softmax of every loop runs beside a product, with no wait between the two."""
    return bool(loops) and all(
        loop.count(EXPONENTIAL) > 0 and loop.exposed() == 0 and loop.waits_between_products_and_softmax() == 0
        for loop in loops
    )
