"""`tandem serve --config cluster.yaml`: the command's options from a file, and several models, each with its pools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from services.local.model_pools import ModelPools, PoolOptions, worker_prefix
from shared.errors import ConfigError
from shared.settings.common import AliasSettings, Mode
from shared.settings.group import option_names

OF_A_MODEL = frozenset({"model", "served_model_name", *option_names(PoolOptions)})
"""Options that each entry of `models` has for itself, under the same names; `served_model_name` is its `name`."""

FindModel = Callable[[str], tuple[Path, str]]
"""(folder, name; empty = the folder's) of what a `model` names."""


class ModelEntry(PoolOptions, AliasSettings):
    """One entry of `models`."""

    model: str
    name: str = ""

    def pools(self, find: FindModel, *, is_first: bool, mode: Mode = "auto") -> ModelPools:
        """`mode` is the cluster's, for an entry that names none. Raises ConfigError, and what `find` does."""
        folder, found = find(self.model)
        name = self.name or found or folder.resolve().name
        own: dict[str, object] = {"name": name, "model": folder, "prefix": "" if is_first else worker_prefix(name)}
        if "mode" not in self.model_fields_set:
            own["mode"] = mode
        return ModelPools(**self.values_for(ModelPools) | own)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A file's content."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The command's options by parameter name; those on the command line go before them."""
    models: tuple[ModelEntry, ...] = ()

    @classmethod
    def read(cls, path: Path, known: Collection[str]) -> ClusterFile:
        """`known`: the options' names, such as num_kv_blocks. Raises ConfigError naming what is wrong."""
        content = _mapping(path)
        entries = content.pop("models", [])
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: models must be a list of models", field="models")
        options = {str(name).replace("-", "_"): value for name, value in content.items()}
        for name in options:
            if name not in known:
                nearest = get_close_matches(name, [*known, "models"], n=1)
                hint = f": did you mean {nearest[0]}?" if nearest else ""
                raise ConfigError(f"{path}: {name} is no option of tandem serve{hint}", field=name)
        models = tuple(_entry(path, number, entry) for number, entry in enumerate(entries))
        if models and (both := sorted(OF_A_MODEL & options.keys())):
            raise ConfigError(f"{path}: {both[0]} belongs into an entry of models", field=both[0])
        return cls(options, models)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="config") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a day that no month has
        raise ConfigError(f"{path} is not valid YAML: {error}", field="config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of options", field="config")
    return content


def _entry(path: Path, number: int, entry: object) -> ModelEntry:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{path}: models.{number} must be a mapping of a model's options", field=f"models.{number}")
    try:
        return ModelEntry(**{str(name): value for name, value in entry.items()})
    except ConfigError as error:
        raise ConfigError(
            f"{path}: models.{number}: {error.message}", field=f"models.{number}.{error.field}"
        ) from error
