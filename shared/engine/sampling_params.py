"""Sampling parameters of a request: one frozen value object, validated where it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, get_args

from shared.errors import InvalidRequest
from shared.structure.structured_output import StructuredOutput

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
"""Tokens with a bias of their own."""
MAX_BAD_SEQUENCES = 1024
"""Token sequences that must not be completed."""
GREEDY_BELOW = 1e-5
"""Temperatures below this mean 0: logits divided by less may leave the range of fp32."""
LEAST_REPETITION = 2.0**-16
"""Likewise, the least repetition penalty: what it made infinite would be taken for a fault of the model's. The same
number in fp32."""


MOST_GUESSES = 15
"""Most guesses of one sequence in one step."""
AUTO, OFF = "auto", "off"
DRAFTERS = ("ngram", "grammar", "draft", "heads")
"""Methods that guess."""
METHODS = (AUTO, OFF, *DRAFTERS)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which drafters may guess for an answer, and how far. It changes how fast the answer comes and nothing else.
    Raises InvalidRequest naming the field."""

    method: str = AUTO
    """auto: each that the worker has; off: none; else the drafter's name."""
    most_guesses: int = MOST_GUESSES
    """Tokens beyond the next one that one step may guess; `max` in requests."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            limit = f"one of {', '.join(METHODS)}"
            raise InvalidRequest(
                f"speculation.method must be {limit}, got {self.method!r}", field="speculation.method", limit=limit
            )
        if not 1 <= self.most_guesses <= MOST_GUESSES:
            raise InvalidRequest(
                f"speculation.max must be 1 to {MOST_GUESSES}, got {self.most_guesses}",
                field="speculation.max",
                limit=MOST_GUESSES,
            )

    def allows(self, method: str) -> bool:
        """Whether the drafter of this name may guess."""
        return self.method in (AUTO, method)


DEFAULT_SPECULATION = Speculation()


MAX_BEAMS = 10
"""Beams that one search follows: each step looks at as many likeliest tokens of each, and one more for each end."""
EarlyStopping = Literal["false", "true", "never"]
"""When a search ends that has as many ended answers as beams: where the best open one seems unable to become better
than the worst of these, at once, or where no length could make it better."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search for the likeliest answers, as `transformers` does it. Raises InvalidRequest naming the field."""

    width: int
    """Answers that are followed at once."""
    num_answers: int
    """The best ones, which are the result."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its log-probabilities over its length to this power."""
    early_stopping: EarlyStopping = "false"

    def __post_init__(self) -> None:
        _check(1 <= self.width <= MAX_BEAMS, "best_of", self.width, f"1 to {MAX_BEAMS} with use_beam_search")
        _check(1 <= self.num_answers <= self.width, "n", self.num_answers, f"1 to best_of ({self.width})")
        # Larger powers leave the range of floats in long answers.
        _check(-10.0 <= self.length_penalty <= 10.0, "length_penalty", self.length_penalty, "between -10 and 10")
        known = get_args(EarlyStopping)
        _check(self.early_stopping in known, "early_stopping", self.early_stopping, "true, false or 'never'")


def _check(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequest(f"{field} must be {limit}, got {value!r}", field=field, limit=limit)


Pooling = Literal["", "last", "mean"]
"""Nothing, the last token's hidden state, or the mean over all tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings under their usual names; raises InvalidRequest naming the field and its limit.

    The defaults leave the model's distribution as it is. `temperature=0` is greedy. `max_tokens=None` and
    `seed=None` are filled in by the router (`resolved`) before a worker sees them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives; 0 = the chosen token only
    prompt_logprobs: int | None = None  # the same for each token of the prompt, but the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), by token id
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # token ids; the last of each is never chosen behind the others
    structured_output: StructuredOutput | None = None  # what the answer must match; None = free text
    speculation: Speculation = DEFAULT_SPECULATION  # which guesses may be made; never changes an answer
    pooling: Pooling = ""  # what of the prompt's hidden states comes with the first token
    beams: BeamSearch | None = None  # the likeliest answers are searched for; nothing is drawn

    def __post_init__(self) -> None:
        # No call for what is right: the router makes these twice a request.
        if not 0.0 <= self.temperature <= 100.0:
            self._refuse("temperature", "between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            self._refuse("top_p", "in (0, 1]")
        if not 0 <= self.top_k < 2**31:
            self._refuse("top_k", "from 0 (off) to 2147483647")
        if not 0.0 <= self.min_p <= 1.0:
            self._refuse("min_p", "in [0, 1]")
        if not LEAST_REPETITION <= self.repetition_penalty <= 2.0:
            self._refuse("repetition_penalty", f"between {LEAST_REPETITION} and 2")
        if not -2.0 <= self.presence_penalty <= 2.0:
            self._refuse("presence_penalty", "in [-2, 2]")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            self._refuse("frequency_penalty", "in [-2, 2]")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            self._refuse("seed", "in [0, 2^64)")
        self._check_lengths()
        if self.stop or self.stop_token_ids:
            self._check_stops()
        if self.beams is not None:
            self._check_beams()
        if self.logit_bias or self.bad_sequences:
            self._check_changed_logits()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            self._refuse("max_tokens", "at least 1")
        if self.min_tokens < 0:
            self._refuse("min_tokens", "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            self._refuse("logprobs", f"between 0 and {MAX_LOGPROBS}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            self._refuse("prompt_logprobs", f"between 0 and {MAX_LOGPROBS}")

    def _check_stops(self) -> None:
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            _check(0 < len(text) <= MAX_STOP_STRING_LEN, "stop", text, f"1 to {MAX_STOP_STRING_LEN} characters each")
        num_ids = len(self.stop_token_ids)
        _check(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, f"at most {MAX_STOP_TOKEN_IDS} ids")

    def _check_beams(self) -> None:
        """A search reads the model's own log-probabilities: what changes them, or an answer while it is written, does
        not go with it."""
        for field, differs in (
            ("stop", bool(self.stop)),
            ("min_tokens", self.min_tokens > 0),
            ("logprobs", self.logprobs is not None),
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("top_p", self.top_p != 1.0),
            ("top_k", self.top_k != 0),
            ("min_p", self.min_p != 0.0),
            ("repetition_penalty", self.repetition_penalty != 1.0),
            ("presence_penalty", self.presence_penalty != 0.0),
            ("frequency_penalty", self.frequency_penalty != 0.0),
            ("logit_bias", bool(self.logit_bias)),
            ("bad_words", bool(self.bad_sequences)),
            ("structured_output", self.structured_output is not None),
            ("speculation", self.speculation.method not in (AUTO, OFF)),
        ):
            if differs:
                raise InvalidRequest(f"{field} does not go with use_beam_search", field=field)

    def _check_changed_logits(self) -> None:
        limit = f"at most {MAX_LOGIT_BIAS} tokens"
        _check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", len(self.logit_bias), limit)
        for _, bias in self.logit_bias:
            _check(-100.0 <= bias <= 100.0, "logit_bias", bias, "between -100 and 100")
        num_bad = len(self.bad_sequences)
        _check(num_bad <= MAX_BAD_SEQUENCES, "bad_words", num_bad, f"at most {MAX_BAD_SEQUENCES} token sequences")
        _check(all(self.bad_sequences), "bad_words", "", "at least one token each")

    def _refuse(self, field: str, limit: str) -> NoReturn:
        value = getattr(self, field)
        if isinstance(value, float) and not math.isfinite(value):
            limit = "a finite number"
        raise InvalidRequest(f"{field} must be {limit}, got {value!r}", field=field, limit=limit)

    @property
    def is_greedy(self) -> bool:
        """True where the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """True where a token's logit follows from how often it came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_penalties(self) -> bool:
        """True where earlier tokens change the logits."""
        return self.counts_tokens or any(len(bad) > 1 for bad in self.bad_sequences)

    @property
    def changes_logits(self) -> bool:
        """True where tokens are not chosen from the model's logits as they are."""
        return self.has_penalties or bool(self.logit_bias) or bool(self.bad_sequences)

    def resolved(self, *, seed: int, max_tokens: int) -> SamplingParams:
        """Fills in `seed` and `max_tokens` where the client left them open; raises where min_tokens then breaks."""
        if self.seed is not None and self.max_tokens is not None:
            return self
        return replace(
            self,
            seed=self.seed if self.seed is not None else seed,
            max_tokens=self.max_tokens if self.max_tokens is not None else max_tokens,
        )
