"""Bearer API keys, the same for HTTP and gRPC."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from shared.errors import Unauthenticated

_SCHEME = "bearer "


class ApiKeys:
    """The keys that are let in; with none, everyone is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def check(self, authorization: str | None) -> None:
        """Passes or raises Unauthenticated; `authorization` is the header's or metadata entry's value.

        Compares with every key in constant time, so that the time taken tells nothing of any.
        """
        if not self._keys:
            return
        if authorization is None:
            raise Unauthenticated("an API key is needed: send `Authorization: Bearer KEY`", field="authorization")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("the authorization must be `Bearer KEY`", field="authorization")
        offered = authorization[len(_SCHEME) :].strip().encode()
        known = False
        for key in self._keys:
            known |= hmac.compare_digest(key, offered)
        if not known:
            raise Unauthenticated("the API key is not known here", field="authorization")
