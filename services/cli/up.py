"""`tandem serve`, also known as `tandem up`: a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.foreground import Foreground
from services.local.cluster_file import OF_A_MODEL, ClusterFile
from services.local.hub import fetch, hub_model
from services.local.model_pools import Dtype, KVDtype, Mode, ModelPools
from services.local.spec import (
    DEFAULT_GRPC,
    DEFAULT_HTTP,
    DEMO_MODEL,
    STATE_DIR,
    ClusterSpec,
    PrefixFetch,
)
from shared.errors import ConfigError
from shared.kv.encryption_modes import Encryption
from shared.telemetry.logs import LogFormat


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The file's options become the command's defaults."""
    if path is not None:
        known = {str(parameter.name) for parameter in context.command.params} - {"config"}
        content = ClusterFile.read(path, known)
        context.default_map = {**(context.default_map or {}), **content.options}
        context.obj = content.models
    return path


def up(
    context: typer.Context,
    model_argument: Annotated[str, typer.Argument(metavar="[MODEL]", help="As --model.", show_default=False)] = "",
    config: Annotated[  # noqa: ARG001 - its callback reads it
        Path | None,
        typer.Option(
            help="YAML file with these options, and with `models` where there are several.",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder, or ORG/NAME[@REVISION] at the Hugging Face Hub; empty = the demo model.")
    ] = "",
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 1 by default, none in collocated mode.")] = None,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    routers: Annotated[int, typer.Option(help="Routers, each further one on the next port of --http and --grpc.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallelism: processes that split each layer of a worker.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of a worker: parts of its layers.")] = 1,
    prefill_tp: Annotated[int, typer.Option(help="--tp of the prefill workers; 0 = as --tp.")] = 0,
    decode_tp: Annotated[int, typer.Option(help="--tp of the decode workers; 0 = as --tp.")] = 0,
    ep: Annotated[int, typer.Option(help="Expert parallelism: sets of a worker's --tp with experts of their own.")] = 1,
    prefill_ep: Annotated[int, typer.Option(help="--ep of the prefill workers; 0 = as --ep.")] = 0,
    decode_ep: Annotated[int, typer.Option(help="--ep of the decode workers; 0 = as --ep.")] = 0,
    group_hosts: Annotated[
        int, typer.Option(help="Hosts of a worker's processes, tried out on this one: they share no memory, only TCP.")
    ] = 1,
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
    store_nodes: Annotated[
        int, typer.Option(help="Processes for each model that keep blocks, each with what follows.")
    ] = 1,
    store_host_bytes: Annotated[int, typer.Option(help="Host memory for blocks that leave the pools; 0 = none.")] = 0,
    store_disk_folder: Annotated[Path | None, typer.Option(help="Folder for such blocks; it outlives the run.")] = None,
    store_disk_bytes: Annotated[int, typer.Option(help="Most that it holds; 0 = none.")] = 0,
    prefix_fetch: Annotated[PrefixFetch, typer.Option(help="Known prefixes: fetched or computed.")] = "auto",
    log_format: Annotated[LogFormat, typer.Option(help="Of the logs in .tandem/logs: text or JSON lines.")] = "text",
    traces_endpoint: Annotated[
        str, typer.Option(help="OpenTelemetry collector for the requests' traces, such as http://127.0.0.1:4317.")
    ] = "",
    traces_sample: Annotated[
        float | None, typer.Option(help="Share of requests that are traced; all where --traces-endpoint is set.")
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Folder of the logs; a second cluster takes the folder 2 in it.")
    ] = STATE_DIR,
    restart: Annotated[bool, typer.Option(help="Start a process that dies again.")] = True,
    example: Annotated[bool, typer.Option(help="Stream one example answer at the start.")] = True,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it. `tandem up` is the same."""
    if model_argument and _is_given(context, "model"):
        raise ConfigError(f"the model is given twice: {model_argument!r} and --model {model!r}", field="model")
    model = model_argument or model
    if prefill is None:
        prefill = 0 if mode == "collocated" else 1
    models = [entry.pools(find_model, is_first=not number) for number, entry in enumerate(context.obj or ())]
    if models and model_argument:
        raise ConfigError("a model is given, and the file of --config names its models", field="model")
    if models and (given := [name for name in sorted(OF_A_MODEL) if _is_given(context, name)]):
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is for one model, and the file of --config names its models", field=given[0])
    folder, name = find_model(model) if not models else (models[0].model, "")
    spec = ClusterSpec(
        model=folder,
        num_prefill=prefill,
        num_decode=decode,
        num_routers=routers,
        tp=tp,
        pp=pp,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        ep=ep,
        prefill_ep=prefill_ep,
        decode_ep=decode_ep,
        group_hosts=group_hosts,
        mode=mode,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_encryption=block_encryption,
        deterministic=deterministic,
        device=device,
        gpu_memory=gpu_memory,
        http=http,
        grpc=grpc,
        served_model_name=served_model_name or name,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        store_nodes=store_nodes,
        store_host_bytes=store_host_bytes,
        store_disk_folder=store_disk_folder,
        store_disk_bytes=store_disk_bytes,
        prefix_fetch=prefix_fetch,
        log_format=log_format,
        traces_endpoint=traces_endpoint,
        traces_sample=traces_sample,
        state_dir=state_dir,
        restart=restart,
    )
    if models:
        spec = _with_models(spec, models)
    raise typer.Exit(asyncio.run(Foreground(spec, Console(highlight=False), example=example).run()))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_models(spec: ClusterSpec, models: Sequence[ModelPools]) -> ClusterSpec:
    """The first model is the spec's own."""
    first, *further = models
    return replace(
        spec,
        model=first.model,
        served_model_name=first.name,
        aliases=first.aliases,
        num_prefill=first.num_prefill,
        num_decode=first.num_decode,
        mode=first.mode,
        dtype=first.dtype,
        kv_dtype=first.kv_dtype,
        num_kv_blocks=first.num_kv_blocks,
        max_model_len=first.max_model_len,
        further=tuple(further),
    )


def find_model(model: str) -> tuple[Path, str]:
    """(folder, what clients call it: empty = the folder's name), fetched where it is at the Hub. Raises ModelLoadError,
    ConfigError."""
    if not model:
        return DEMO_MODEL, ""
    at_hub = hub_model(model)
    return (Path(model), "") if at_hub is None else (fetch(at_hub), at_hub.repo)
