"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from services.local.spec import DEFAULT_GRPC

Target = Annotated[
    str,
    typer.Option(
        "--target", "-t", envvar="TANDEM_TARGET", help="host:port of a router's gRPC API, or several, comma-separated."
    ),
]
ApiKey = Annotated[
    str,
    typer.Option("--api-key", envvar="TANDEM_API_KEY", help="API key, if the cluster requires one."),
]
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
"""Where `tandem up` serves gRPC by default."""


def targets_of(text: str) -> list[str]:
    """The addresses that `--target` names."""
    return [part.strip() for part in text.split(",")]
