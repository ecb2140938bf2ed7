"""Whether a checkpoint has a head that guesses, and one that can be served; a head that is read from a folder apart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from shared.errors import ModelLoadError
from shared.kernels.quantized import Weight
from shared.model.config.model_config import ModelConfig
from shared.model.layers.head import HeadParameters
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import fill_weights
from shared.model.weights.safetensors_files import DENSE
from shared.model.weights.schemes import MAKERS
from shared.model.weights.sources import TIED_NAME, TIED_SOURCE, WeightSource, check_entry, match_sources, needed

_OFFSETS, _OTHER_LAYER = "d2t", "layers.0."
_UNREAD = (_OFFSETS, "t2d", "embed_tokens.")


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


def read_head(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> HeadParameters:
    """The head that a folder apart has, as `config` has it. Raises ModelLoadError, which names a tensor that is missing
    or does not fit."""
    with Checkpoint.of(folder) as checkpoint:
        parameters, views, sources = _matched(checkpoint, config, dtype, device)
        fill_weights(checkpoint, sources, views)
    return parameters


def head_elements(folder: Path, config: ModelConfig) -> int:
    """Numbers of such a head's weights. Raises ModelLoadError as `read_head` does, but looks at no weight."""
    with Checkpoint.of(folder) as checkpoint:
        _, views, _ = _matched(checkpoint, config, torch.float32, "meta")
    return sum(math.prod(view.shape) for view in views.values())


def _matched(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[HeadParameters, dict[str, Weight], dict[str, WeightSource]]:
    """(a head without its weights, by name where they go, and where they come from)."""
    assert config.head is not None, "a model without a head"
    named = config
    if any(name.startswith(_OTHER_LAYER) for name in checkpoint.entries):
        own = config.head.names
        moved = {
            field: value.replace(own.layer, _OTHER_LAYER)
            for field, value in (("embedding_norm", own.embedding_norm), ("hidden_norm", own.hidden_norm))
        }
        named = replace(config, head=replace(config.head, names=replace(own, layer=_OTHER_LAYER, **moved)))
    parameters = HeadParameters.allocate(named, dtype, device)
    if TIED_SOURCE.removeprefix("model.") in checkpoint.entries:
        size = config.vocab_size, config.hidden_size
        parameters = replace(parameters, embedding=torch.empty(size, dtype=dtype, device=device))
    views = parameters.checkpoint_views(named)
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    sources = match_sources(checkpoint, shapes, MAKERS, unused=_UNREAD)
    return replace(parameters, tokens=_guessable(checkpoint, config).to(device)), views, sources


def _guessable(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor:
    """[num_guessable] int64, the tokens of a head's own output projection: each row's number and an offset."""
    assert config.head is not None, "a model without a head"
    count, vocab_size = config.head.num_guessable, config.vocab_size
    tokens = torch.arange(count)
    if count == vocab_size and _OFFSETS not in checkpoint.entries:
        return tokens
    why = f"of {vocab_size} tokens the head guesses {count}"
    check_entry(needed(checkpoint.entries, _OFFSETS, why), (count,), ("I64", "I32"))
    tokens = tokens + checkpoint.whole(_OFFSETS).long()
    num_found = len(set(tokens.tolist()))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or num_found < count:
        raise ModelLoadError(
            f"{_OFFSETS} must name {count} different tokens of {vocab_size}, found {num_found} from "
            f"{int(tokens.min())} to {int(tokens.max())}",
            tensor=_OFFSETS,
        )
    return tokens
