"""`tandem generate`: one prompt, one streamed answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from shared.errors import InvalidRequest, brief
from shared.rpc.pb.tandem.v1 import types_pb2
from tandem import Answer, AnswerStream, Options, TandemClient
from tandem.options import Prompt
from tandem_cli.options import (
    DEFAULT_RETRY_FOR_S,
    LOCAL,
    Connection,
    MaxTokens,
    RetryFor,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from tandem_cli.split_view import print_summary

_MAX_DIGITS = 20
"""Of a token's id; Python reads no number of some thousand."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past end tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Plain completion: no chat template.")] = False,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="The prompt is token ids, such as 1,15,9.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    model: Annotated[str, typer.Option(help="Served name; empty = the first model.")] = "",
    connection: Connection = LOCAL,
    retry_for: RetryFor = DEFAULT_RETRY_FOR_S,
) -> None:
    """Stream an answer to stdout; timings and the request's id go to stderr.

    A lost router costs a pause where others can be asked.
    """
    options = Options(
        model=model,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop=stop or [],
        ignore_eos=ignore_eos,
    )
    if seed is not None:
        options["seed"] = seed
    text = sys.stdin.read() if prompt == "-" else prompt
    with connection.open(TandemClient, retry_for_s=retry_for) as client:
        stream = client.stream(_prompt(text, raw=raw, token_ids=token_ids), **options)
        answer = stream.answer
        try:
            _show(stream, quiet=as_json)
        finally:
            if answer.text and not as_json:
                print(flush=True)
            if answer.token_ids and not as_json:
                print(f"request {answer.request_id}", file=sys.stderr)
    if as_json:
        print(answer_json(answer))
    else:
        console = Console(stderr=True)
        if console.is_terminal:
            console.print()
        print_summary(console, answer)


def answer_json(answer: Answer) -> str:
    """The answer as one line of JSON, including parts of the split that are 0."""
    return json.dumps(
        {
            "request_id": answer.request_id,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "usage": _fields(answer.usage),
            "ttft_ms": round(answer.ttft_ms, 3),
            "tpot_ms": round(answer.tpot_ms, 3),
            "router_split": {name: round(value, 3) for name, value in _fields(answer.split).items()},
            "prefill_worker": answer.prefill_worker,
            "decode_worker": answer.decode_worker,
        },
        ensure_ascii=False,
    )


def _prompt(text: str, *, raw: bool, token_ids: bool) -> Prompt:
    if token_ids:
        return parse_token_ids(text)
    return text if raw else [{"role": "user", "content": text}]


def _show(stream: AnswerStream, *, quiet: bool) -> None:
    """Prints the text as it comes, unless the whole answer is printed at the end."""
    with stream:
        for delta in stream:
            if not quiet:
                write_text(delta.text)


def write_text(text: str) -> None:
    """Puts a piece of an answer on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _fields(message: types_pb2.Usage | types_pb2.TtftSplit) -> dict[str, float]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def parse_token_ids(text: str) -> list[int]:
    """`1,15 9` as numbers of 32 bits; raises InvalidRequest."""
    parts = text.replace(",", " ").split()
    if not all(part.isdecimal() and len(part) <= _MAX_DIGITS and int(part) < 2**32 for part in parts):
        message = f"token ids must be comma-separated numbers below 2**32, got {brief(repr(text))}"
        raise InvalidRequest(message, field="token_ids")
    return [int(part) for part in parts]
