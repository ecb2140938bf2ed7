"""The `config.json` of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), a folder beside its model's."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.model.config.folder import CONFIG_FILE
from shared.model.config.head_names import EAGLE_NAMES
from shared.model.config.json_fields import JsonFields, read_json_object
from shared.model.config.layer_config import LayerConfig
from shared.model.config.model_config import HeadConfig, ModelConfig
from shared.model.families.registry import parse_config

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_STATES = 3
"""States of the model that the head joins."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_UNSERVED = ("fc_norm", "norm_before_fc", "norm_before_residual", "parallel_drafting")
"""Fields of later kinds of heads, which compute something else where they are true."""


def is_eagle(folder: Path) -> bool:
    """Whether a folder says that it has such a head. Raises ModelLoadError where its `config.json` cannot be read."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    found = JsonFields(read_json_object(folder / CONFIG_FILE), CONFIG_FILE).optional_text_list("architectures")
    return bool(set(found or ()) & set(ARCHITECTURES))


def read_eagle(folder: Path, model: ModelConfig) -> HeadConfig:
    """The head in that folder, for this model.

    Raises:
        ConfigError: it is of another model (`draft`, both numbers), or the model is of a kind that has none.
        ModelLoadError: no such head, or a field that is missing, wrong or not served.
    """
    content = dict(read_json_object(folder / CONFIG_FILE))
    fields = JsonFields(content, CONFIG_FILE)
    if not is_eagle(folder):
        found = ", ".join(fields.optional_text_list("architectures") or ()) or "none"
        raise fields.fault("architectures", f"{found} is no head that guesses: {' or '.join(ARCHITECTURES)} is")
    nested = fields.child("eagle_config") or JsonFields({}, CONFIG_FILE)
    for part in (fields, nested):
        for name in _UNSERVED:
            if part.boolean(name, default=False):
                raise part.fault(name, "true is not supported: this is a head of a later kind than EAGLE-3")
    if not fields.boolean("norm_output", default=True):
        raise fields.fault("norm_output", "false is not supported: EAGLE-3 norms what its output projection reads")
    if not nested.boolean("use_aux_hidden_state", default=True):
        raise nested.fault("use_aux_hidden_state", "false is not supported: EAGLE-3 reads states of several layers")
    if fields.integer("num_hidden_layers", default=1) != 1:
        raise fields.fault("num_hidden_layers", f"must be 1, found {fields.integer('num_hidden_layers')}")
    own = parse_config(
        {**content, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "sliding_window": None}
    )
    if model.latent is not None:
        raise _misfit(folder, f"keeps keys and values of heads, {model.architecture} keeps latents")
    _check(folder, "hidden size", fields.integer("target_hidden_size", default=own.hidden_size), model.hidden_size)
    _check(folder, "own hidden size", own.hidden_size, model.hidden_size)
    _check(folder, "vocabulary", own.vocab_size, model.vocab_size)
    # Its KV lies in the model's blocks.
    _check(folder, "number of KV heads", own.num_kv_heads, model.num_kv_heads)
    _check(folder, "head dimension", own.head_dim, model.head_dim)
    num_guessable = fields.integer("draft_vocab_size", default=own.vocab_size)
    if num_guessable > own.vocab_size:
        raise fields.fault("draft_vocab_size", f"must be at most {own.vocab_size}, found {num_guessable}")
    if own.prefix_length:
        raise fields.fault("rope_scaling", "dynamic is not supported for a head")
    behind = _behind(folder, fields, nested, model.num_layers)
    return HeadConfig(LayerConfig(own.layers[0].rope), EAGLE_NAMES, behind, own, num_guessable)


def _behind(folder: Path, fields: JsonFields, nested: JsonFields, num_layers: int) -> tuple[int, ...]:
    """How many of the model's layers gave each state. A list in the file itself counts layers before it (vLLM,
    speculators), one in `eagle_config` numbers the layers that gave them (SpecForge, SGLang)."""
    if fields.has(_LAYERS):
        found = tuple(fields.indices(_LAYERS))
    elif nested.has(_LAYERS):
        found = tuple(layer + 1 for layer in nested.indices(_LAYERS))
    else:
        found = (2, num_layers // 2, num_layers - 3)
    if len(found) != NUM_STATES:
        raise fields.fault(_LAYERS, f"must name {NUM_STATES} layers, found {len(found)}")
    if not all(1 <= count < num_layers for count in found):
        counts = ", ".join(map(str, found))
        raise _misfit(folder, f"reads what {counts} layers give, the model has {num_layers}, of which it may read "
                      f"1 to {num_layers - 1}")  # fmt: skip
    return found


def _check(folder: Path, what: str, own: int, of_model: int) -> None:
    if own != of_model:
        raise ConfigError(
            f"head {folder} has a {what} of {own}, the model has {of_model}: it is another model's",
            field="draft",
            value=own,
            limit=of_model,
        )


def _misfit(folder: Path, problem: str) -> ConfigError:
    return ConfigError(f"head {folder} {problem}", field="draft", value=str(folder))
