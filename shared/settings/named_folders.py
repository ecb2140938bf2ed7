"""Folders by name, as one setting."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError


def parse_adapters(text: str, field_name: str = "adapters") -> dict[str, Path]:
    """`a=folder b=folder`, also with commas between, as folders by name. Raises ConfigError."""
    return {name: Path(folder) for name, folder in named_entries(text, field_name).items()}


def named_entries(text: str, field_name: str = "adapters") -> dict[str, str]:
    """Folders by name, as they are written. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in text.replace(",", " ").split():
        name, equals, folder = entry.partition("=")
        if not name or not equals or not folder:
            raise ConfigError(f"{field_name}: {entry!r} is not name=folder", field=field_name, value=entry)
        if name in found:
            raise ConfigError(f"{field_name}: {name!r} is named twice", field=field_name, value=name)
        found[name] = folder
    return found


def parse_folders(text: str) -> tuple[Path, ...]:
    """`folder folder`, also with commas between."""
    return tuple(Path(entry) for entry in text.replace(",", " ").split())
