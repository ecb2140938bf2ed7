"""`tandem up`: a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.answer import Answer, stream_answer
from services.cli.client import InferenceClient
from services.cli.failures import EXIT_INTERRUPTED, report
from services.cli.generate import write_text
from services.cli.progress_view import ProgressView
from services.cli.split_view import print_summary
from services.local.cluster import LocalCluster
from services.local.spec import DEFAULT_GRPC, DEFAULT_HTTP, ClusterSpec, Dtype, Mode
from shared.errors import TandemError, WorkerLost
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

EXAMPLE_PROMPT = "In the beginning"
EXAMPLE_TOKENS = 48


def up(
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")] = Path("models/demo"),
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 1 by default, none in collocated mode.")] = None,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    mode: Annotated[Mode, typer.Option(help="collocated: the decode workers prefill too.")] = "disaggregated",
    dtype: Annotated[Dtype, typer.Option(help="Of weights, computation and KV.")] = "auto",
    http: Annotated[str, typer.Option(help="host:port of the OpenAI API.")] = DEFAULT_HTTP,
    grpc: Annotated[str, typer.Option(help="host:port of the gRPC API.")] = DEFAULT_GRPC,
    served_model_name: Annotated[str, typer.Option(help="Empty = the folder's name.")] = "",
    num_kv_blocks: Annotated[int, typer.Option(help="Blocks of each worker's KV pool; 0 = by memory.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, tokens; 0 = the model's.")] = 0,
    example: Annotated[bool, typer.Option(help="Stream one example answer at the start.")] = True,
) -> None:
    """Start a cluster on this machine: index, KV store, workers, router. Ctrl-C stops it."""
    if prefill is None:
        prefill = 0 if mode == "collocated" else 1
    spec = ClusterSpec(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        mode=mode,
        dtype=dtype,
        http=http,
        grpc=grpc,
        served_model_name=served_model_name,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
    )
    raise typer.Exit(asyncio.run(Foreground(spec, example).run()))


class Foreground:
    """A cluster that lives as long as this command. `run()` once."""

    def __init__(self, spec: ClusterSpec, example: bool) -> None:
        self._spec = spec
        self._example = example
        self._console = Console(highlight=False)
        self._view = ProgressView(self._console)
        self._cluster = LocalCluster(spec, on_progress=self._view.update)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """The command's exit status: 0 after a stop that was asked for, 130 where it came before the start ended.

        Raises the TandemError that kept the cluster from starting, or ended it.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _run(self) -> int:
        started_at = time.perf_counter()
        try:
            with self._view:
                if not await self._until_stop(self._cluster.start()):
                    return EXIT_INTERRUPTED
            self._announce(time.perf_counter() - started_at)
            if not self._example or await self._until_stop(self._stream_example()):
                self._print("Ctrl-C stops the cluster.")
                await self._until_stop(self._watch())
            return 0
        finally:
            await self._cluster.stop()
            self._print("stopped")

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._cluster.kill()
            return
        self._stop.set()
        self._print("\nstopping; once more kills")

    async def _until_stop(self, work: Coroutine[None, None, None]) -> bool:
        """Runs `work`; False where a signal came first and it was cancelled."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _announce(self, took_s: float) -> None:
        spec, cluster = self._spec, self._cluster
        pools = f"{spec.num_prefill} prefill + {spec.num_decode} decode"
        workers = pools if spec.mode == "disaggregated" else f"{spec.num_decode} decode, collocated"
        self._print(f"Tandem serves {spec.model_name} with {workers} after {took_s:.1f} s")
        self._print(f"  OpenAI API  http://{cluster.http}/v1")
        self._print(f"  gRPC        {cluster.grpc}  (tandem.v1.InferenceService)")
        self._print(f"  logs        {spec.log_dir}")

    async def _stream_example(self) -> None:
        """One greedy answer, streamed the way a client sees it; a failure is shown and the cluster goes on."""
        self._print(f"\nan example, continuing “{EXAMPLE_PROMPT}”:")
        request = inference_pb2.GenerateRequest(
            text=EXAMPLE_PROMPT,
            sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=EXAMPLE_TOKENS),
        )
        answer = Answer()
        try:
            write_text(EXAMPLE_PROMPT)
            async with InferenceClient(self._cluster.grpc) as client:
                await stream_answer(client, request, answer, write_text)
        except TandemError as error:
            self._print("")
            report(error)
            return
        self._print("\n")
        print_summary(self._console, answer)
        self._print("")

    async def _watch(self) -> None:
        """Tells of each process that ends by itself; returns never. Raises WorkerLost where it is the router."""
        while True:
            child = await self._cluster.next_exit()
            error = WorkerLost(
                f"{child.name} ended ({child.end_in_words()})",
                process=child.name,
                log=str(child.log_path),
                log_tail=child.log_tail(),
            )
            if child.name == "router":
                raise error
            report(error)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
