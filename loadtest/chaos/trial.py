"""The names of what is tried, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

from loadtest.chaos import adapters
from loadtest.chaos.streams import Stream

VICTIMS = ("router", "prefill", "decode", "kvstore", "redis", "store", "peer")
"""A part each; `peer` is a prefill worker that gets no prompts and holds the prefix that the others fetch."""
LINKS = ("router~prefill", "router~decode", "prefill~decode", "prefill~store", "prefill~peer")
"""Two sides of a partition; every other part is cut off from all others."""
GROUPS = (
    "prefill+decode",
    "router+decode",
    "kvstore+prefill",
    "redis+decode",
    "prefill-pool",
    "decode-pool",
    "router-pool",
)
"""Several at once: two different parts, or all of one kind."""
PARTITIONS = ("one-way-partition", "two-way-partition")
"""10 s. One way: what the victim, or the link's first side, sends is lost; what the others send arrives."""
LASTING_CUT = "lasting-cut"
"""A cut between one worker of each side of a link, both ways, until all streams have ended and everything is free."""
FAULTS = ("SIGKILL", "SIGSTOP-3s", "SIGSTOP-20s", "hung-engine", *PARTITIONS, "drain")
ADAPTER_FAULTS = ("SIGKILL", "SIGSTOP-3s", "drain")
PHASES = ("queued", "prefilling", "shipping", "decoding", "after-hand-off")
WORKERS = ("prefill", "decode", "peer")
"""Victims with an engine."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One victim, one fault, at one moment of the streams."""

    victim: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.victim} {self.fault} {self.phase}"

    @property
    def needs_network(self) -> bool:
        """Its parts run in networks of their own."""
        return self.fault in PARTITIONS or self.fault == LASTING_CUT

    @property
    def has_adapters(self) -> bool:
        """Its streams are of adapters, of which workers have not all ready at once."""
        return self.phase in adapters.PHASES

    def matches(self, only: str) -> bool:
        """Whether `only` asks for it: words that its name must have, alternatives separated by commas."""
        own = str(self).split()
        return not only.strip() or any(
            words and all(word in own for word in words) for words in (part.split() for part in only.split(","))
        )


CONTROL = Trial("nobody", "nothing", "decoding")
"""No fault: its pause is what the machine's other load does."""


def trials(only: str = "") -> list[Trial]:
    """All that exist; those with adapters, and partitions, which have other clusters, last. Victims and faults both
    come in turn, so that hardly any trial has to wait until its victim may die again."""
    singles = [
        [Trial(victim, FAULTS[(place + turn) % len(FAULTS)], phase) for place, victim in enumerate(VICTIMS)]
        for phase, turn in product(PHASES, range(len(FAULTS)))
    ]
    groups = [[Trial(victim, "SIGKILL", phase)] for phase, victim in product(PHASES, GROUPS)]
    links = [Trial(victim, fault, phase) for fault, phase, victim in product(PARTITIONS, PHASES, LINKS)]
    links += [Trial("prefill~decode", LASTING_CUT, phase) for phase in PHASES]
    none: list[Trial] = []
    mixed = [trial for turn in zip_longest(singles, groups, fillvalue=none) for each in turn for trial in each]
    loads = [
        Trial(victim, fault, phase)
        for phase, fault, victim in product(adapters.PHASES, ADAPTER_FAULTS, ("prefill", "decode"))
    ]
    everything = sorted([CONTROL, *mixed, *links, *loads], key=lambda trial: (trial.needs_network, trial.has_adapters))
    return [trial for trial in everything if _exists(trial) and trial.matches(only)]


def _exists(trial: Trial) -> bool:
    return trial.fault != "hung-engine" or trial.victim in WORKERS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients saw, and what was left behind."""

    trial: Trial
    lost: int
    """Streams that did not end with a whole answer."""
    wrong: int
    """Streams with another token than undisturbed, in what they got."""
    leaked: int
    """KV blocks that were not free when everything had ended."""
    longest_pause_s: float
    """Longest gap between tokens, or excess of a first token over its undisturbed time."""
    note: str = ""
    """Remark on an unusual course; empty = none."""

    @property
    def good(self) -> bool:
        """Whether the fault caused nothing but a pause."""
        return not (self.lost or self.wrong or self.leaked or self.note)

    def __str__(self) -> str:
        return f"{self.trial}: {self.lost}|{self.wrong}|{self.leaked}|{self.longest_pause_s:.2f} s"


def judge(trial: Trial, streams: Sequence[Stream], calm: Sequence[Stream], leaked: int, note: str) -> Outcome:
    """Compares streams with the undisturbed ones of the same prompts."""
    pairs = list(zip(streams, calm, strict=True))
    errors = sorted({stream.error for stream in streams if stream.error})
    return Outcome(
        trial,
        lost=sum(bool(stream.error) or len(stream.tokens) != len(known.tokens) for stream, known in pairs),
        wrong=sum(stream.tokens != known.tokens[: len(stream.tokens)] for stream, known in pairs),
        leaked=leaked,
        longest_pause_s=max(max(stream.longest_gap_s, stream.ttft_s - known.ttft_s) for stream, known in pairs),
        note="; ".join(filter(None, (note, *errors[:2]))),
    )
