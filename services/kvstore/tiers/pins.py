"""The pins of a store node, saved in the disk tier's folder."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, StoreUnavailable

FILE_NAME = "pins.json"


@dataclass(frozen=True, slots=True)
class Pin:
    """A named prefix whose blocks are not evicted."""

    name: str
    tenant: str
    block_hashes: tuple[bytes, ...]
    block_bytes: int  # of each


class PinBook:
    """All pins by name, saved to a file if there is a folder. A change that cannot be written is not made."""

    def __init__(self, folder: Path | None) -> None:
        """No I/O before `load()`."""
        self._path = folder / FILE_NAME if folder is not None else None
        self._pins: dict[str, Pin] = {}

    def load(self) -> None:
        """Reads an earlier process's pins. Raises ConfigError (field disk_folder) for a file that cannot be parsed."""
        if self._path is None or not self._path.exists():
            return
        try:
            self._pins = {pin.name: pin for pin in map(_parse, json.loads(self._path.read_text()))}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self._path} cannot be read: {error}; delete it to continue without pins", field="disk_folder"
            ) from error

    def all(self) -> list[Pin]:
        """Oldest first."""
        return list(self._pins.values())

    def get(self, name: str) -> Pin | None:
        """The pin of this name, if any."""
        return self._pins.get(name)

    def put(self, pin: Pin) -> None:
        """Adds a pin or replaces it. Raises StoreUnavailable where the file cannot be written."""
        self._write({**{name: old for name, old in self._pins.items() if name != pin.name}, pin.name: pin})

    def remove(self, name: str) -> None:
        """Removes a pin. Raises StoreUnavailable where the file cannot be written."""
        self._write({other: pin for other, pin in self._pins.items() if other != name})

    def _write(self, pins: dict[str, Pin]) -> None:
        if self._path is not None:
            unfinished = self._path.with_suffix(".tmp")
            try:
                unfinished.write_text(json.dumps([_fields(pin) for pin in pins.values()], indent=1))
                unfinished.replace(self._path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise StoreUnavailable(f"the pins cannot be kept in {self._path}: {error}", tier="disk") from error
        self._pins = pins


def _fields(pin: Pin) -> dict[str, object]:
    return {
        "name": pin.name,
        "tenant": pin.tenant,
        "block_bytes": pin.block_bytes,
        "block_hashes": [block_hash.hex() for block_hash in pin.block_hashes],
    }


def _parse(fields: dict[str, object]) -> Pin:
    hashes, block_bytes = fields["block_hashes"], fields["block_bytes"]
    if not isinstance(hashes, list) or not isinstance(block_bytes, int):
        raise TypeError("block_hashes must be a list, block_bytes a number")
    return Pin(str(fields["name"]), str(fields["tenant"]), tuple(map(bytes.fromhex, hashes)), block_bytes)
