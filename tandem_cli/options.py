"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.settings.common import DEFAULT_GRPC
from tandem import ClientTls

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum output tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy, 1 the model's own distribution.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 = all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]

RetryFor = Annotated[
    float,
    typer.Option("--retry-for", min=0.0, help="Give up this many seconds after a loss if no new token comes."),
]

DEFAULT_RETRY_FOR_S = 30.0
DEFAULT_TARGET = DEFAULT_GRPC
"""Where `tandem serve` serves gRPC by default."""

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Connection:
    """How a command reaches the cluster: each field is an option of every command that does, see `spread`."""

    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            envvar="TANDEM_TARGET",
            help="host:port of a router's gRPC API, or several, comma-separated.",
        ),
    ] = DEFAULT_TARGET
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="TANDEM_API_KEY", help="API key, if the cluster requires one.")
    ] = ""
    tls: Annotated[
        bool, typer.Option("--tls", envvar="TANDEM_TLS", help="Speak TLS, as --ca, --cert and --server-name do too.")
    ] = False
    ca: Annotated[
        Path | None,
        typer.Option(envvar="TANDEM_CA", help="Authority of the routers' certificates, PEM; else the system's."),
    ] = None
    cert: Annotated[
        Path | None, typer.Option(envvar="TANDEM_CERT", help="Certificate for routers that ask for one, PEM.")
    ] = None
    key: Annotated[Path | None, typer.Option(envvar="TANDEM_KEY", help="Private key of --cert, PEM.")] = None
    server_name: Annotated[
        str, typer.Option(envvar="TANDEM_SERVER_NAME", help="Name in the routers' certificates; empty = the address.")
    ] = ""

    def open(self, client: Callable[..., C], **further: object) -> C:
        """A client of this class with these addresses, key and TLS. Raises ConfigError."""
        targets = [part.strip() for part in self.target.split(",")]
        return client(targets, api_key=self.api_key, tls=self._client_tls(), **further)

    def _client_tls(self) -> ClientTls | None:
        if not (self.tls or self.ca or self.cert or self.key or self.server_name):
            return None
        return ClientTls(ca=self.ca, cert=self.cert, key=self.key, server_name=self.server_name)


LOCAL = Connection()
"""To the cluster of `tandem serve` on this machine."""
