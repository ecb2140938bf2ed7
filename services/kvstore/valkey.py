"""`python -m services.kvstore.valkey`: the embedded Valkey as a process of its own, for benchmarks and manual use.

Its one event names the URL as `address`; see shared/process.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from services.kvstore.embedded import EmbeddedValkey
from shared.config import ServiceSettings
from shared.process import run_service


class ValkeySettings(ServiceSettings):
    """Only log settings; the server's settings are fixed."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        **{**ServiceSettings.model_config, "env_prefix": "TANDEM_VALKEY_"}
    )


class ValkeyService:
    """Implements `shared.process.Service` over a started server, which it owns."""

    def __init__(self, server: EmbeddedValkey) -> None:
        self._server = server
        self.endpoints: Mapping[str, str] = {}
        """Empty: only `address` is served."""

    @property
    def address(self) -> str:
        """A value for `redis_url` settings."""
        return self._server.url

    async def close(self) -> None:
        """Ends the server."""
        await self._server.stop()


async def _start(_: ValkeySettings) -> ValkeyService:
    server = EmbeddedValkey()
    await server.start()
    return ValkeyService(server)


if __name__ == "__main__":
    sys.exit(run_service("tandem-valkey", ValkeySettings, _start))
