"""Sampling settings that a model's authors recommend, from its `generation_config.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from services.router.edge.text.prompt_tokenizer import MAX_BAD_WORDS
from shared.engine.sampling_params import MAX_BAD_SEQUENCES, SamplingParams
from shared.errors import InvalidRequest, ModelLoadError, brief
from shared.model.config.json_fields import read_json_object
from shared.model.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"

_SUPPRESSED, _BAD = "suppress_tokens", "bad_words_ids"
MAX_DEFAULT_SEQUENCES = MAX_BAD_SEQUENCES - 2 * MAX_BAD_WORDS
"""Token sequences that the file may forbid: a request's own `bad_words`, each in two spellings, fit beside them."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([], ""),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "sequence_bias": ({}, []),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "typical_p": (0, 1),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Fields of the file that would change answers and are not served, with the values, beside null, that ask for
nothing. `length_penalty` and `early_stopping` count with beams alone; `max_length` is the context's length in files
that have it, and `max_new_tokens` no recommendation: see `GenerationDefaults.load`."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request takes that does not say; None: our own default, which leaves the distribution as it is."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_sequences: tuple[tuple[int, ...], ...] | None = None  # `suppress_tokens` and `bad_words_ids`
    unserved: tuple[str, ...] = ()
    """Fields of the file that would change answers, and are not served."""

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> GenerationDefaults:
        """The defaults of a model folder; all None where it has no such file. `vocab_size`: the model's; suppressed
        token ids outside it are ignored, those of bad words are an error. The file's `max_new_tokens` is no
        recommendation: it is the length at which its tools stop by default.

        Raises:
            ModelLoadError: the file is not valid, or a value out of the bounds of sampling; `field` names it.
        """
        path = folder / GENERATION_FILE
        if not path.is_file():
            return cls()
        content = read_json_object(path)
        given = {name: content[name] for name in _NUMBERS if content.get(name) is not None}
        for name, value in given.items():
            if not isinstance(value, int if name == "top_k" else int | float) or isinstance(value, bool):
                raise _invalid(f"{name} must be a number, found {brief(repr(value), 80)}", name)
        try:
            SamplingParams(**given)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise _invalid(str(error), error.field or "") from None
        bad = _forbidden(content, vocab_size, eos_token_ids) or None
        return cls(**given, bad_sequences=bad, unserved=_unserved(content))  # type: ignore[arg-type]

    @cached_property
    def given(self) -> Mapping[str, float | tuple[tuple[int, ...], ...]]:
        """The sampling settings that are set, by name."""
        names = (*_NUMBERS, "bad_sequences")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_NUMBERS = tuple(item.name for item in fields(GenerationDefaults) if item.name not in ("bad_sequences", "unserved"))
NO_DEFAULTS = GenerationDefaults()


def recommended(folder: Path, config: ModelConfig) -> GenerationDefaults:
    """The defaults of the model folder of `config`. Warns by name of fields that would change answers and are not
    served. Raises ModelLoadError."""
    defaults = GenerationDefaults.load(folder, config.vocab_size, config.eos_token_ids)
    if defaults.unserved:
        logger.warning("%s/%s: answers do not follow %s", folder.name, GENERATION_FILE, ", ".join(defaults.unserved))
    return defaults


def _forbidden(
    content: Mapping[str, object], vocab_size: int, eos_token_ids: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences whose last token is never chosen behind the others. As in `transformers`, a bad word that is
    an end of answers is none."""
    listed = _token_ids(_SUPPRESSED, content.get(_SUPPRESSED))
    suppressed = [token_id for token_id in listed if 0 <= token_id < vocab_size]  # `transformers` ignores others too
    words = content.get(_BAD)
    if words is not None and not isinstance(words, list):
        raise _invalid(f"{_BAD} must be a list of lists of token ids, found {brief(repr(words), 80)}", _BAD)
    bad = [_token_ids(_BAD, word) for word in words or ()]
    if not all(bad):
        raise _invalid(f"{_BAD} must have at least one token id in each list", _BAD)
    outside = next((token_id for word in bad for token_id in word if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise _invalid(f"{_BAD}: token id {outside} is outside the vocabulary of {vocab_size}", _BAD)
    kept = [word for word in bad if len(word) > 1 or word[0] not in eos_token_ids]
    forbidden = tuple(dict.fromkeys((*((token_id,) for token_id in suppressed), *kept)))
    if len(forbidden) > MAX_DEFAULT_SEQUENCES:
        name = _BAD if len(kept) > len(suppressed) else _SUPPRESSED
        found = f"at most {MAX_DEFAULT_SEQUENCES} are served, found {len(forbidden)}"
        raise _invalid(f"{name}: {found}; edge.generation_defaults=false serves without the file's defaults", name)
    return forbidden


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise _invalid(f"{name} must have lists of token ids, found {brief(repr(value), 80)}", name)
    return tuple(value)


def _unserved(content: Mapping[str, object]) -> tuple[str, ...]:
    """The fields that would change answers, in the file's order."""
    given = ((name, content[name]) for name in content if name in NEUTRAL)
    return tuple(name for name, value in given if value is not None and value not in NEUTRAL[name])


def _invalid(message: str, field: str) -> ModelLoadError:
    return ModelLoadError(f"{GENERATION_FILE}: {message}", field=field, file=GENERATION_FILE)
