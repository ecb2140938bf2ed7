"""How a worker's ranks split its model, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError

MOST_RANKS = 64
"""Most ranks that `tandem fit` and the simulator reckon with; workers of today have fewer."""
_NAMES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Degrees of one worker; each rank is a device, and all ranks together hold the model once.

    Raises ConfigError where `expert` does not divide `tensor`, or a degree is out of bounds.
    """

    tensor: int = 1
    """Ranks that split each layer."""
    pipeline: int = 1
    """Stages of adjacent layers."""
    expert: int = 1
    """Groups of a stage's ranks that hold whole experts each. The ranks of one such group split theirs."""

    def __post_init__(self) -> None:
        for option, name in _NAMES.items():
            if not 1 <= (degree := getattr(self, name)) <= MOST_RANKS:
                raise ConfigError(
                    f"{option} must be from 1 to {MOST_RANKS}, got {degree}",
                    field=option,
                    limit=MOST_RANKS,
                    value=degree,
                )
        if self.num_ranks > MOST_RANKS:
            raise ConfigError(
                f"tp {self.tensor} times pp {self.pipeline} is {self.num_ranks} ranks, the most are {MOST_RANKS}",
                field="pp",
                limit=MOST_RANKS,
                value=self.num_ranks,
            )
        if self.tensor % self.expert:
            raise ConfigError(
                f"ep is {self.expert}, which does not divide tp, {self.tensor}: experts lie on the ranks of a stage",
                field="ep",
                limit=self.tensor,
                value=self.expert,
            )

    @property
    def num_ranks(self) -> int:
        """Devices of the worker."""
        return self.tensor * self.pipeline

    @classmethod
    def parse(cls, text: str, option: str) -> Spread:
        """`tp=4,pp=2,ep=4`; what is not named is 1. Raises ConfigError (`option`, or the degree that is wrong)."""
        degrees: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = (each.strip() for each in part.partition("="))
            if name not in _NAMES or _NAMES[name] in degrees or not (number.isdecimal() and number.isascii()):
                raise ConfigError(
                    f"--{option}: expected degrees such as tp=4,pp=2,ep=4, got {text!r}", field=option, value=text
                )
            degrees[_NAMES[name]] = int(number)
        return cls(**degrees)

    def __str__(self) -> str:
        named = {"tp": self.tensor, "pp": self.pipeline, "ep": self.expert}
        return " ".join(f"{name}={degree}" for name, degree in named.items() if degree > 1) or "tp=1"
