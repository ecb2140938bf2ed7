"""Where a local cluster keeps its logs: a folder that it has to itself while it runs."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

MAX_CLUSTERS = 64
"""Most clusters that share one state folder."""
_LOCK = "lock"


@dataclass
class StateFolder:
    """A claimed folder. The claim ends with `release()` or with the process, however that ends."""

    path: Path
    _lock: int

    @classmethod
    def claim(cls, wanted: Path) -> StateFolder:
        """`wanted`, or `wanted`/2, /3, … while other clusters have those before it; made where it is missing.

        Raises ConfigError (`state_dir`) where it cannot be written, or all of them are taken.
        """
        for number in range(1, MAX_CLUSTERS + 1):
            path = wanted / str(number) if number > 1 else wanted
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise unwritable(path, error) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return cls(path, lock)
        raise ConfigError(
            f"{MAX_CLUSTERS} clusters keep their logs in {wanted} already: name another folder",
            field="state_dir",
            limit=MAX_CLUSTERS,
        )

    def release(self) -> None:
        """Lets the next cluster have it. Twice is fine."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a state folder that cannot be written."""
    return ConfigError(
        f"cannot keep logs in {path} ({error.strerror}): name a folder that you may write to, or start in one",
        field="state_dir",
        value=str(path),
    )
