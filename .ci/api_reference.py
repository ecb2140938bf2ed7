"""Writes docs/api.md: every field of every endpoint of the HTTP API, and whether it works or is refused.

    python .ci/api_reference.py           write the page
    python .ci/api_reference.py --check   fail where the page is stale (part of `make lint`)

The page is made from the schemas that parse the requests; a test sends every field once and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402 - the project's folder stands on the path only now

from services.router.edge.http.anthropic.schemas import MESSAGES_FIELDS, CountRequest, MessagesRequest  # noqa: E402
from services.router.edge.http.batches.endpoints import BATCH_FIELDS, BatchRequest  # noqa: E402
from services.router.edge.http.openai.completions import CompletionRequest  # noqa: E402
from services.router.edge.http.openai.schemas import ChatRequest  # noqa: E402
from services.router.edge.http.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS, HINTS  # noqa: E402
from services.router.edge.http.pages.docs_page import type_in_words  # noqa: E402
from services.router.edge.http.pooling.schemas import (  # noqa: E402
    EMBEDDING_FIELDS,
    RERANK_FIELDS,
    SCORE_FIELDS,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.router.edge.http.responses.conversations import (  # noqa: E402
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from services.router.edge.http.responses.schemas import KEPT_FIELDS, RESPONSE_FIELDS, ResponseRequest  # noqa: E402
from services.router.edge.http.tokenization import DetokenizeRequest, TokenizeRequest  # noqa: E402

INTRODUCTION = """\
# HTTP API

Made by `python .ci/api_reference.py` from the schemas that parse the requests; `make lint` fails where it is stale, and
a test sends every field once and compares. Do not edit it by hand.

Every body may have fields that are named nowhere here: they are ignored, as vLLM does, unless one looks like a
misspelt field of this API (`temprature`, `max_new_tokens`): a 400 that names the nearest. A field of these APIs that
is not served is refused by its name (400), never dropped, unless its value asks for nothing.

| path | |
| --- | --- |
| `POST /v1/completions`, `/v1/chat/completions`, `/v1/responses` | OpenAI's, and so are their errors |
| `GET`, `DELETE /v1/responses/{id}`, `POST …/cancel`, `GET …/input_items` | OpenAI's: what `store` keeps |
| `/v1/conversations`, `…/{id}`, `…/{id}/items`, `…/{id}/items/{item_id}` | OpenAI's conversations |
| `POST /v1/responses/input_tokens` | OpenAI's: counts what a response of the same body would read |
| `POST /v1/embeddings`, `/v1/score`, `/v1/rerank` | OpenAI's and vLLM's, also as `/score`, `/rerank`, `/v2/rerank` |
| `/v1/files`, `…/{id}`, `…/{id}/content` | OpenAI's files, as forms, with `purpose` `batch` or `user_data` |
| `/v1/batches`, `…/{id}`, `…/{id}/cancel` | OpenAI's batches |
| `POST /v1/messages`, `/v1/messages/count_tokens` | Anthropic's, its errors and its `x-api-key` header included |
| `POST /v1/cache/warm`, `…/close`, `…/expect` | a prompt ahead of its requests; a session that is over, or returns |
| `POST /tokenize`, `/detokenize`, `GET /tokenizer_info` | vLLM's |
| `GET /v1/models`, `/v1/models/{model}` | the served models |
| `GET /version`, `/docs`, `/openapi.json` | what this is, for people and for programs |
| `GET /`, `/status`, `/status/requests`, `/metrics` | the page and its data, with a key where keys are set |
| `GET /healthz`, `/health`, `/ping`, `/readyz` | for probes, without a key |

How tools and reasoning are found in an answer is a matter of the model: see
[tools and reasoning](guides/clients.md#tools-and-reasoning). A structure (`response_format`, `structured_outputs`,
`guided_*`) beside `tools` that the model is free to call is refused (400, naming the structure's field) where the
model writes calls as Python and a tool's schema has what its literals cannot be held to (`oneOf`, `not`, …), and
where it is an expression or a grammar; with `tool_choice` required or a name only a JSON
`response_format` (`text.format`, `output_config.format`) is taken: the answer is calls, and has no text that it would
hold for.

JSON that follows a structure has no blank or one (space, tab, line end) between two tokens;
`structured_outputs.whitespace` says `compact` (none), `one` (the default) or `any` (up to 64), also beside a
`response_format`. A number whose schema names its type and no bound has at most 20 digits: an integer lies within
10^18, another number within 10^9 with at most nine digits behind the point, and no exponent.
`structured_outputs.numbers` `any` opens that, and bounds of the schema's own (`minimum`, `maximum`, `multipleOf`)
always hold. Arguments of required tool calls have no blanks, and short numbers.
"""

ENDPOINTS: tuple[tuple[str, type[BaseModel], Mapping[str, tuple[object, ...]]], ...] = (
    ("/v1/completions", CompletionRequest, COMPLETION_FIELDS),
    ("/v1/chat/completions", ChatRequest, CHAT_FIELDS),
    ("/v1/responses", ResponseRequest, RESPONSE_FIELDS),
    ("/v1/conversations", ConversationRequest, {}),
    ("/v1/conversations/{conversation_id}", ConversationUpdate, {}),
    ("/v1/conversations/{conversation_id}/items", ItemsRequest, {}),
    ("/v1/embeddings", EmbeddingRequest, EMBEDDING_FIELDS),
    ("/v1/score", ScoreRequest, SCORE_FIELDS),
    ("/v1/rerank", RerankRequest, RERANK_FIELDS),
    ("/v1/batches", BatchRequest, BATCH_FIELDS),
    ("/v1/messages", MessagesRequest, MESSAGES_FIELDS),
    ("/v1/messages/count_tokens", CountRequest, MESSAGES_FIELDS),
    ("/tokenize", TokenizeRequest, {}),
    ("/detokenize", DetokenizeRequest, {}),
)

_KEPT = (ResponseRequest, ConversationRequest, ConversationUpdate, BatchRequest)
"""Bodies of which only `KEPT_FIELDS` are kept."""
_OPENAI_HINTS = ("prompt_cache_retention", "safety_identifier")


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for path, schema, refused in ENDPOINTS:
        parts.append(
            f"## POST {path}\n\n| field | | |\n| --- | --- | --- |\n" + "\n".join(_rows(schema, refused)) + "\n"
        )
    return "\n".join(parts)


def _rows(schema: type[BaseModel], refused: Mapping[str, tuple[object, ...]]) -> Iterator[str]:
    document = schema.model_json_schema()
    required = set(document.get("required", ()))
    known: dict[str, Any] = document["properties"]
    hints = _OPENAI_HINTS if schema in (ChatRequest, ResponseRequest) else ()
    for name in sorted({*known, *refused, *hints}):
        if name in HINTS and not (schema in _KEPT and name in KEPT_FIELDS):
            yield f"| `{name}` | no effect | {HINTS[name]} |"
        elif name in known:
            words = type_in_words(known[name]).replace("|", "\\|")
            yield f"| `{name}` | works | {words}{', required' if name in required else ''} |"
        else:
            harmless = ", ".join(f"`{json.dumps(value)}`" for value in refused[name])
            yield f"| `{name}` | refused | {f'but for {harmless}' if harmless else ''} |"


def main() -> None:
    """See the module."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text() != text:
            sys.exit(f"{PAGE.relative_to(ROOT)} is stale: run python .ci/api_reference.py")
        return
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
