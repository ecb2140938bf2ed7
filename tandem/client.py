"""The synchronous client."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from shared.errors import TandemError
from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tandem.answer import Answer, Delta
from tandem.caller import Answers, Caller
from tandem.connection import ChannelOptions
from tandem.conversation import Conversation
from tandem.failures import RouterLost, no_router, typed
from tandem.options import Options, Prompt, deadline_of, warm_request

R = TypeVar("R")


class TandemClient(Caller[grpc.Channel]):
    """Asks one of several routers, and another one where that is lost: an answer continues at its next token.

    May be used from several threads. `close()` it, or use it in `with`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections: what still streams, and every later call, raises Cancelled. Twice is fine."""
        for opened in self._leave():
            opened.close()

    def stream(
        self, prompt: Prompt, *, n: int = 1, resume: Answer | None = None, **options: Unpack[Options]
    ) -> AnswerStream:
        """Streams `n` answers to a text, token ids or chat messages. Raises InvalidRequest for what cannot be sent;
        everything else is raised by the iteration: a TandemError, behind what came before.

        `resume`: an answer that another client left unfinished, perhaps in a process that is gone: everything else is
        to be as it was then, and the rest of it streams. A call of its request_id that is still there ends with
        TakenOver.
        """
        conversations = self._conversations(prompt, n, options, resume)
        return AnswerStream(self, conversations, self._metadata(options))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The whole answer; raises like the iteration of `stream`."""
        return self.generate_n(prompt, 1, **options)[0]

    def generate_n(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> list[Answer]:
        """`n` whole answers to one prompt; raises like the iteration of `stream`."""
        with self.stream(prompt, n=n, **options) as stream:
            for _ in stream:
                pass
            return stream.answers

    def warm(self, prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.Warmed:
        """Computes a prompt ahead of the requests that begin with it, and answers nothing: name the session and the
        retention that these have. Options of sampling do not count. Raises what the cluster reports, RouterLost where
        no router answers."""
        request, metadata = warm_request(prompt, options), self._metadata(options)
        timeout_s = options.get("timeout_s")
        return self._ask(lambda stub: stub.Warm(request, metadata=metadata, timeout=deadline_of(timeout_s)))

    def close_session(self, session: str, *, tenant: str = "", model: str = "", timeout_s: float = 30.0) -> int:
        """Retains nothing for a session any more; returns the number of blocks that this frees. Raises like `warm`."""
        request = inference_pb2.CloseSessionRequest(session=session, model=model)
        metadata = self._metadata({"tenant": tenant} if tenant else {})
        closed = self._ask(lambda stub: stub.CloseSession(request, metadata=metadata, timeout=deadline_of(timeout_s)))
        return closed.num_blocks

    def expect_session(
        self, session: str, next_turn_s: float, *, tenant: str = "", model: str = "", timeout_s: float = 30.0
    ) -> None:
        """A session comes back that many seconds from now, such as when a tool takes so long: of what is retained, that
        of sessions that come back later is evicted first. Raises like `warm`."""
        request = inference_pb2.ExpectSessionRequest(session=session, model=model, next_turn_s=next_turn_s)
        metadata = self._metadata({"tenant": tenant} if tenant else {})
        self._ask(lambda stub: stub.ExpectSession(request, metadata=metadata, timeout=deadline_of(timeout_s)))

    def status(self, timeout_s: float = 10.0, window_s: float = 0.0) -> inference_pb2.ClusterStatus:
        """The cluster as a router sees it; raises what the cluster reports, RouterLost where no router answers.

        `window_s`: of the reply's `window`, 1 to 3600; 0 = 60.
        """
        request = inference_pb2.GetStatusRequest(window_s=window_s)
        return self._ask(lambda stub: stub.GetStatus(request, metadata=self.key, timeout=deadline_of(timeout_s)))

    def explain(self, request_id: str, timeout_s: float = 10.0) -> inference_pb2.Explanation:
        """Why a request was placed as it was; raises like `status`, NotFound where the router does not know it."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        return self._ask(lambda stub: stub.Explain(request, metadata=self.key, timeout=deadline_of(timeout_s)))

    def stub(self, target: str) -> inference_pb2_grpc.InferenceServiceStub:
        """A stub on the connection to a target."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel(target))

    @staticmethod
    def _opened(target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    def _ask(self, call: Callable[[inference_pb2_grpc.InferenceServiceStub], R]) -> R:
        """One unary call that may be made twice, at each target until one answers."""
        with self.while_open():
            for _ in self._targets.all:
                target = self._targets.choose()
                try:
                    answer = call(self.stub(target))
                except grpc.RpcError as error:
                    lost = self._lost(error, target)
                else:
                    self._targets.answered()
                    return answer
            raise no_router(self._targets.all, lost)


class AnswerStream(Answers):
    """Iterates the deltas of one or more answers, each in its own order. Closing it early, by `close` or at the end of
    a `with` block, cancels what still runs in the whole cluster. For one thread, but `close` from any."""

    def __init__(
        self, client: TandemClient, conversations: Sequence[Conversation], metadata: tuple[tuple[str, str], ...]
    ) -> None:
        super().__init__(conversations)
        self._calls = _Calls(client, metadata)
        # Nothing that runs refers to the stream: one that is dropped ends its calls.
        self._deltas = (
            self._calls.run(0, conversations[0]) if len(conversations) == 1 else _merged(self._calls, conversations)
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """Raises the TandemError that ended an answer; the others are cancelled then."""
        try:
            return next(self._deltas)
        except TandemError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what still runs. Twice is fine."""
        self._calls.close()


class _Calls:
    """The calls of one stream that run now."""

    def __init__(self, client: TandemClient, metadata: tuple[tuple[str, str], ...]) -> None:
        self._client = client
        self._metadata = metadata
        self._closed = threading.Event()
        self._calls: dict[int, grpc.Call] = {}

    def close(self) -> None:
        """Cancels them, and begins no more."""
        self._closed.set()
        for call in list(self._calls.values()):
            call.cancel()

    def run(self, index: int, conversation: Conversation) -> Iterator[Delta]:
        """One answer, over as many calls as it takes."""
        with self._client.while_open():
            while not conversation.done and not self._closed.is_set():
                call = conversation.call(time.monotonic())
                responses = self._client.stub(call.target).Generate(
                    call.request, metadata=self._metadata, timeout=call.timeout_s
                )
                self._calls[index] = responses
                if self._closed.is_set():
                    responses.cancel()
                lost: TandemError = RouterLost(f"{call.target} ended the stream in the middle of the answer")
                try:
                    for response in responses:
                        yield conversation.take(response, time.monotonic())
                except grpc.RpcError as error:
                    lost = typed(error, call.target, answered=conversation.answered)
                finally:
                    responses.cancel()
                if not conversation.done and not self._closed.is_set():
                    self._closed.wait(conversation.failed(lost, time.monotonic()))


def _merged(calls: _Calls, conversations: Sequence[Conversation]) -> Iterator[Delta]:
    """Several answers, a thread each."""
    arrived: queue.SimpleQueue[Delta | Exception | None] = queue.SimpleQueue()

    def pump(index: int, conversation: Conversation) -> None:
        try:
            for delta in calls.run(index, conversation):
                arrived.put(delta)
            arrived.put(None)
        except Exception as error:  # passed on to the reader
            arrived.put(error)

    threads = [
        threading.Thread(target=pump, args=(index, conversation), name=f"answer-{index}", daemon=True)
        for index, conversation in enumerate(conversations)
    ]
    for thread in threads:
        thread.start()
    try:
        num_open = len(threads)
        while num_open:
            item = arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        calls.close()
        with suppress(RuntimeError):
            for thread in threads:
                thread.join()
