"""`tandem up`: a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.foreground import Foreground
from services.local.spec import DEFAULT_GRPC, DEFAULT_HTTP, DEMO_MODEL, ClusterSpec, Dtype, KVDtype, Mode, PrefixFetch
from shared.kv.encryption import Encryption
from shared.telemetry.logs import LogFormat


def up(
    model: Annotated[
        Path | None, typer.Option(help="Model folder in Hugging Face layout; the demo model by default.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 1 by default, none in collocated mode.")] = None,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    routers: Annotated[int, typer.Option(help="Routers, each further one on the next port of --http and --grpc.")] = 1,
    mode: Annotated[Mode, typer.Option(help="collocated: the decode workers prefill too.")] = "disaggregated",
    dtype: Annotated[Dtype, typer.Option(help="Of weights and computation.")] = "auto",
    kv_dtype: Annotated[KVDtype, typer.Option(help="Of the KV cache; auto = as the computation.")] = "auto",
    block_encryption: Annotated[
        Encryption, typer.Option(help="Of blocks between the processes, by a key that is drawn for the cluster.")
    ] = "none",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Answers are the same to the bit in every batch and after failures.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:0,1 to deal the workers to GPUs in turn.")] = "cpu",
    gpu_memory: Annotated[float, typer.Option(help="Share of each GPU's memory, for all workers on it.")] = 0.9,
    http: Annotated[str, typer.Option(help="host:port of the OpenAI API.")] = DEFAULT_HTTP,
    grpc: Annotated[str, typer.Option(help="host:port of the gRPC API.")] = DEFAULT_GRPC,
    served_model_name: Annotated[str, typer.Option(help="What clients call it; empty = the folder's name.")] = "",
    num_kv_blocks: Annotated[int, typer.Option(help="Blocks of each worker's KV pool; 0 = by memory.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, tokens; 0 = the model's.")] = 0,
    store_nodes: Annotated[int, typer.Option(help="Processes that keep blocks, each with what follows.")] = 1,
    store_host_bytes: Annotated[int, typer.Option(help="Host memory for blocks that leave the pools; 0 = none.")] = 0,
    store_disk_folder: Annotated[Path | None, typer.Option(help="Folder for such blocks; it outlives the run.")] = None,
    store_disk_bytes: Annotated[int, typer.Option(help="Most that it holds; 0 = none.")] = 0,
    prefix_fetch: Annotated[PrefixFetch, typer.Option(help="Known prefixes: fetched or computed.")] = "auto",
    log_format: Annotated[LogFormat, typer.Option(help="Of the logs in .tandem/logs: text or JSON lines.")] = "text",
    restart: Annotated[bool, typer.Option(help="Start a process that dies again.")] = True,
    example: Annotated[bool, typer.Option(help="Stream one example answer at the start.")] = True,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it."""
    if prefill is None:
        prefill = 0 if mode == "collocated" else 1
    spec = ClusterSpec(
        model=model if model is not None else DEMO_MODEL,
        num_prefill=prefill,
        num_decode=decode,
        num_routers=routers,
        mode=mode,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_encryption=block_encryption,
        deterministic=deterministic,
        device=device,
        gpu_memory=gpu_memory,
        http=http,
        grpc=grpc,
        served_model_name=served_model_name,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        store_nodes=store_nodes,
        store_host_bytes=store_host_bytes,
        store_disk_folder=store_disk_folder,
        store_disk_bytes=store_disk_bytes,
        prefix_fetch=prefix_fetch,
        log_format=log_format,
        restart=restart,
    )
    raise typer.Exit(asyncio.run(Foreground(spec, Console(highlight=False), example=example).run()))
