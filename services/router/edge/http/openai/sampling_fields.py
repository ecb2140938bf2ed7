"""The fields by which a request says how its tokens are chosen: OpenAI's, and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from services.router.edge.http.bodies import STRICT, StringList, TokenIdList
from services.router.edge.http.openai.structure_fields import StructureFields
from services.router.edge.text.generation_defaults import GenerationDefaults
from shared.engine.sampling_params import (
    DEFAULT_SPECULATION,
    MOST_GUESSES,
    BeamSearch,
    EarlyStopping,
    SamplingParams,
    Speculation,
)
from shared.errors import InvalidRequest, brief

MAX_N = 128
"""Answers to one prompt."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)


class SpeculationFields(BaseModel):
    """`speculation` in full."""

    model_config = STRICT

    method: Literal["auto", "off", "ngram", "grammar", "draft", "heads"] = "auto"
    """auto: all that the decode worker is set to; else the only drafter that may guess."""
    max: int | None = None
    """Most tokens that one step guesses."""


class SamplingFields(StructureFields):
    """How tokens are chosen: fields that all endpoints for answers share."""

    model_config = STRICT

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | StringList | None = None
    stop_token_ids: TokenIdList | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: StringList | None = None
    speculation: Literal["auto", "off"] | SpeculationFields | None = None
    """Which guesses of the answer's next tokens may be computed: it changes how fast the answer comes, and nothing
    else."""
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    """Answers that are computed for each prompt: `n` of them are the result, those of the highest mean log-probability;
    of a beam search the beams."""
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    def beam_search(self, n: int) -> BeamSearch | None:
        """The search whose `n` best answers are wanted; None where tokens are drawn. Raises InvalidRequest naming the
        field."""
        if not self.use_beam_search:
            for field, value in (("length_penalty", self.length_penalty), ("early_stopping", self.early_stopping)):
                if value not in (None, 1.0 if field == "length_penalty" else False):
                    raise InvalidRequest(f"{field} needs use_beam_search", field=field)
            return None
        if self.temperature not in (None, 0, 1):
            raise InvalidRequest(
                "temperature must be 0 or absent with use_beam_search, which draws nothing",
                field="temperature",
                limit=0,
            )
        stopping = self.early_stopping if self.early_stopping == "never" else str(bool(self.early_stopping)).lower()
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamSearch(self.best_of or n, n, penalty, cast(EarlyStopping, stopping))

    def check_best(self, n: int, *, is_stream: bool) -> None:
        """Raises InvalidRequest where `n` answers cannot be chosen from those computed."""
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}), got {self.best_of}", field="best_of", limit=n)
        field = "use_beam_search" if self.use_beam_search else "best_of" if (self.best_of or n) > n else ""
        if field and is_stream:
            raise InvalidRequest(f"{field} does not go with stream: the best answer is known at the end", field=field)

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: GenerationDefaults, n: int = 1
    ) -> SamplingParams:
        """The core's value object of these fields, with the model's defaults, for `n` answers; raises InvalidRequest
        naming the field."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's other way to say "off"
            given["top_k"] = 0
        beams = self.beam_search(n)
        if beams is not None:
            given["temperature"] = 0.0
        elif (self.best_of or n) > n and logprobs is None:
            logprobs = 0  # by which they are compared
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            **{**(defaults.given if beams is None else {}), **given},
            seed=None if self.seed == -1 else self.seed,  # vLLM's way to say "any"
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias or {}),
            structured_output=self.structured_output(),
            speculation=_speculation(self.speculation),
            beams=beams,
        )


def _speculation(given: str | SpeculationFields | None) -> Speculation:
    if given is None:
        return DEFAULT_SPECULATION
    if isinstance(given, str):
        return Speculation(given)
    if unknown := next((name for name, value in (given.model_extra or {}).items() if value is not None), ""):
        name, served = brief(unknown, 40), " and ".join(type(given).model_fields)
        raise InvalidRequest(f"speculation has no field {name}: it has {served}", field=f"speculation.{name}")
    return Speculation(given.method, MOST_GUESSES if given.max is None else given.max)


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """The biases by token id, as the core takes them."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidRequest(
                f"logit_bias must have token ids as its keys, got {brief(key, 40)!r}", field="logit_bias"
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))
