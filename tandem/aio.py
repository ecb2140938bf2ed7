"""The asynchronous client, for one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio

from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tandem.answer import Answer, Delta
from tandem.caller import Answers, Caller
from tandem.connection import ChannelOptions
from tandem.conversation import Conversation
from tandem.failures import RouterLost, no_router, typed
from tandem.options import Options, Prompt, deadline_of, warm_request

R = TypeVar("R")


class AsyncTandemClient(Caller[grpc.aio.Channel]):
    """As TandemClient, for asyncio. `await close()` it, or use it in `async with`; any number of calls at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all connections: what still streams, and every later call, raises Cancelled. Twice is fine."""
        for opened in self._leave():
            await opened.close()

    def stream(
        self, prompt: Prompt, *, n: int = 1, resume: Answer | None = None, **options: Unpack[Options]
    ) -> AsyncAnswerStream:
        """As TandemClient.stream, for `async for`."""
        conversations = self._conversations(prompt, n, options, resume)
        return AsyncAnswerStream(self, conversations, self._metadata(options))

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """As TandemClient.generate."""
        return (await self.generate_n(prompt, 1, **options))[0]

    async def generate_n(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> list[Answer]:
        """As TandemClient.generate_n."""
        async with self.stream(prompt, n=n, **options) as stream:
            async for _ in stream:
                pass
            return stream.answers

    async def warm(self, prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.Warmed:
        """As TandemClient.warm."""
        request, metadata = warm_request(prompt, options), self._metadata(options)
        timeout_s = options.get("timeout_s")
        return await self.ask(lambda to: _stub(to).Warm(request, metadata=metadata, timeout=deadline_of(timeout_s)))

    async def close_session(self, session: str, *, tenant: str = "", model: str = "", timeout_s: float = 30.0) -> int:
        """As TandemClient.close_session."""
        request = inference_pb2.CloseSessionRequest(session=session, model=model)
        metadata = self._metadata({"tenant": tenant} if tenant else {})
        closed = await self.ask(
            lambda to: _stub(to).CloseSession(request, metadata=metadata, timeout=deadline_of(timeout_s))
        )
        return closed.num_blocks

    async def expect_session(
        self, session: str, next_turn_s: float, *, tenant: str = "", model: str = "", timeout_s: float = 30.0
    ) -> None:
        """As TandemClient.expect_session."""
        request = inference_pb2.ExpectSessionRequest(session=session, model=model, next_turn_s=next_turn_s)
        metadata = self._metadata({"tenant": tenant} if tenant else {})
        await self.ask(lambda to: _stub(to).ExpectSession(request, metadata=metadata, timeout=deadline_of(timeout_s)))

    async def status(self, timeout_s: float = 10.0, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """As TandemClient.status."""
        request = inference_pb2.GetStatusRequest(window_s=window_s)
        return await self.ask(
            lambda to: _stub(to).GetStatus(request, metadata=self.key, timeout=deadline_of(timeout_s))
        )

    async def explain(self, request_id: str, timeout_s: float = 10.0) -> inference_pb2.Explanation:
        """As TandemClient.explain."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        return await self.ask(lambda to: _stub(to).Explain(request, metadata=self.key, timeout=deadline_of(timeout_s)))

    @staticmethod
    def _opened(target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    async def ask(self, call: Callable[[grpc.aio.Channel], Awaitable[R]]) -> R:
        """One unary call that may be made twice, at each target until one answers. Raises what the cluster reports,
        RouterLost where no router answers."""
        with self.while_open():
            for _ in self._targets.all:
                target = self._targets.choose()
                try:
                    answer = await call(self.channel(target))
                except grpc.aio.AioRpcError as error:
                    lost = self._lost(error, target)
                except asyncio.CancelledError:
                    if _task_ends():
                        raise
                    lost = RouterLost(f"{target} cancelled the call")
                    self._targets.failed(target)
                else:
                    self._targets.answered()
                    return answer
            raise no_router(self._targets.all, lost)


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceServiceAsyncStub:
    return inference_pb2_grpc.InferenceServiceStub(channel)


def _task_ends() -> bool:
    """A CancelledError is meant for this task. Else a call was cancelled: gRPC says that in this way, too."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class AsyncAnswerStream(Answers):
    """As AnswerStream, for `async for` and `async with`. For one task."""

    def __init__(
        self, client: AsyncTandemClient, conversations: Sequence[Conversation], metadata: tuple[tuple[str, str], ...]
    ) -> None:
        super().__init__(conversations)
        # Nothing that runs refers to the stream: one that is dropped ends its calls.
        runs = [_run(client, metadata, conversation) for conversation in conversations]
        self._deltas = runs[0] if len(runs) == 1 else _merged(runs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Raises the TandemError that ended an answer; the others are cancelled then."""
        return await anext(self._deltas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs, in the whole cluster. Twice is fine."""
        await self._deltas.aclose()


async def _run(
    client: AsyncTandemClient, metadata: tuple[tuple[str, str], ...], conversation: Conversation
) -> AsyncGenerator[Delta, None]:
    """One answer, over as many calls as it takes."""
    with client.while_open():
        while not conversation.done:
            call = conversation.call(time.monotonic())
            stub = _stub(client.channel(call.target))
            responses = stub.Generate(call.request, metadata=metadata, timeout=call.timeout_s)
            lost: TandemError = RouterLost(f"{call.target} ended the stream in the middle of the answer")
            try:
                async for response in responses:
                    yield conversation.take(response, time.monotonic())
            except grpc.aio.AioRpcError as error:
                lost = typed(error, call.target, answered=conversation.answered)
            except asyncio.CancelledError:
                if _task_ends():
                    raise
            finally:
                responses.cancel()
            if not conversation.done:
                await asyncio.sleep(conversation.failed(lost, time.monotonic()))


async def _merged(runs: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Several answers, a task each."""
    arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def pump(run: AsyncGenerator[Delta, None]) -> None:
        try:
            async for delta in run:
                arrived.put_nowait(delta)
            arrived.put_nowait(None)
        except Exception as error:  # passed on to the reader
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
