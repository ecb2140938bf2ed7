"""An answer as its reader found it: text, reasoning and calls; and the server-sent events that carry it."""

from __future__ import annotations

import json
import secrets
import string
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.router.dispatch.request import Request
from services.router.edge.answer.events import CallArguments, CallBegun, Content, Event, Reasoning
from services.router.edge.answer.families import AnswerFormats
from services.router.edge.answer.reader import AnswerReader
from services.router.edge.answer.reasoning import Thinking
from services.router.edge.answer.tool_use import ToolUse
from services.router.edge.input_processor import prompt_end
from services.router.edge.output_stream import OutputDelta, OutputFinish, resumed_finish
from services.router.edge.text.stop_strings import StopStrings
from services.router.views.timings import system_fingerprint_of, tandem_member
from shared.errors import InvalidRequest
from shared.model.text.tokenizer import Tokenizer
from shared.seeds import SAMPLER_VERSION

DONE = b"data: [DONE]\n\n"


def named_event(name: str, data: Mapping[str, object]) -> bytes:
    """A server-sent event with its name and JSON."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class Envelope:
    """Builds the server-sent events of one streamed response."""

    def __init__(self, response_id: str, kind: str, model: str) -> None:
        """`kind` is OpenAI's `object`."""
        fields = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}
        self._fields = "data: " + json.dumps(fields)[:-1]
        self.head = self._fields + ', "choices": ['

    def chunk(self, choice: Mapping[str, object], suffix: str, extra: Mapping[str, object] | None = None) -> bytes:
        """An event with one choice; `extra` goes to the top level, `suffix` is `ChunkSuffix.next`'s."""
        more = "" if not extra else ", " + json.dumps(extra)[1:-1]
        return f"{self.head}{json.dumps(choice)}]{more}{suffix}".encode()

    def usage_chunk(self, usage: Mapping[str, object], extra: Mapping[str, object]) -> bytes:
        """The event behind the last choice's: no choices, the counts."""
        more = json.dumps({"usage": usage, **extra})[1:]
        return f"{self.head}], {more}\n\n".encode()


class ChunkSuffix:
    """How the chunks of one response end: their usage member, and the brace that closes them."""

    def __init__(self, plan: Sequence[Request], *, include_usage: bool, continuous: bool) -> None:
        """With `include_usage` chunks carry `"usage": null`, since one with the counts follows; with `continuous` the
        counts of their own choice so far, as vLLM's do."""
        self._plan = plan
        self._num_output_tokens = [len(request.resumed_token_ids) for request in plan]
        self._continuous = include_usage and continuous
        self._plain = ', "usage": null}\n\n' if include_usage else "}\n\n"

    def next(self, index: int, num_tokens: int = 0) -> str:
        """The end of a chunk that has `num_tokens` more tokens of choice `index`."""
        if not self._continuous:
            return self._plain
        num_output = self._num_output_tokens[index] = self._num_output_tokens[index] + num_tokens
        num_prompt = self._plan[index].num_prompt_tokens
        return (
            f', "usage": {{"prompt_tokens": {num_prompt}, "completion_tokens": {num_output}, '
            f'"total_tokens": {num_prompt + num_output}}}}}\n\n'
        )


class Totals:
    """Sums the usage of a response's choices and keeps how each ended."""

    def __init__(self, plan: Sequence[Request], n: int) -> None:
        """`n` choices a prompt: a prompt's tokens count once, however many answers it gets."""
        self._n = n
        self._finishes = [resumed_finish(request) if request.is_complete else None for request in plan]

    def add(self, index: int, finish: OutputFinish) -> None:
        """Notes how choice `index` ended."""
        self._finishes[index] = finish

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`; call it when every choice has ended."""
        ends = self._ends()
        num_prompt = sum(end.usage.num_prompt_tokens for end in ends[:: self._n])
        num_output = sum(end.usage.num_output_tokens for end in ends)
        usage: dict[str, object] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(end.usage.num_cached_tokens for end in ends[:: self._n])},
        }
        num_guessed = sum(end.usage.num_guessed_tokens for end in ends)
        if num_guessed:
            num_accepted = sum(end.usage.num_accepted_tokens for end in ends)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_guessed - num_accepted,
            }
        return usage

    def extension(self) -> dict[str, object]:
        """OpenAI's `system_fingerprint`, and our `tandem` member of a response with one choice: each of several has its
        own."""
        ends = self._ends()
        if len(ends) == 1:
            return tandem_member(ends[0].record)
        names = dict.fromkeys(filter(None, (system_fingerprint_of(end.record) for end in ends)))
        return {"system_fingerprint": "+".join(names)} if names else {}

    def choice_extension(self, index: int) -> dict[str, object]:
        """Our `tandem` member of one of several choices; {} where the response has it."""
        ends = self._ends()
        return tandem_member(ends[index].record) if len(ends) > 1 else {}

    def _ends(self) -> Sequence[OutputFinish]:
        ends = [finish for finish in self._finishes if finish is not None]
        assert len(ends) == len(self._finishes), "a choice has not ended"
        return ends


def start_member(request: Request) -> dict[str, object]:
    """`{"tandem": {"start": …}}` of a choice's first chunk: what it takes to have the rest of it from another call. The
    deadline in seconds, 0 = none."""
    sampling = request.sampling
    return {
        "tandem": {
            "start": {
                "request_id": request.request_id,
                "seed": sampling.seed,
                "sampler_version": SAMPLER_VERSION,
                "max_tokens": sampling.max_tokens,
                "timeout_s": request.timeout_s,
            }
        }
    }


def choice_end(finish: OutputFinish | None) -> dict[str, object]:
    """How a choice ended, if it did; `stop_reason` is vLLM's: the stop string or stop token id."""
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason.value, "stop_reason": finish.stop_reason}


_SHORT_ID = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """One tool call."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text, as far as it is written."""
        return "".join(self.pieces)


@dataclass(slots=True)
class AnswerParts:
    """One choice's answer so far."""

    reader: AnswerReader | None  # None: all text is content
    short_ids: bool = False
    calls: list[Call] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content written until now."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The reasoning written until now."""
        return "".join(self._thoughts)

    @property
    def only_reasons(self) -> bool:
        """Whether it has reasoning until now, and nothing else."""
        return bool(self._thoughts) and not self._texts and not self.calls

    def add(self, delta: OutputDelta) -> list[Event]:
        """Takes a delta; returns what it brought. The last one brings what was held back."""
        if self.reader is None:
            found: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            found = self.reader.push(delta.text)
            if delta.finish is not None:
                found += self.reader.flush()
        self._keep(found)
        return found

    def skip(self, text: str) -> None:
        """What the client has of the answer from an earlier call."""
        if self.reader is not None:
            self._keep(self.reader.push(text))

    def _keep(self, found: Iterable[Event]) -> None:
        for event in found:
            match event:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
                case CallBegun(_, name):
                    self.calls.append(Call(self._new_id(), name))
                case CallArguments(index, text):
                    self.calls[index].pieces.append(text)

    def _new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


def answer_parts(
    plan: Sequence[Request], tools: ToolUse | None, formats: AnswerFormats, tokenizer: Tokenizer
) -> list[AnswerParts]:
    """The parts of each choice, brought to where the client's text ends. Raises InvalidRequest (`resume`) where that
    is not known."""
    if tools is None and formats.reasoning is None:
        return [AnswerParts(None) for _ in plan]
    return [_parts(request, tools, formats, tokenizer) for request in plan]


def _parts(request: Request, tools: ToolUse | None, formats: AnswerFormats, tokenizer: Tokenizer) -> AnswerParts:
    is_open = False
    if formats.reasoning is not None:
        end = prompt_end(tokenizer, request.prompt_token_ids)
        is_open = formats.reasoning.behind(end) is Thinking.BEGUN
    parts = AnswerParts(AnswerReader(tools, formats.calls, formats.reasoning, is_open=is_open), formats.calls.short_ids)
    if request.resume is not None and request.resume.token_ids:
        if request.resume.num_chars is not None:
            raise InvalidRequest(
                "resume.num_chars: an answer with tools or reasoning continues behind token_ids alone",
                field="resume.num_chars",
            )
        options = request.text
        detokenizer = tokenizer.stream(options.skip_special_tokens, options.kept_special)
        had = detokenizer.push(request.resume.token_ids)
        certain, _ = StopStrings(request.sampling.stop).push(had, may_stop=False)  # what is held back comes again
        parts.skip(certain)
    return parts


def kept_special(tools: ToolUse | None, formats: AnswerFormats) -> frozenset[str]:
    """Special tokens that are marks of an answer: they must not be lost on the way to its text."""
    if formats.calls.channels is not None:
        return frozenset(formats.calls.special)
    marks = formats.reasoning
    kept = {marks.begin, marks.end} if marks is not None else set()
    if tools is not None and not tools.is_forced:
        kept |= set(formats.calls.special)
    return frozenset(kept)
