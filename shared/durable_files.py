"""Files whose content outlasts a crash or a loss of power."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol


class RawWriter(Protocol):
    """A file that was opened without a buffer."""

    def write(self, data: memoryview, /) -> int | None:
        """Bytes that were written, perhaps fewer than there are."""
        ...


def write_all(file: RawWriter, data: memoryview) -> None:
    """Writes all of it: one call on a raw file may write less."""
    while data:
        data = data[file.write(data) or 0 :]


def sync_file(path: Path) -> None:
    """Returns when the file's content is on its device. Raises OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: Path) -> None:
    """The same for the names in a folder, where the file system can: not every one syncs a folder."""
    with contextlib.suppress(OSError):
        sync_file(path)
