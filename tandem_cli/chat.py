"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from shared.errors import TandemError
from tandem import Answer, Options, TandemClient
from tandem_cli.failures import report
from tandem_cli.generate import write_text
from tandem_cli.options import LOCAL, Connection, MaxTokens, Temperature, TopP

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def chat(
    system: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    model: Annotated[str, typer.Option(help="Served name; empty = the first model.")] = "",
    connection: Connection = LOCAL,
) -> None:
    """Talk with the model; the conversation's prefix stays cached in the cluster."""
    sampling = Options(model=model, temperature=temperature, top_p=top_p, max_tokens=max(max_tokens, 0))
    with connection.open(TandemClient) as client:
        status = client.status()  # a wrong address fails before the first question
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
            print(f"{model or status.model_name} at {connection.target}. {_HELP}.")
        _converse(client, sampling, system, interactive)


def _converse(client: TandemClient, sampling: Options, system: str, interactive: bool) -> None:
    """Turns until /exit or the end of the input. A failed turn is reported and left out of the conversation."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read(interactive)) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            continue
        if line.startswith("/"):
            print(f"no such command: {line.split()[0]} ({_HELP})", file=sys.stderr)
            continue
        if not line:
            continue
        turn = [*messages, {"role": "user", "content": line}]
        answer = Answer()
        try:
            stream = client.stream(turn, **sampling)
            answer = stream.answer
            with stream:
                for delta in stream:
                    write_text(delta.text)
        except KeyboardInterrupt:
            write_text(" …")
        except TandemError as error:
            if answer.text:
                print()
            report(error)
            continue
        print()
        messages = [*turn, {"role": "assistant", "content": answer.text}]


def _read(interactive: bool) -> str | None:
    """One line of input, None at its end; Ctrl-C leaves, like Ctrl-D."""
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None
