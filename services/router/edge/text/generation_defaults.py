"""Sampling settings that a model's authors recommend, from its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from shared.engine.sampling_params import SamplingParams
from shared.errors import InvalidRequest, ModelLoadError
from shared.model.config.json_fields import read_json_object

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request takes that does not say; None: our own default, which leaves the distribution as it is."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """The defaults of a model folder; all None where it has no such file. Its `max_new_tokens` is no
        recommendation: it is the length at which its tools stop by default.

        Raises:
            ModelLoadError: the file is not valid, or a value out of the bounds of sampling; `field` names it.
        """
        path = folder / GENERATION_FILE
        if not path.is_file():
            return cls()
        content = read_json_object(path)
        given = {item.name: content[item.name] for item in fields(cls) if content.get(item.name) is not None}
        for name, value in given.items():
            if not isinstance(value, int if name == "top_k" else int | float) or isinstance(value, bool):
                raise ModelLoadError(
                    f"{GENERATION_FILE}: {name} must be a number, found {value!r}", field=name, file=GENERATION_FILE
                )
        try:
            SamplingParams(**given)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ModelLoadError(f"{GENERATION_FILE}: {error}", field=error.field, file=GENERATION_FILE) from None
        return cls(**given)  # type: ignore[arg-type]

    @cached_property
    def given(self) -> Mapping[str, float]:
        """The values that are set, by name."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}


NO_DEFAULTS = GenerationDefaults()
