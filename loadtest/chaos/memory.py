"""How fast processes grow: of one that lives on, a slope with its error; of one that is killed again and again, its
size at the same age in each life."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import psutil

from loadtest.rig.markdown import bold, table

NUM_MEANS = 10
"""Samples a second apart depend on each other; the means of this number of stretches nearly do not."""
TWO_SIDED_95 = 2.306
"""Student's t for 95 % with NUM_MEANS - 2 degrees of freedom."""
FLAT_MIB_A_MINUTE = 1.0
"""Growth that is more than this for certain is a leak."""
AGE_STEP_S = 5.0
"""Ages at which lives are compared are multiples of this."""

Sample = tuple[float, float]
"""Age of the process in seconds, resident MiB."""


@dataclass(frozen=True, slots=True)
class Growth:
    """MiB a minute, by least squares over the means of NUM_MEANS stretches."""

    slope: float
    error: float
    """Half the width of the interval that holds the true slope with 95 %."""

    @property
    def flat(self) -> bool:
        """Not for certain more than FLAT_MIB_A_MINUTE."""
        return self.slope - self.error <= FLAT_MIB_A_MINUTE

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.error:.2f}"


class Memory:
    """Resident memory of parts by name; each process id is a life of its own."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))

    def sample(self, pids: dict[str, int], now: float) -> None:
        """Takes one sample of each part, with its age; parts that have just died are passed over."""
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                age = now - process.create_time()
                if resident := process.memory_info().rss:  # 0: dead, and not yet waited for
                    self._lives[name][pid].append((age, resident / 2**20))
            except psutil.Error:
                continue

    def spared(self, names: Collection[str]) -> dict[str, tuple[Sequence[Sample], Growth | None]]:
        """The samples of those that lived all the time, with their growth in the second half: by then the pools, which
        are touched block by block, have been touched. A part that died after all is left out."""
        lives = {name: list(self._lives[name].values()) for name in names if name in self._lives}
        return {name: (one[0], growth(second_half(one[0]))) for name, one in lives.items() if len(one) == 1}

    def died(self, spared: Collection[str]) -> list[str]:
        """Which of those have had more than one life."""
        return sorted(name for name in spared if len(self._lives.get(name, ())) > 1)

    def killed(self, spared: Collection[str]) -> dict[str, tuple[float, list[float]]]:
        """Of the others: an age in seconds, and the size in MiB that each life had at it."""
        others = {name: list(lives.values()) for name, lives in self._lives.items() if name not in spared}
        return {name: at_equal_age(lives) for name, lives in others.items() if lives}


def second_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those of the second half of the time."""
    middle = (samples[0][0] + samples[-1][0]) / 2 if samples else 0.0
    return [sample for sample in samples if sample[0] >= middle]


def growth(samples: Sequence[Sample]) -> Growth | None:
    """None where there are too few samples."""
    size = len(samples) // NUM_MEANS
    if size < 2:
        return None
    stretches = [samples[number * size : (number + 1) * size] for number in range(NUM_MEANS)]
    points = [(fmean(age for age, _ in each) / 60, fmean(mib for _, mib in each)) for each in stretches]
    middle = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread
    rest = sum((y - middle[1] - slope * (x - middle[0])) ** 2 for x, y in points)
    return Growth(slope, TWO_SIDED_95 * (rest / (NUM_MEANS - 2) / spread) ** 0.5)


def at_equal_age(lives: Sequence[Sequence[Sample]]) -> tuple[float, list[float]]:
    """The oldest age that all lives but the last reached, and the size at it of each life that reached it."""
    ends = [life[-1][0] for life in lives]
    age = min(ends[:-1] or ends) // AGE_STEP_S * AGE_STEP_S
    return age, [next(mib for when, mib in life if when >= age) for life in lives if life[-1][0] >= age]


def report(memory: Memory, spared: Collection[str]) -> str:
    """Both as tables in Markdown."""
    living = [
        (
            name,
            f"{samples[0][1]:.0f}",
            f"{samples[-1][1]:.0f}",
            bold(str(found or "too short"), bool(found and not found.flat)),
        )
        for name, (samples, found) in sorted(memory.spared(spared).items())
    ]
    dying = [
        (name, f"{age:.0f}", str(len(sizes)), ", ".join(f"{mib:.0f}" for mib in sizes))
        for name, (age, sizes) in sorted(memory.killed(spared).items())
    ]
    return "\n".join(
        (
            *(f"- {name} was spared, and died\n" for name in memory.died(spared)),
            table(("spared", "MiB at first", "at the end", "second half, MiB a minute (95 %)"), living),
            "",
            table(("killed", "age, s", "lives", "MiB at that age, life by life"), dying, left=(0, 3)),
        )
    )
