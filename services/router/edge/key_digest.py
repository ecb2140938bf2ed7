"""The form in which an API key is kept: its digest. Keys are drawn at random, so no salt or slow hash is needed."""

from __future__ import annotations

import hashlib
import re

_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.IGNORECASE)


def key_digest(key: str, plain: bool = False) -> str:
    """`sha256:<hex>` of a key. What has that form already stays, unless `plain`: what a client sends is a key."""
    if not plain and _DIGEST.fullmatch(key):
        return key.lower()
    return _PREFIX + hashlib.sha256(key.encode()).hexdigest()
