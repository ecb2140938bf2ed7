"""Whether a checkpoint has a head that guesses, and one that can be served."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ModelLoadError
from shared.model.config.model_config import ModelConfig
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE
from shared.model.weights.sources import TIED_NAME, TIED_SOURCE

def has_head(folder: Path, config: ModelConfig) -> bool:
    """Whether there is any tensor of one: checkpoints in fewer bits often leave it out, and say nothing of it. Raises
    ModelLoadError."""
    if config.head is None:
        return False
    with Checkpoint.of(folder) as checkpoint:
        return any(name.startswith(config.head.names.prefix) for name in checkpoint.entries)


def missing_head(folder: Path, config: ModelConfig) -> str:
    """Why a folder has no head that can be served; empty: it has one. Raises ModelLoadError."""
    if has_head(folder, config):
        return ""
    missing = "num_nextn_predict_layers, or its layers are not all of a kind that keeps the whole text"
    if config.head is not None:
        missing = f"tensor {config.head.names.prefix}*"
    return f"{folder} has no head: no {missing}"


def check_head(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises ModelLoadError (`tensor`) for a head whose embedding or output projection is not the model's."""
    assert config.head is not None, "a model without a head"
    entries, names = checkpoint.entries, config.head.names
    for own, of_model in ((names.embedding, TIED_SOURCE), (names.output, TIED_NAME)):
        name = f"{names.prefix}{own}.weight"
        if of_model == TIED_NAME and config.tie_word_embeddings and TIED_NAME not in entries:
            of_model = TIED_SOURCE
        if name not in entries or of_model not in entries:
            continue
        mine, theirs = entries[name], entries[of_model]
        if mine.shape != theirs.shape:
            raise ModelLoadError(
                f"{name} has shape {list(mine.shape)}, {of_model} {list(theirs.shape)}: a head has its model's",
                tensor=name,
                expected=str(list(theirs.shape)),
                found=str(list(mine.shape)),
            )
        if mine.dtype not in DENSE or theirs.dtype not in DENSE:
            continue
        own_rows = (piece.clone() for _, piece in checkpoint.rows(name, 0, mine.shape[0]))  # one reader may have both
        rows = (piece for _, piece in checkpoint.rows(of_model, 0, mine.shape[0]))
        if not all(piece.float().equal(other.float()) for piece, other in zip(own_rows, rows, strict=True)):
            raise ModelLoadError(
                f"{name} differs from {of_model}, which a head has from its model: take speculation ngram",
                tensor=name,
            )
