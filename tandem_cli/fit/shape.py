"""The shape of a model that `tandem fit` is asked about: one of a name, or a folder's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shared.errors import ConfigError
from shared.model.adapters.target_modules import values_of_rank
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import load_config
from shared.sizing.shapes import NAMED_MODELS, SPARSE_MODELS, ExpertShape, LatentShape, ModelShape, StateShape, decoder


def shape_of(model: str) -> ModelShape:
    """Raises ConfigError (`model`) for what is neither a name nor a folder, ModelLoadError for a bad config.json."""
    named = NAMED_MODELS | SPARSE_MODELS
    if model.lower() in named:
        return named[model.lower()]
    path = Path(model)
    if not os.path.exists(path):
        raise ConfigError(
            f"{model} is neither a model folder nor one of {', '.join(named)}", field="model", value=model
        )
    config = load_config(path.parent if path.is_file() else path)
    found = decoder(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        head_dim=config.head_dim,
        tied=config.tie_word_embeddings,
        experts=_experts(config),
        latent=_latent(config),
        head=config.head is not None,
        gated=config.is_gated,
        states=_states(config),
        windows=tuple(
            layer.window
            for layer in config.layers
            if layer.window is not None and layer.window < config.max_position_embeddings
        ),
    )
    return replace(found, adapter_values=values_of_rank(config))


def draft_of(draft: str, model: ModelShape) -> ModelShape:
    """As `shape_of`. Raises ConfigError (`draft`) where the vocabularies differ, or layers have states."""
    try:
        found = shape_of(draft)
    except ConfigError as error:
        raise ConfigError(f"--draft: {error.message}", field="draft", value=draft) from error
    if found.states is not None:
        raise ConfigError(
            f"--draft: layers of {draft} have states, from which a wrong guess cannot be taken back",
            field="draft",
            value=draft,
        )
    own, wanted = (round(each.embedding_params / each.hidden) for each in (found, model))
    if own != wanted:
        raise ConfigError(
            f"--draft: {draft} has a vocabulary of {own} tokens, the model has {wanted}",
            field="draft",
            value=own,
            limit=wanted,
        )
    return found


def _experts(config: ModelConfig) -> ExpertShape | None:
    if config.moe is None:
        return None
    moe, routing = config.moe, config.moe.routing
    return ExpertShape(config.num_expert_layers, routing.num_experts, routing.top_k, moe.expert_size, moe.shared_size)


def _latent(config: ModelConfig) -> LatentShape | None:
    if config.latent is None:
        return None
    latent = config.latent
    return LatentShape(latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim, latent.q_rank or 0)


def _states(config: ModelConfig) -> StateShape | None:
    if config.delta is None:
        return None
    sizes, hidden = config.delta, config.hidden_size
    params = sizes.num_parameters(hidden) + sizes.mixed_size * sizes.kernel_size
    params += sizes.num_value_heads + sizes.decay_size + sizes.value_dim  # decays with their biases, the norm
    # Beside latents only ranks that share a pool split them, as those on GPUs do not.
    parts = config.num_state_parts if sizes.places is None else 1
    return StateShape(len(config.state_layers), params, sizes.matrix_elements, sizes.state_elements, parts)


def uri_of(model: str) -> str:
    """The folder as an absolute path; empty for a named shape, which has no weights."""
    if model.lower() in NAMED_MODELS | SPARSE_MODELS:
        return ""
    path = Path(model).resolve()
    return str(path.parent if path.is_file() else path)
