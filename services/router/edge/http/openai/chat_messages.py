"""Messages of a chat, and what else of a request its model's chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from services.router.edge.http.bodies import STRICT
from services.router.edge.http.openai.unsupported import MESSAGE_FIELDS, refuse_unsupported
from services.router.edge.text.prompt_tokenizer import ChatPrompt
from shared.errors import InvalidRequest, brief
from shared.model.text.template_traits import JsonValue

_OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
    "document": "documents",
}


class ContentPart(BaseModel):
    """One part of a message's content. Text is served, and a refusal, which is text; images, audio, video and files
    are refused."""

    model_config = STRICT

    type: str
    text: str | None = None
    refusal: str | None = None

    def spoken(self, place: str) -> str:
        """Its text; raises InvalidRequest (`messages`) for a part that has none."""
        if self.type in ("text", "input_text", "output_text"):
            if self.text is None:
                raise InvalidRequest(f"{place}.text is missing", field="messages")
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        kind = _OTHER_PARTS.get(self.type)
        what = f"{kind} are" if kind and kind.endswith("s") else f"{kind} is" if kind else "such a part is"
        raise InvalidRequest(
            f"{place}.type {brief(self.type, 40)!r}: {what} not served here, text parts alone are", field="messages"
        )


class FunctionCall(BaseModel):
    """The name and arguments of a function that an assistant called."""

    model_config = STRICT

    name: str = Field(min_length=1)
    arguments: str = ""


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = STRICT

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, JsonValue]:
        """The form that chat templates read."""
        function: dict[str, JsonValue] = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(BaseModel):
    """One chat message."""

    model_config = STRICT

    role: str = Field(min_length=1)
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def for_template(self, place: str) -> dict[str, JsonValue]:
        """What the chat template sees; text parts stand on lines of their own. `place`: `messages[0]`. Raises
        InvalidRequest (`messages`)."""
        refuse_unsupported(self.model_extra, MESSAGE_FIELDS, f"{place}.")
        text: str | None
        if isinstance(self.content, list):
            text = "\n".join(part.spoken(f"{place}.content[{i}]") for i, part in enumerate(self.content))
        else:
            text = self.content
        if text is None and self.refusal is not None:
            text = self.refusal
        if text is None and self.role != "assistant":
            raise InvalidRequest(f"{place}.content is missing: only an assistant's may be null", field="messages")
        message: dict[str, JsonValue] = {"role": self.role, "content": text, "name": self.name}
        if self.tool_calls is not None:
            if self.role != "assistant":
                raise InvalidRequest(f"{place}.tool_calls: only an assistant's message has them", field="messages")
            message["tool_calls"] = [call.for_template() for call in self.tool_calls] or None
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest(f"{place}.tool_call_id is missing: it says which call was answered", field="messages")
        message["tool_call_id"] = self.tool_call_id
        message["reasoning_content"] = self.reasoning_content or self.reasoning
        return {name: value for name, value in message.items() if value is not None or name == "content"}


class TemplateFields(BaseModel):
    """How the chat template writes the messages, in vLLM's names."""

    model_config = STRICT

    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer is the rest of the last message, an assistant's."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer writes its own, besides those of the template."""

    def chat_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> ChatPrompt:
        """The prompt of these messages. Raises InvalidRequest naming the field."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt excludes continue_final_message: an answer is a message of its own, or the rest "
                "of the last one",
                field="add_generation_prompt",
            )
        return ChatPrompt(
            [message.for_template(f"messages[{i}]") for i, message in enumerate(messages)],
            tools=tools,
            variables=self.chat_template_kwargs or {},
            documents=self.documents or (),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
        )
