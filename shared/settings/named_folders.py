"""Folders by name, as one setting."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError


def parse_adapters(text: str) -> dict[str, Path]:
    """`a=folder b=folder`, also with commas between, as folders by name. Raises ConfigError."""
    return {name: Path(folder) for name, folder in named_entries(text).items()}


def named_entries(text: str) -> dict[str, str]:
    """Folders by name, as they are written. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in text.replace(",", " ").split():
        name, equals, folder = entry.partition("=")
        if not name or not equals or not folder:
            raise ConfigError(f"adapters: {entry!r} is not name=folder", field="adapters", value=entry)
        if name in found:
            raise ConfigError(f"adapters: {name!r} is named twice", field="adapters", value=name)
        found[name] = folder
    return found


def parse_folders(text: str) -> tuple[Path, ...]:
    """`folder folder`, also with commas between."""
    return tuple(Path(entry) for entry in text.replace(",", " ").split())
