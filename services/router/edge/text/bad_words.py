"""Words that an answer must not have: their bounds, for both APIs."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import InvalidRequest, brief

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LEN = 256


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest (`bad_words`)."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are served",
            field="bad_words",
            limit=MAX_BAD_WORDS,
        )
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_LEN:
            raise InvalidRequest(
                f"bad_words must have 1 to {MAX_BAD_WORD_LEN} characters each, got {brief(word, 40)!r}",
                field="bad_words",
                limit=MAX_BAD_WORD_LEN,
            )
