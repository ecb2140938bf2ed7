"""`POST /tokenize`, `/detokenize` and `GET /tokenizer_info` in vLLM's shapes, Anthropic's `/v1/messages/count_tokens`,
and OpenAI's `/v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.router.edge.http.anthropic.endpoint import Messages
from services.router.edge.http.bodies import STRICT, TokenIdList, check_json_size, parse_body, read_body
from services.router.edge.http.errors import ErrorShape, as_tandem_error, error_headers
from services.router.edge.http.listing import tenant_of
from services.router.edge.http.openai.chat_messages import Message, TemplateFields
from services.router.edge.http.openai.schemas import Tool
from services.router.edge.http.responses.dialect import Responses
from services.router.edge.http.responses.shelf import Shelf
from services.router.edge.input_processor import InputProcessor
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys, credentials
from services.router.edge.text.prompt_tokenizer import Prompt, TextPrompt
from shared.errors import InvalidRequest

T = TypeVar("T", bound=BaseModel)
Work = Callable[[bytes, str], Awaitable[Mapping[str, object]]]
"""(body, tenant) → what is answered."""


class TokenizeRequest(TemplateFields):
    """The body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    return_token_strs: bool | None = None

    def as_prompt(self) -> Prompt:
        """The prompt to tokenize; raises InvalidRequest unless either `prompt` or `messages` is given."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("either prompt or messages must be there", field="prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens is not False)
        for i, tool in enumerate(self.tools or ()):
            tool.checked(f"tools[{i}]")
        return self.chat_prompt(self.messages or (), [tool.for_template() for tool in self.tools or ()])


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = STRICT

    model: str | None = None
    tokens: TokenIdList


class Tokenization:
    """Handlers of the five. They ask for an API key as answers do; their bodies have the same bounds."""

    def __init__(
        self,
        input_processor: InputProcessor,
        keys: ApiKeys,
        settings: EdgeSettings,
        messages: Messages,
        responses: Responses,
        shelf: Shelf,
    ) -> None:
        """`shelf`: what responses refer to."""
        self._input_processor = input_processor
        self._keys = keys
        self._settings = settings
        self._messages = messages
        self._responses = responses
        self._shelf = shelf

    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.info),
        ]

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        return await self._answer(request, self._detokenize)

    async def info(self, request: Request) -> Response:
        """`GET /tokenizer_info`: tokenizer class, longest sequence, special tokens and chat template, for clients that
        tokenize by themselves."""
        self._keys.check(credentials(request.headers))
        processor = self._input_processor
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {role: processor.tokenizer.special_tokens.get(role) for role in roles}
        return JSONResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": processor.core.max_prompt_tokens(),
                **special,
                "chat_template": processor.chat_template.source,
            }
        )

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        return await self._answer_in(self._messages.errors, request, self._count)

    async def input_tokens(self, request: Request) -> Response:
        """`POST /v1/responses/input_tokens`."""
        return await self._answer_in(self._responses.errors, request, self._count_input)

    async def _answer_in(self, errors: ErrorShape, request: Request, work: Work) -> Response:
        """`_answer` of an API whose errors have names of their own."""
        try:
            return await self._answer(request, work)
        except Exception as error:
            known = as_tandem_error(error, request.url.path)
            headers = {name.decode(): value.decode() for name, value in error_headers(known)}
            return Response(errors.body(known), known.http_status, headers, "application/json")

    async def _answer(self, request: Request, work: Work) -> Response:
        return JSONResponse(await work(*await self._body(request)))

    async def _body(self, request: Request) -> tuple[bytes, str]:
        """The body, and the tenant that sent it."""
        tenant = tenant_of(request, self._keys)
        body = await read_body(request.receive, request.headers, self._settings.max_body_bytes)
        await check_json_size(body, self._settings.limits, self._input_processor.core.max_prompt_tokens())
        return body, tenant

    async def _tokenize(self, body: bytes, tenant: str) -> Mapping[str, object]:
        asked = parse_body(TokenizeRequest, body)
        self._input_processor.check_model(asked.model or "", tenant)
        token_ids = await self._input_processor.token_ids(asked.as_prompt())
        tokenizer = self._input_processor.tokenizer
        return {
            "count": len(token_ids),
            "max_model_len": self._input_processor.core.max_prompt_tokens(),
            "tokens": token_ids,
            "token_strs": [tokenizer.token_text(t) for t in token_ids] if asked.return_token_strs else None,
        }

    async def _detokenize(self, body: bytes, tenant: str) -> Mapping[str, object]:
        asked = parse_body(DetokenizeRequest, body)
        self._input_processor.check_model(asked.model or "", tenant)
        return {"prompt": self._input_processor.detokenize(asked.tokens, "tokens")}

    async def _count(self, body: bytes, tenant: str) -> Mapping[str, object]:
        call = self._messages.parse_count(body)
        self._input_processor.check_model(call.model, tenant)
        return {"input_tokens": len(await self._input_processor.token_ids(call.prompts[0]))}

    async def _count_input(self, body: bytes, tenant: str) -> Mapping[str, object]:
        """What a response of this body would compute as its prompt, what it refers to included."""
        call = await self._responses.continued(body, self._shelf, tenant, self._input_processor.check_model)
        self._input_processor.check_model(call.model, tenant)
        count = len(await self._input_processor.token_ids(call.prompts[0]))
        return {"object": "response.input_tokens", "input_tokens": count}
