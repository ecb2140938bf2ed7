"""An adapter's configuration, PEFT's `adapter_config.json`: what is not served is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shared.errors import ModelLoadError
from shared.kernels.lora.parts import MAX_RANK
from shared.model.adapters.expert_stacks import PARAMETERS
from shared.model.config.folder import ADAPTER_FILE
from shared.model.config.json_fields import JsonFields, read_json_object

T = TypeVar("T")
_MAX_CONFIG_BYTES = 1 << 20
_MOST_ALPHA = 1e6
_MOST_PATTERNS, _MOST_REPEATING, _MOST_REPEATS = 4096, 16, 2
"""Most patterns, patterns in which something repeats, and repeats in one of them: the time of a comparison grows with
the length of the name to the power of what repeats."""
_MOST_KEY = 256
"""Characters of a pattern."""
_KEY = re.compile(r"\^?(?:(?:\w|-|\\[.d]|\.|\[[\w-]+\])[*+]?|[|()])+\$?")
"""What a pattern may consist of: characters, classes, `.` and `\\d`, each once or repeated, and choices, which are
not."""
_REFUSED = {
    "use_dora": "weights that are normalised (DoRA) are not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "lora_bias": "biases of an adapter are not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "modules_to_save": "whole modules beside the low-rank ones are not supported: merge the adapter into its model",
    "trainable_token_indices": "embeddings of tokens are not supported: merge the adapter into its model",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "adapters that begin in the middle of a text (aLoRA) are not supported",
    "arrow_config": "Arrow is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
}
"""Fields that must be absent, null, false or empty → why."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How ways to begin training start that change the base model's weights too."""


@dataclass(frozen=True)
class AdapterConfig:
    """What of the configuration the computation depends on."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    target_modules: tuple[str, ...] | None
    """Ends of modules' names; None: the tensors alone say which."""
    target_parameters: tuple[str, ...]
    """Ends of names of experts' parameters."""
    ranks: Sequence[tuple[re.Pattern[str], int]]
    """Patterns of modules' names and their rank, where it differs; the first that fits counts."""
    alphas: Sequence[tuple[re.Pattern[str], float]]
    content: bytes
    """The whole configuration in one spelling, and the order of patterns."""

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Raises ModelLoadError, whose `field` is that of the file."""
        path = folder / ADAPTER_FILE
        try:
            if path.stat().st_size > _MAX_CONFIG_BYTES:
                raise ModelLoadError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes", file=ADAPTER_FILE)
        except FileNotFoundError:
            raise ModelLoadError(
                f"{ADAPTER_FILE} is missing from {folder}: an adapter is a folder as PEFT saves it", file=ADAPTER_FILE
            ) from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}", file=ADAPTER_FILE) from error
        values = read_json_object(path)
        fields = JsonFields(values, ADAPTER_FILE)
        _refuse(fields)
        ranks, alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")
        return cls(
            rank=fields.integer("r", default=8, maximum=MAX_RANK),
            alpha=fields.number("lora_alpha", default=8.0, maximum=_MOST_ALPHA),
            is_rank_stabilised=fields.boolean("use_rslora", default=False),
            target_modules=_target_modules(fields),
            target_parameters=_target_parameters(fields),
            ranks=[(_compiled(ranks, key), ranks.integer(key, maximum=MAX_RANK)) for key in ranks.names],
            alphas=[(_compiled(alphas, key), alphas.number(key, maximum=_MOST_ALPHA)) for key in alphas.names],
            content=json.dumps([values, ranks.names, alphas.names], sort_keys=True).encode(),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's addition."""
        return _of(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on a module's addition."""
        rank = self.rank_of(module)
        return _of(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def names_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names this one."""
        return any(_ends(name, target) for target in self.target_parameters)

    def names(self, module: str) -> bool:
        """Whether `target_modules` names this module."""
        return self.target_modules is None or any(_ends(module, target) for target in self.target_modules)


def _of(patterns: Sequence[tuple[re.Pattern[str], T]], module: str, default: T) -> T:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _ends(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _refuse(fields: JsonFields) -> None:
    kind = fields.text("peft_type", default="LORA")
    if kind != "LORA":
        raise fields.fault("peft_type", f"is {kind}, and only LORA is supported")
    for name, why in _REFUSED.items():
        if fields.raw(name):
            raise fields.fault(name, f"is set: {why}")
    for name in fields.names:
        if name.startswith("use_") and name != "use_rslora" and fields.raw(name):
            raise fields.fault(name, "is set: this way to compute is not known")
    bias = fields.text("bias", default="none")
    if bias != "none":
        raise fields.fault("bias", f"is {bias!r}: biases that were trained are not supported")
    begun = fields.raw("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        raise fields.fault(
            "init_lora_weights",
            f"is {begun!r}, which changes the base model's weights too: save the adapter converted to a plain LoRA",
        )


def _target_modules(fields: JsonFields) -> tuple[str, ...] | None:
    """A text is a pattern, or PEFT's word for all linear layers."""
    if isinstance(fields.raw("target_modules"), str):
        return None
    found = fields.optional_text_list("target_modules")
    return None if found is None else tuple(map(_of_text, found))


def _target_parameters(fields: JsonFields) -> tuple[str, ...]:
    found = tuple(map(_of_text, fields.optional_text_list("target_parameters") or ()))
    for name in found:
        if name.rpartition(".")[2] not in PARAMETERS:
            raise fields.fault(
                "target_parameters",
                f"names {name}: of bare parameters only experts' {' and '.join(PARAMETERS)} are served",
            )
    return found


def _pattern(fields: JsonFields, name: str) -> JsonFields:
    """The fields of an object whose names are patterns of modules' names."""
    child = fields.child(name)
    if child is None:
        return JsonFields({}, ADAPTER_FILE)
    if len(child.names) > _MOST_PATTERNS:
        raise fields.fault(name, f"has {len(child.names)} patterns, the most that are read are {_MOST_PATTERNS}")
    if sum(_repeats(key) > 0 for key in child.names) > _MOST_REPEATING:
        raise fields.fault(name, f"has more than {_MOST_REPEATING} patterns in which something repeats")
    return child


def _repeats(key: str) -> int:
    return key.count("*") + key.count("+")


def _compiled(fields: JsonFields, key: str) -> re.Pattern[str]:
    """As PEFT compares it: with the whole name, or with what is behind one of its dots."""
    is_known = len(key) <= _MOST_KEY and _repeats(key) <= _MOST_REPEATS and _KEY.fullmatch(key)
    begin = "" if key.startswith(".*") and "|" not in key else r"(?:.*\.)?"
    try:
        if is_known:
            return re.compile(f"{begin}(?:{_of_text(key)})$")
    except re.error:
        pass
    raise fields.fault(
        key[:_MOST_KEY], "is no end of modules' names, or pattern of characters, classes, choices and a few repeats"
    )


def _of_text(module: str) -> str:
    """The name, or pattern, where a model with images calls it the language model's."""
    return module.replace("language_model\\.", "").replace("language_model.", "")
