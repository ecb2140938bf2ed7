"""The bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from services.router.edge.http.bodies import STRICT, StringList, TokenIdList, TokenIdLists, parse_body
from services.router.edge.http.openai.unsupported import refuse_extra
from shared.errors import InvalidRequest

MAX_INPUTS = 2048
EMBEDDING_FIELDS: Mapping[str, tuple[object, ...]] = {
    "additional_data": (),
    "chat_template": (),
    "messages": (),
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
SCORE_FIELDS: Mapping[str, tuple[object, ...]] = {"activation": (), "instruction": (), "mm_processor_kwargs": ({},)}
RERANK_FIELDS: Mapping[str, tuple[object, ...]] = {
    **SCORE_FIELDS,
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "rank_fields": (),
}
"""Fields that are refused unless they ask for nothing."""


class EmbeddingRequest(BaseModel):
    """The body of `POST /v1/embeddings`."""

    model_config = STRICT

    model: str | None = None
    input: str | TokenIdList | StringList | TokenIdLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    user: str | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list, also where one is given alone."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[int(token_id) for token_id in given]]
        return given  # type: ignore[return-value]


class ScoreRequest(BaseModel):
    """The body of `POST /v1/score`: a text against each of several, or pair by pair."""

    model_config = STRICT

    model: str | None = None
    text_1: str | StringList
    text_2: str | StringList
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    user: str | None = None

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides; the first has one text, or as many as the second. Raises InvalidRequest (`text_1`)."""
        first, second = (_texts(text) for text in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 must be one text, or as many as text_2 has: {len(second)}, got {len(first)}",
                field="text_1",
                limit=len(second),
            )
        return first, second


class Document(BaseModel):
    """A document as an object."""

    model_config = STRICT

    text: str


class RerankRequest(BaseModel):
    """The body of `POST /v1/rerank`, as Jina's and Cohere's."""

    model_config = STRICT

    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(EmbeddingRequest, body)
    refuse_extra(request, EMBEDDING_FIELDS)
    return request


def parse_score(body: bytes) -> ScoreRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(ScoreRequest, body)
    refuse_extra(request, SCORE_FIELDS)
    return request


def parse_rerank(body: bytes) -> RerankRequest:
    """Raises InvalidRequest naming the field."""
    request = parse_body(RerankRequest, body)
    refuse_extra(request, RERANK_FIELDS)
    return request


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
