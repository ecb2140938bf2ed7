"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Annotated

import typer

from services.cli.answer import Answer, stream_answer
from services.cli.client import InferenceClient
from services.cli.failures import report
from services.cli.generate import write_text
from services.cli.options import DEFAULT_TARGET, ApiKey, MaxTokens, Target, Temperature, TopP
from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def chat(
    system: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    target: Target = DEFAULT_TARGET,
    api_key: ApiKey = "",
) -> None:
    """Talk with the model; the conversation's prefix stays cached in the cluster."""
    sampling = types_pb2.SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max(max_tokens, 0))
    with asyncio.Runner() as runner:
        client = InferenceClient(target, api_key)
        status = runner.run(_connect(client))
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
            print(f"{status.model_name} at {target}. {_HELP}.")
        try:
            _converse(runner, client, sampling, system, interactive)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _converse(
    runner: asyncio.Runner,
    client: InferenceClient,
    sampling: types_pb2.SamplingParams,
    system: str,
    interactive: bool,
) -> None:
    """Turns until /exit or the end of the input. A failed turn is reported and left out of the conversation."""
    opening = [inference_pb2.ChatMessage(role="system", content=system)] if system else []
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
        turn = [*messages, inference_pb2.ChatMessage(role="user", content=line)]
        request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=turn), sampling=sampling)
        answer = Answer()
        try:
            runner.run(stream_answer(client, request, answer, write_text))
        except KeyboardInterrupt:
            write_text(" …")
        except TandemError as error:
            if answer.text:
                print()
            report(error)
            continue
        print()
        messages = [*turn, inference_pb2.ChatMessage(role="assistant", content=answer.text)]


async def _connect(client: InferenceClient) -> inference_pb2.ClusterStatus:
    """Opens the client and gets the cluster's status: a wrong address fails before the first question."""
    await client.__aenter__()
    try:
        return await client.status()
    except BaseException:
        await client.__aexit__(None, None, None)
        raise


def _read(interactive: bool) -> str | None:
    """One line of input, None at its end; Ctrl-C leaves, like Ctrl-D."""
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
        return None
