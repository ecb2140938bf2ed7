"""How many examples of a property are drawn: a part of them in the default tier, all in `make test-all` and on a build
server."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

ALL = {"TEST_EXAMPLES": "all"}
"""The environment variable that asks for all examples. Services refuse unknown ones that begin with TANDEM."""
_SHARE, _LEAST = 0.3, 10
"""Each run draws new examples, so those that one run leaves out come in another; a build server draws the same ones."""


def examples(most: int, **others: Any) -> settings:
    """Settings of a property: at most `most` examples, fewer where not all are asked for; `others` as in Hypothesis."""
    draws_all = ALL.items() <= os.environ.items() or "CI" in os.environ
    few = min(most, max(_LEAST, round(_SHARE * most)))
    return settings(max_examples=most if draws_all else few, **others)
