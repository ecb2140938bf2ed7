"""The tokens that `tokenizer_config.json` declares on top of `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from shared.errors import ModelLoadError
from shared.model.config.json_fields import read_json_object

CONFIG_FILE = "tokenizer_config.json"
LEGACY_FILE = "special_tokens_map.json"

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class TokenizerSettings:
    """Special tokens by role, and all tokens that must be in the vocabulary."""

    special_tokens: Mapping[str, str]  # "bos_token" → its text, and so on: names for chat templates
    numbered: tuple[AddedToken, ...]  # tokens with a fixed id, in the order of their ids
    special: tuple[AddedToken, ...]  # named and additional special tokens

    @classmethod
    def load(cls, folder: Path) -> TokenizerSettings:
        """Read a model folder; empty without `tokenizer_config.json`.

        Raises:
            ModelLoadError: a file is not JSON or a token is declared in an unknown way; `field` names it.
        """
        config = read_json_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
        if "added_tokens_decoder" not in config and (folder / LEGACY_FILE).is_file():
            config = {**config, **read_json_object(folder / LEGACY_FILE)}
        numbered = dict(_numbered(config.get("added_tokens_decoder")))
        by_text = {token.content: token for token in numbered.values()}

        special_tokens: dict[str, str] = {}
        special: list[AddedToken] = []
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        named = {**config, **(extra if isinstance(extra, dict) else {})}
        for role in (*_NAMED, *(name for name in named if name.endswith("_token") and name not in _NAMED)):
            value = named.get(role)
            if value is None or isinstance(value, bool):  # add_bos_token and similar fields are switches
                continue
            token = _token(role, value)
            special_tokens[role] = token.content
            special.append(by_text.get(token.content, token))
        if isinstance(extra, list):
            special += [_token("extra_special_tokens", value) for value in extra]
        return cls(
            special_tokens=special_tokens,
            numbered=tuple(numbered[number] for number in sorted(numbered)),
            special=tuple(special),
        )


def _numbered(declared: object) -> Iterator[tuple[int, AddedToken]]:
    if declared is None:
        return
    if not isinstance(declared, dict):
        raise _fault("added_tokens_decoder")
    for number, value in declared.items():
        if not isinstance(value, dict) or not number.isdecimal():
            raise _fault("added_tokens_decoder")
        yield int(number), _token("added_tokens_decoder", value)


def _token(field: str, value: object) -> AddedToken:
    """A token given as its text, or as an object with text and matching options."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise _fault(field)
    switches = {name: value[name] for name in _SWITCHES if name in value}
    if not all(isinstance(switch, bool) for switch in switches.values()):
        raise _fault(field)
    special = bool(value.get("special", field != "added_tokens_decoder"))
    return AddedToken(value["content"], special=special, **switches)


def _fault(field: str) -> ModelLoadError:
    return ModelLoadError(f"{CONFIG_FILE}: {field} does not declare a valid token", field=field, file=CONFIG_FILE)
