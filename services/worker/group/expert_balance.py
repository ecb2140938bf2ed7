"""A group's experts placed by what it has measured before, and what it measures kept for its next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig
from shared.model.layers.expert_placement import Placement, balance
from shared.model.ranks.expert_load import FIELD, ExpertLoad

logger = logging.getLogger(__name__)

Counts = Mapping[int, tuple[int, ...]]
"""As `RankDecoder.expert_counts`."""


class ExpertBalance:
    """Placement of one worker's experts by a file of their loads, which is read when this is made and written by
    `keep`."""

    def __init__(self, settings: WorkerSettings, config: ModelConfig) -> None:
        """Blocking. Raises ConfigError where the file is not this model's or could not be written."""
        self._path = Path(settings.expert_load.replace("{name}", settings.name))
        if not self._path.parent.is_dir():
            raise ConfigError(f"{FIELD}: {self._path} lies in no folder that exists", field=FIELD)
        self._known = ExpertLoad.read(self._path, config)
        self.placement: Placement = balance(self._known.by_layer, settings.ep, settings.expert_spare)
        if self._known.tokens:
            held = [sum(map(len, sets)) - self._known.num_experts for sets in self.placement if sets is not None]
            logger.info("%s: experts of %d layers moved, %d copies made", self._path, len(held), sum(held))
        self._counts: Callable[[], Counts] = dict
        self._before: Counts = {}

    def measure(self, counts: Callable[[], Counts]) -> None:
        """Starts counting tokens; the computations of start-up are not counted."""
        self._counts, self._before = counts, counts()

    def keep(self) -> None:
        """Writes the file, unless no token has passed since `measure` or the last `keep`. Blocking."""
        counts = self._counts()
        new = {layer: [b - a for a, b in zip(self._before[layer], now, strict=True)] for layer, now in counts.items()}
        self._before = counts
        if not any(any(tokens) for tokens in new.values()):
            return
        self._known = self._known.and_then(new)
        try:
            self._known.write(self._path)
        except OSError as error:
            logger.warning("the counts of experts were not written to %s: %s", self._path, error)
