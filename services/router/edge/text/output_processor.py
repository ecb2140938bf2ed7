"""Tokens of one answer to text: detokenized, cut at a stop string, with its usage at the end. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import FinishReason, Request, Resume, TokenDelta, TokenLogprobs
from shared.errors import Cancelled, InvalidRequest
from shared.model.text.tokenizer import Detokenizer, Tokenizer


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each length 0..len(pattern): the longest proper prefix of that prefix which is also its suffix."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length]
        if pattern[i] == pattern[length]:
            length += 1
        table[i + 1] = length
    return tuple(table)


class StopStrings:
    """Passes text through until one of `stops` is complete in it; `push` costs O(characters · stops).

    The rule does not depend on how the text was cut into pieces: read one character at a time, the first stop string to
    be complete ends the text, and of several complete at the same character the longest. One Knuth-Morris-Pratt
    automaton a stop string gives that in one pass: its state is the length of the longest text suffix that begins the
    stop string, so the longest state of all is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tables = tuple(_failure_table(stop) for stop in stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece; returns (text that is certain by now, the stop string that ended it or None).

        With `may_stop` False a stop string that this piece completes is ordinary text. After a match the
        object is used up.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, None
        pending = self._held + text
        num_held = len(self._held)
        for i, character in enumerate(text):
            matched = self._advance(character)
            if matched is not None and may_stop:
                return pending[: num_held + i + 1 - len(matched)], matched
        num_certain = len(pending) - max(self._states)
        self._held = pending[num_certain:]
        return pending[:num_certain], None

    def flush(self) -> str:
        """The text held back, when the answer ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """One character through all automata; the longest stop string that it completes."""
        matched: str | None = None
        states = self._states
        for k, stop in enumerate(self._stops):
            table = self._tables[k]
            state = states[k]
            while state and stop[state] != character:
                state = table[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if matched is None or len(stop) > len(matched):
                    matched = stop
                state = table[state]
            states[k] = state
        return matched


INLINE_TOKENS = 256
"""As many are detokenized on the event loop, in a few milliseconds at most."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one finished request."""

    num_prompt_tokens: int
    num_output_tokens: int  # up to and including the token that ended the answer
    num_cached_tokens: int  # prompt tokens whose KV was not recomputed


@dataclass(frozen=True, slots=True)
class OutputFinish:
    """How an answer ended."""

    reason: FinishReason  # STOP or LENGTH
    stop_reason: str | int | None  # the stop string, or the client's stop token id, that ended it
    usage: Usage
    record: RequestRecord = field(compare=False)


def resumed_finish(request: Request) -> OutputFinish:
    """How an answer ended that the client has as a whole from an earlier call."""
    assert request.resume is not None
    assert request.resume.finish_reason is not None
    usage = Usage(request.num_prompt_tokens, len(request.resume.token_ids), num_cached_tokens=0)
    return OutputFinish(request.resume.finish_reason, None, usage, request.new_record())


class OutputDelta(NamedTuple):
    """New output; `text` is final and may be empty, `finish` is set on the last delta only.

    A tuple, since there is one for each token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # as many as token_ids where asked for
    finish: OutputFinish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # on the first delta where asked for: from the second token on


async def output_processor(request: Request, record: RequestRecord, tokenizer: Tokenizer) -> OutputProcessor:
    """One for the request, whose record is `record`; a long resumed answer is replayed beside the event loop, which
    serves others meanwhile. Raises like the class."""
    detokenizer = tokenizer.stream(request.text.skip_special_tokens, request.text.kept_special)
    if len(request.resumed_token_ids) <= INLINE_TOKENS:
        return OutputProcessor(request, record, detokenizer)
    return await asyncio.to_thread(OutputProcessor, request, record, detokenizer)


class OutputProcessor:
    """Converts one answer's token deltas, in order. After a delta with `finish` it is used up."""

    def __init__(self, request: Request, record: RequestRecord, detokenizer: Detokenizer) -> None:
        """Raises InvalidRequest (`resume.token_ids`) where the resumed tokens hold a whole stop string."""
        self._request = request
        self._record = record
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._includes_stop = request.text.include_stop
        self._num_output_tokens = 0
        self._owed, self._surplus = "", 0  # of the resumed text: what the client lacks, or has beyond it in characters
        if request.resume is not None:
            self._replay(request.resume)

    def _replay(self, resume: Resume) -> None:
        """Brings the text to where an earlier call left it: characters and stop strings may straddle the cut."""
        certain: list[str] = []
        for i, token_id in enumerate(resume.token_ids):
            self._num_output_tokens = i + 1
            piece, matched = self._detokenizer.push((token_id,)), None
            if self._stops is not None:
                piece, matched = self._stops.push(piece, self._may_stop())
            if matched is not None:
                raise InvalidRequest(
                    f"resume.token_ids: stop string {matched!r} is complete at token {i + 1}, the answer has ended",
                    field="resume.token_ids",
                    limit=i + 1,
                )
            certain.append(piece)
        text = "".join(certain)
        if resume.num_chars is not None:
            self._owed, self._surplus = text[resume.num_chars :], max(0, resume.num_chars - len(text))

    def process(self, delta: TokenDelta) -> OutputDelta:
        """The delta as text. `finish` without the delta's own finish reason means that a stop string ended the answer:
        the request still runs and must be ended. Raises Cancelled where the cluster cancelled the request."""
        output = self._process(delta)
        if delta.prompt_logprobs:
            output = output._replace(prompt_logprobs=delta.prompt_logprobs)
        if not self._owed and not self._surplus:
            return output
        text, self._owed = self._owed + output.text, ""
        kept = text[self._surplus :]
        self._surplus -= len(text) - len(kept)
        return output._replace(text=kept)

    def _process(self, delta: TokenDelta) -> OutputDelta:
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Cancelled(f"request {self._request.request_id} was cancelled in the cluster")
        # A worker's STOP comes with the end token that caused it: counted, but no text.
        num_visible = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)
        if self._includes_stop and num_visible < len(delta.token_ids):
            num_visible += delta.token_ids[-1] in self._request.sampling.stop_token_ids
        visible = delta.token_ids[: max(num_visible, 0)]
        if self._stops is not None:
            return self._process_with_stops(delta, visible, self._stops)
        text = self._detokenizer.push(visible)
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return OutputDelta(text, delta.token_ids, delta.logprobs)
        return self._finished(text + self._detokenizer.flush(), delta)

    def _process_with_stops(self, delta: TokenDelta, visible: tuple[int, ...], stops: StopStrings) -> OutputDelta:
        """Token by token, so that the count ends with the token that completed the stop string."""
        certain: list[str] = []
        before = self._num_output_tokens
        for i, token_id in enumerate(visible):
            self._num_output_tokens = before + i + 1
            piece, matched = stops.push(self._detokenizer.push((token_id,)), self._may_stop())
            certain.append(piece)
            if matched is not None:
                return self._stopped("".join(certain), delta, i + 1, matched)
        self._num_output_tokens = before + len(delta.token_ids)
        if delta.finish_reason is None:
            return OutputDelta("".join(certain), delta.token_ids, delta.logprobs)
        piece, matched = stops.push(self._detokenizer.flush(), self._may_stop())
        certain.append(piece)
        if matched is not None:
            return self._stopped("".join(certain), delta, len(delta.token_ids), matched)
        certain.append(stops.flush())
        return self._finished("".join(certain), delta)

    def _may_stop(self) -> bool:
        return self._num_output_tokens >= self._request.sampling.min_tokens

    def _stopped(self, text: str, delta: TokenDelta, num_tokens: int, stop: str) -> OutputDelta:
        """The last delta where a stop string ended the answer; later tokens of the delta are dropped."""
        return OutputDelta(
            text + stop if self._includes_stop else text,
            delta.token_ids[:num_tokens],
            delta.logprobs[:num_tokens],
            self._finish(FinishReason.STOP, stop),
        )

    def _finished(self, text: str, delta: TokenDelta) -> OutputDelta:
        """The last delta where the worker ended the answer."""
        assert delta.finish_reason is not None
        stop_reason = None
        if delta.finish_reason is FinishReason.STOP and delta.token_ids:
            last = delta.token_ids[-1]
            stop_reason = last if last in self._request.sampling.stop_token_ids else None
        return OutputDelta(text, delta.token_ids, delta.logprobs, self._finish(delta.finish_reason, stop_reason))

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> OutputFinish:
        usage = Usage(self._request.num_prompt_tokens, self._num_output_tokens, self._record.num_cached_tokens)
        return OutputFinish(reason, stop_reason, usage, self._record)
