"""How many examples of a property are drawn: a part of them in the default tier, all in `make test-all`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

ALL = {"TANDEM_TEST_EXAMPLES": "all"}
"""The environment variable that asks for all examples."""
_SHARE, _LEAST = 0.3, 10
"""Each run draws new examples, so those that one run leaves out come in another."""


def examples(most: int, **others: Any) -> settings:
    """Settings of a property: at most `most` examples, fewer where not all are asked for; `others` as in Hypothesis."""
    few = min(most, max(_LEAST, round(_SHARE * most)))
    return settings(max_examples=most if ALL.items() <= os.environ.items() else few, **others)
