"""Weights read without a decoder."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import fill_weights
from shared.model.weights.schemes import MAKERS
from shared.model.weights.sources import match_sources


def load_weights(folder: Path, views: dict[str, torch.Tensor]) -> None:
    """Fills a plain model's views of a checkpoint."""
    with Checkpoint.of(folder) as checkpoint:
        shapes = {name: tuple(view.shape) for name, view in views.items()}
        fill_weights(checkpoint, match_sources(checkpoint, shapes, MAKERS), views)
