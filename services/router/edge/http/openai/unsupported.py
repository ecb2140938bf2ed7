"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's APIs that are known and not supported: refused by name, never
dropped.

A value that asks for nothing beyond our behaviour (null, or one listed here) passes. Fields that appear
nowhere in these APIs are ignored, as OpenAI-compatible servers do, unless they look like one that is misspelt; so are
pure hints such as `user`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from itertools import islice

from pydantic import BaseModel

from shared.errors import InvalidRequest

_COMMON: Mapping[str, tuple[object, ...]] = {
    "custom_logit_processor": (),
    "dry_multiplier": (0, 0.0),
    "grammar": ("",),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "n_predict": (-1,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "typical_p": (1, 1.0),
    "vllm_xargs": ({},),
    "xtc_probability": (0, 0.0),
}

COMPLETION_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "prompt_embeds": (),
    "suffix": ("",),
}

CHAT_FIELDS: Mapping[str, tuple[object, ...]] = {
    **_COMMON,
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "web_search_options": (),
}

MESSAGE_FIELDS: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "thinking": (),
}

STREAM_OPTION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "include_obfuscation": (False,),
}


HINTS: Mapping[str, str] = {
    "include_obfuscation": "events are not padded",
    "metadata": "a label of the client's; nothing is stored",
    "safety_identifier": "nothing is reported about users",
    "store": "answers are not stored, whatever it says",
    "user": "nothing is reported about users",
}
"""Fields that are taken and change nothing, and why."""


_ALIKE = 0.82
"""From this likeness on (difflib's ratio) a field is taken for a misspelt one: `max_new_tokens`, `repeat_penalty`."""
_MAX_COMPARED, _MAX_NAME_LEN = 8, 64
"""Fields of a body that are compared, and how long their names may be: it takes 0.2 ms each."""


def refuse_extra(request: BaseModel, known: Mapping[str, tuple[object, ...]]) -> None:
    """Raises InvalidRequest for the fields of a body beyond its schema's that are refused: what we know and do not do,
    and what is misspelt."""
    refuse_unsupported(request.model_extra, known)
    _refuse_misspelt(request.model_extra, type(request).model_fields, known)


def _refuse_misspelt(
    given: Mapping[str, object] | None, served: Collection[str], known: Mapping[str, tuple[object, ...]]
) -> None:
    """Raises InvalidRequest naming the first field of `given` that is nowhere in the API but close to one that is:
    ignored, it would be an answer to another question."""
    names = [*served, *known, *HINTS]
    others = (name for name, value in (given or {}).items() if value is not None and name not in names)
    for name in islice(others, _MAX_COMPARED):
        near = get_close_matches(name, names, n=1, cutoff=_ALIKE) if len(name) <= _MAX_NAME_LEN else []
        if near:
            raise InvalidRequest(f"there is no field {name}: did you mean {near[0]}?", field=name)


def refuse_unsupported(
    given: Mapping[str, object] | None, known: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raises InvalidRequest naming the first field of `given` that asks for something we cannot do."""
    for name, value in (given or {}).items():
        if value is None or name not in known:
            continue
        if not any(type(value) is type(harmless) and value == harmless for harmless in known[name]):
            field = prefix + name
            raise InvalidRequest(f"{field} is not supported here", field=field)
