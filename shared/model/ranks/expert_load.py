"""Tokens that chose each expert, as a worker has measured them and keeps them in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig

FIELD = "expert_load"
"""The setting that errors name."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Counts of one model. Other layers than those of a worker's first stage are not in it."""

    num_layers: int
    num_experts: int
    tokens: Mapping[int, Sequence[int]]
    """Layer → [num_experts]."""

    @classmethod
    def none(cls, config: ModelConfig) -> ExpertLoad:
        """Nothing measured yet."""
        return cls(config.num_layers, 0 if config.moe is None else config.moe.routing.num_experts, {})

    @classmethod
    def read(cls, path: Path, config: ModelConfig) -> ExpertLoad:
        """The load that `write` wrote, or nothing measured where there is no file. Raises ConfigError where it cannot
        be read or is of another model."""
        own = cls.none(config)
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return own
        except (OSError, ValueError) as error:
            raise ConfigError(f"{FIELD}: {path} cannot be read: {error}", field=FIELD) from error
        found = _parse(path, content)
        for what, theirs, ours in (
            ("layers", found.num_layers, own.num_layers),
            ("experts in a layer", found.num_experts, own.num_experts),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"{FIELD}: {path} is of a model with {theirs} {what}, this one has {ours}",
                    field=FIELD,
                    value=theirs,
                    limit=ours,
                )
        for layer in found.tokens:
            if not 0 <= layer < own.num_layers or not config.has_experts(layer):
                raise ConfigError(f"{FIELD}: {path} has counts of layer {layer}, which has no experts", field=FIELD)
        return found

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all. Raises OSError."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        layers = {str(layer): list(tokens) for layer, tokens in sorted(self.tokens.items())}
        content = {"num_layers": self.num_layers, "num_experts": self.num_experts, "tokens": layers}
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def and_then(self, newer: Mapping[int, Sequence[int]]) -> ExpertLoad:
        """The sum with counts of a later time, beside which older ones weigh half, so that a short run does not replace
        them."""
        faded = {layer: [tokens // 2 for tokens in older] for layer, older in self.tokens.items()}
        for layer, tokens in newer.items():
            older = faded.get(layer, [0] * self.num_experts)
            faded[layer] = [old + new for old, new in zip(older, tokens, strict=True)]
        return ExpertLoad(self.num_layers, self.num_experts, faded)

    @property
    def by_layer(self) -> list[Sequence[int] | None]:
        """The counts in the form that `expert_placement.balance` takes."""
        return [self.tokens.get(layer) for layer in range(self.num_layers)]


def _parse(path: Path, content: Any) -> ExpertLoad:
    """Raises ConfigError."""
    if isinstance(content, dict) and isinstance(content.get("tokens"), dict):
        num_layers, num_experts = content.get("num_layers"), content.get("num_experts")
        if isinstance(num_layers, int) and isinstance(num_experts, int):
            layers = content["tokens"].items()
            if all(layer.isdecimal() and _are_counts(tokens, num_experts) for layer, tokens in layers):
                return ExpertLoad(num_layers, num_experts, {int(layer): tokens for layer, tokens in layers})
    wanted = '{"num_layers": L, "num_experts": E, "tokens": {LAYER: [E counts], …}}'
    raise ConfigError(f"{FIELD}: {path} is no such file: it must hold {wanted}", field=FIELD)


def _are_counts(tokens: Any, num_experts: int) -> bool:
    if not isinstance(tokens, list) or len(tokens) != num_experts:
        return False
    return all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in tokens)
