"""A core that plays back what a test wrote down, and a byte-level tokenizer in which every byte is a token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from services.router.dispatch.record import RequestEvent, RequestRecord, RequestState
from services.router.dispatch.request import FinishReason, Pooled, PoolRequest, Request, TokenDelta, TokenLogprobs
from services.router.edge.input_processor import InputProcessor
from services.router.edge.settings import EdgeSettings
from services.router.edge.text.pooling import PoolingConfig
from services.router.placement.decision import Choice
from shared.model.text.chat_template import ChatTemplate
from shared.model.text.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler

MODEL = "acme/tiny"
BOS, EOS = "<|bos|>", "<|eos|>"
TEMPLATE = (
    "{{ bos_token }}{% for d in documents or [] %}<document>{{ d.text }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Step = TokenDelta | Exception | asyncio.Event
"""What a running request does next: give a delta, fail, or wait for the test."""


def byte_tokenizer(folder: Path) -> Tokenizer:
    """258 tokens: every byte, a begin and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"bos_token": "{BOS}", "eos_token": "{EOS}"}}')
    return Tokenizer.load(folder)


class ScriptedRequest:
    """Plays its steps; `closed` is set by `aclose`."""

    def __init__(self, request: Request, steps: Iterable[Step], record: RequestRecord | None = None) -> None:
        self.request = request
        self.record = record or request.new_record()
        self.closed = asyncio.Event()
        self.num_read = 0
        self._steps = deque(steps)
        self._waits: set[asyncio.Task[None]] = set()

    @property
    def ended(self) -> bool:
        return not self._steps

    def take(self) -> TokenDelta | None:
        while self._steps and isinstance(step := self._steps[0], asyncio.Event) and step.is_set():
            self._steps.popleft()
        if not self._steps or isinstance(self._steps[0], asyncio.Event):
            return None
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        self.num_read += 1
        if step.finish_reason is not None:
            write_down(self.record)
        return step

    def notify(self, reader: asyncio.Future[None]) -> None:
        async def wait(step: asyncio.Event) -> None:
            await step.wait()
            if not reader.done():
                reader.set_result(None)

        if self._steps and isinstance(step := self._steps[0], asyncio.Event):
            task = asyncio.ensure_future(wait(step))
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)
        elif not reader.done():
            reader.set_result(None)

    async def aclose(self) -> None:
        for task in self._waits:
            task.cancel()
        self.closed.set()


def write_down(record: RequestRecord) -> None:
    """A hand-off from p0 to d0: 1.5 ms in the queue, the first token after 12.25 ms."""
    record.num_cached_tokens = 1
    record.choices.append(Choice("d0", "p0"))
    for after_ms, event, state in (
        (0.0, RequestEvent.MATCHED, RequestState.QUEUED),
        (1.5, RequestEvent.PLACED, RequestState.RESERVED),
        (1.5, RequestEvent.SUBMITTED, RequestState.PREFILLING),
        (12.25, RequestEvent.FIRST_TOKEN, RequestState.SHIPPING),
        (12.25, RequestEvent.FINISH, RequestState.FINISHED),
    ):
        record.add(event, state, at=record.ask.arrived_at + after_ms / 1e3)


class ScriptedCore:
    """Answers every request by `script(request)`; an exception from it is what `submit` raises."""

    def __init__(self, script: Callable[[Request], Iterable[Step]]) -> None:
        self.script = script
        self.limit = 100
        self.reason = ""
        self.room = 8
        self.num_looks = 0
        """Calls of `idle_room` so far."""
        self.pooled: list[PoolRequest] = []
        self.running: list[ScriptedRequest] = []
        self.submitted = asyncio.Event()

    def submit(self, request: Request, record: RequestRecord) -> ScriptedRequest:
        running = ScriptedRequest(request, self.script(request), record)
        self.running.append(running)
        self.submitted.set()
        return running

    def max_prompt_tokens(self) -> int:
        return self.limit

    def check_room(self, tenant: str, priority: int, ttft_timeout_s: float) -> None:
        return

    async def pool(self, request: PoolRequest) -> Pooled:
        self.pooled.append(request)
        vector = np.zeros(256, dtype="<f4")
        for token_id in request.token_ids:
            vector[token_id % 256] += 1  # alike texts have alike vectors
        return Pooled(vector.tobytes(), 0)

    def idle_room(self) -> int:
        self.num_looks += 1
        return self.room

    def not_ready_reason(self) -> str:
        return self.reason

    @property
    def requests(self) -> list[Request]:
        """What was submitted, in order."""
        return [running.request for running in self.running]


def make_input_processor(
    core: ScriptedCore, tokenizer: Tokenizer, settings: EdgeSettings | None = None, folder: Path = Path()
) -> InputProcessor:
    """An input processor over the scripted core."""
    template = ChatTemplate({"default": TEMPLATE}, tokenizer.special_tokens)
    assert tokenizer.eos_token_id is not None
    structures = StructureCompiler(lambda: tokenizer, (tokenizer.eos_token_id,))
    settings = settings or EdgeSettings()
    pooling = PoolingConfig.load(folder, settings.pooling)
    return InputProcessor(core, tokenizer, template, MODEL, settings, structures, pooling=pooling)


def text_steps(
    tokenizer: Tokenizer, text: str, finish: FinishReason = FinishReason.LENGTH, logprobs: int | None = None
) -> list[Step]:
    """`text` as one delta a token; ending by STOP appends the end token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if finish is FinishReason.STOP:
        assert tokenizer.eos_token_id is not None
        ids.append(tokenizer.eos_token_id)
    deltas: list[Step] = []
    for i, token_id in enumerate(ids):
        top = tuple(((token_id + k) % 256, -0.5 - k) for k in range(logprobs or 0))
        entries = () if logprobs is None else (TokenLogprobs(-0.5, top),)
        deltas.append(TokenDelta((token_id,), entries, finish if i == len(ids) - 1 else None))
    return deltas
