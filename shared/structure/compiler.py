"""Structures compiled for one vocabulary, once each, in threads beside everything else."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shared.errors import InvalidRequest, ModelLoadError, Overloaded, brief
from shared.structure.grammar_text import grammar_text
from shared.structure.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from shared.model.text.tokenizer import Tokenizer

MAX_COMPILED = 64
"""Compiled structures that are kept, the least recently used ones leaving first."""
MAX_PENDING = 32
"""Structures that wait to be compiled; more are refused as overload."""
NUM_THREADS = 2

MAX_GRAMMAR_SIZE = 200_000
"""Symbols of a grammar."""
MAX_STATES = 20_000
"""States of a lexer, of 1 to 2 kB each, which grow as an answer visits them."""
MAX_STEP_ITEMS = 50_000
"""Parser items that one token may add; about 2.5 ms."""
STEP_FUEL = 200_000
"""Work of the lexer for one mask; about 14 ms."""
COMPILE_FUEL = 1_000_000
"""Work of the lexer at the start; about 20 ms."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (r"[\x20\x0A\x0D\x09]+", *(_IN_STRING + length for length in ("{1,4}", "{1,10}", "{1,30}", "+")))
"""Sets of tokens whose bits are known beforehand: where a state allows one of them as a whole, its tokens are not
walked through. llguidance's own, and the short ones, which strings near their `maxLength` still allow."""

EAGER_VOCAB_SIZE = 32_768
"""From this size on a vocabulary's tree of bytes is built at the start. Python's lock is held meanwhile, 1 s for
128 000 tokens: too long for a worker whose heartbeats are waited for."""


class StructureCompiler:
    """One vocabulary's structures. Any thread may call it."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Collection[int], vocab_size: int = 0
    ) -> None:
        """`load_tokenizer` is called once, by the first structure; `eos_token_ids`: what may end an answer;
        `vocab_size`: rows of the model's logits, 0 = as many as tokens."""
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, Future[LLMatcher]] = OrderedDict()
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "structures")  # started by the first structure

    def start(self, vocab_size: int) -> None:
        """Builds a large vocabulary's tree now; blocking. Without the package every structure is refused later."""
        if vocab_size >= EAGER_VOCAB_SIZE:
            # What cannot be built is asked for again, and refused with its reason, by the first structure.
            with contextlib.suppress(ImportError, ValueError, ModelLoadError):
                self._vocabulary()

    @property
    def num_words(self) -> int:
        """32-bit words of a mask, a bit for each token id; it may grow with the first structure."""
        vocab_size = self._vocab_size if self._tokenizer is None else self._tokenizer.vocab_size
        return -(-vocab_size // 32)

    def prepare(self, structure: StructuredOutput, *, is_needed: bool = False) -> Future[LLMatcher]:
        """The compiled structure, sooner or later: a matcher before its first token, which callers copy.

        The future raises InvalidRequest with llguidance's reason. Raises Overloaded where too many wait, unless it
        `is_needed`, by an answer that was taken on.
        """
        with self._lock:
            known = self._compiled.get(structure)
            if known is not None:
                self._compiled.move_to_end(structure)
                return known
            if self._num_pending >= MAX_PENDING and not is_needed:
                raise Overloaded(f"{MAX_PENDING} structures wait to be compiled")
            self._num_pending += 1
            future = self._threads.submit(self._compile, structure)
            self._compiled[structure] = future
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def compile(self, structure: StructuredOutput) -> LLMatcher:
        """As needed, and waits for it. Raises InvalidRequest."""
        return self.prepare(structure, is_needed=True).result()

    def _compile(self, structure: StructuredOutput) -> LLMatcher:
        try:
            return self._matcher(structure)
        except ImportError:
            raise _refused(structure, "the package llguidance is not installed here") from None
        except (ValueError, ModelLoadError) as error:  # UnicodeEncodeError is a ValueError
            raise _refused(structure, str(error)) from error
        finally:
            with self._lock:
                self._num_pending -= 1

    def _matcher(self, structure: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if not self._eos_token_ids:
            raise ValueError("the model names no end token, so that no answer to it could end")
        limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=MAX_STEP_ITEMS,
            max_lexer_states=MAX_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        vocabulary = self._vocabulary()
        grammar = grammar_text(structure, vocabulary, self._eos_token_ids)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()  # also makes what every answer begins with
        reason = fault_of(matcher)
        if reason is not None:
            raise ValueError(reason)
        if not any(mask) or matcher.is_stopped():
            raise ValueError("no token of the model's vocabulary begins such an answer")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._building:
            if self._tokenizer is None:
                tokenizer = self._load_tokenizer()
                self._tokenizer = LLTokenizer(
                    tokenizer.to_json(),
                    n_vocab=max(tokenizer.vocab_size, self._vocab_size),
                    eos_token=self._eos_token_ids or None,
                    slices=list(SLICES),
                )
            return self._tokenizer


def fault_of(matcher: LLMatcher) -> str | None:
    """The reason why a matcher cannot continue; None where it can."""
    if not matcher.is_error():
        return None
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    # Its name for having found that nothing may follow.
    return "nothing satisfies it" if reason.startswith("NoExtension") else brief(reason, 500)


def _refused(structure: StructuredOutput, reason: str) -> InvalidRequest:
    field, reason = structure.kind.value, brief(reason, 500)
    return InvalidRequest(f"{field} cannot be compiled: {reason}", field=field, reason=reason)
