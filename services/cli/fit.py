"""`tandem fit`: how many GPUs a model needs for a load, before any of them is bought."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from services.cli.fit_view import WORKERS_OF_TODAY, as_dict, degrees_as_dict, degrees_table, memory_table, show
from services.cli.tables import console_of
from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import load_config
from shared.model.ranks.shard import MAX_DEGREE
from shared.sizing.degrees import degree_fits
from shared.sizing.devices import GPUS, device_name, gpu_of
from shared.sizing.fit import Fit
from shared.sizing.fit import fit as size_load
from shared.sizing.load import Hardware, Load, PoolFit
from shared.sizing.measured_steps import measured
from shared.sizing.shapes import (
    BYTES_PER_VALUE,
    KV_CODES,
    KV_DTYPES,
    NAMED_MODELS,
    SPARSE_MODELS,
    ExpertShape,
    LatentShape,
    ModelShape,
    decoder,
)
from shared.sizing.spread import MOST_RANKS

_PIPED_WIDTH = 120
_MAX_TOKENS = 10_000_000
_MAX_SEQUENCES = 1_000_000
_DEFAULT_OUTPUT = 500
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1 << 10, "mi": 1 << 20}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def fit(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Model folder, its config.json, or one of {', '.join(NAMED_MODELS)} (Llama 3.1), "
            f"{', '.join(SPARSE_MODELS)}."
        ),
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", help=f"GPU of both pools: {', '.join(GPUS)}, or in numbers, memory=24G,bandwidth=60G,flops=900G."
        ),
    ] = "H200",
    prefill_gpu: Annotated[str, typer.Option("--prefill-gpu", help="Another GPU for prefill workers.")] = "",
    decode_gpu: Annotated[str, typer.Option("--decode-gpu", help="Another GPU for decode workers.")] = "",
    context: Annotated[
        str, typer.Option("--context", help="Longest sequence, prompt and answer: memory is kept for it. 128k, 8192.")
    ] = "8k",
    concurrency: Annotated[str, typer.Option("--concurrency", help="Sequences at once.")] = "32",
    prompt: Annotated[str, typer.Option("--prompt", help="Mean prompt; default: an eighth of the context.")] = "",
    output: Annotated[
        str, typer.Option("--output", help=f"Mean answer; default: {_DEFAULT_OUTPUT}, at most half the context.")
    ] = "",
    ttft: Annotated[str, typer.Option("--ttft", help="Target for the time to the first token. 1s, 400ms.")] = "1s",
    tpot: Annotated[str, typer.Option("--tpot", help="Target for the time per further token.")] = "40ms",
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests/s; default: what keeps --concurrency busy if the targets are just met."),
    ] = None,
    weights: Annotated[str, typer.Option("--weights", help=f"Weights: {', '.join(BYTES_PER_VALUE)}.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help=f"KV: {', '.join(KV_DTYPES)}.")] = "bf16",
    max_tensor: Annotated[int, typer.Option("--max-tensor", help="Most GPUs that split a worker's layers.")] = 8,
    max_pipeline: Annotated[
        int, typer.Option("--max-pipeline", help="Most stages of a worker, each of that many GPUs.")
    ] = 1,
    node_gpus: Annotated[
        int, typer.Option("--node-gpus", help="GPUs of a machine; beyond, ranks reach each other over the network.")
    ] = 8,
    memory_share: Annotated[
        float, typer.Option("--memory-share", help="Share of a GPU's memory for weights and KV.")
    ] = 0.9,
    overlap: Annotated[
        float | None,
        typer.Option(
            "--overlap",
            help="Share, 0 to 1, of the shorter one of reading weights and products that costs a step no time; "
            "default: not known, both ends are tried.",
        ),
    ] = None,
    draft: Annotated[
        str, typer.Option("--draft", help="Draft model of workers that decode: a folder or a name, as MODEL.")
    ] = "",
    steps: Annotated[
        Path | None,
        typer.Option(
            "--steps", help="Step times measured on one GPU (loadtest.bench step-times --out FILE): for its workers."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="Price of a GPU and hour, for the cost.")] = None,
    prefill_price: Annotated[float | None, typer.Option("--prefill-price", help="Of a prefill GPU.")] = None,
    decode_price: Annotated[float | None, typer.Option("--decode-price", help="Of a decode GPU.")] = None,
    values: Annotated[Path | None, typer.Option("--values", help="Write values for the chart to this file.")] = None,
    uri: Annotated[str, typer.Option("--uri", help="model.uri in --values; default: the model's folder.")] = "",
    table: Annotated[
        bool, typer.Option("--table", help="GPUs by memory alone for all named models, with and without shared heads.")
    ] = False,
    degrees: Annotated[
        bool,
        typer.Option(
            "--degrees",
            help="What each number of ranks takes in place of the answer: memory of a rank, times, waiting.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say on how many GPUs a model serves a load within its targets, what that costs, and when one pool would do.

    Memory: weights plus the KV of --concurrency sequences of --context tokens. Time: a roofline over the GPU's compute
    and memory bandwidth, and the queue in front of the prefill pool. Exit status 2 and the reason where it cannot fit.
    """
    console = console_of(_PIPED_WIDTH)
    if table:
        memory = gpu_of(gpu, "gpu").memory_bytes
        _print_json(memory_table(memory).rows) if as_json else console.print(memory_table(memory).render())
        return
    if not model:
        raise ConfigError("name a model: a folder or one of " + ", ".join(NAMED_MODELS), field="model")
    shape = _shape(model)
    hardware = Hardware(
        prefill_gpu=gpu_of(prefill_gpu or gpu, "prefill-gpu" if prefill_gpu else "gpu"),
        decode_gpu=gpu_of(decode_gpu or gpu, "decode-gpu" if decode_gpu else "gpu"),
        prefill_name=device_name(prefill_gpu or gpu),
        decode_name=device_name(decode_gpu or gpu),
        weights=_one_of(weights, "weights", BYTES_PER_VALUE),
        kv_dtype=_kv_dtype(kv_dtype, shape),
        memory_share=_between(memory_share, "memory-share", 0.1, 1.0),
        max_tensor=int(_between(max_tensor, "max-tensor", 1, MOST_RANKS)),
        max_pipeline=int(_between(max_pipeline, "max-pipeline", 1, MOST_RANKS)),
        node_devices=int(_between(node_gpus, "node-gpus", 1, 1024)),
        overlap=None if overlap is None else _between(overlap, "overlap", 0.0, 1.0),
        measured=None if steps is None else measured(steps, "steps"),
        prefill_price=_price(prefill_price if prefill_price is not None else price, "prefill-price"),
        decode_price=_price(decode_price if decode_price is not None else price, "decode-price"),
        draft=_draft(draft, shape) if draft else None,
    )
    load = _load(context, concurrency, prompt, output, ttft, tpot, rate)
    if degrees:
        _show_degrees(console, shape, load, hardware, as_json=as_json)
        return
    found = size_load(shape, load, hardware)
    if values is not None:
        _write(values, values_yaml(found, uri or _uri(model)))
    if as_json:
        _print_json(as_dict(found, model))
    else:
        show(console, found, model)
        if values is not None:
            for line in not_yet(found):
                console.print(f"warning: {line}", markup=False)
            console.print(f"\nwrote {values}: helm install tandem helm/tandem --values {values}", markup=False)


def _show_degrees(console: Console, shape: ModelShape, load: Load, hardware: Hardware, *, as_json: bool) -> None:
    """Prints the degrees on the decode GPU, which is the prefill GPU's too unless another one is named."""
    fits = degree_fits(shape, load, hardware.decode_gpu, hardware)
    if as_json:
        _print_json(degrees_as_dict(fits))
        return
    console.print(degrees_table(fits, hardware.decode_name, load.prompt_len, load.context))
    console.print(f"\n{WORKERS_OF_TODAY}", markup=False)


def _load(context: str, concurrency: str, prompt: str, output: str, ttft: str, tpot: str, rate: float | None) -> Load:
    num_context = count_of(context, "context", _MAX_TOKENS, least=2)
    sequences = count_of(concurrency, "concurrency", _MAX_SEQUENCES)
    answer = count_of(output, "output", _MAX_TOKENS) if output else min(_DEFAULT_OUTPUT, num_context // 2)
    asked = count_of(prompt, "prompt", _MAX_TOKENS) if prompt else max(1, num_context // 8)
    ttft_s, tpot_s = seconds_of(ttft, "ttft", 3600.0), seconds_of(tpot, "tpot", 60.0)
    if rate is None:
        rate = Load.rate_of(sequences, answer, ttft_s, tpot_s)
    return Load(num_context, sequences, asked, answer, ttft_s, tpot_s, _between(rate, "rate", 1e-6, 10_000.0))


def _shape(model: str) -> ModelShape:
    """Raises ConfigError (`model`) for what is neither a name nor a folder, ModelLoadError for a bad config.json."""
    named = NAMED_MODELS | SPARSE_MODELS
    if model.lower() in named:
        return named[model.lower()]
    path = Path(model)
    if not path.exists():
        raise ConfigError(
            f"{model} is neither a model folder nor one of {', '.join(named)}", field="model", value=model
        )
    config = load_config(path.parent if path.is_file() else path)
    if config.delta is not None:
        raise ConfigError(
            f"{model} is of {config.architecture}, whose layers have states, which fit does not count",
            field="model",
            value=config.architecture,
        )
    return decoder(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        head_dim=config.head_dim,
        tied=config.tie_word_embeddings,
        experts=_experts(config),
        latent=_latent(config),
        windows=tuple(
            layer.window
            for layer in config.layers
            if layer.window is not None and layer.window < config.max_position_embeddings
        ),
    )


def _draft(draft: str, model: ModelShape) -> ModelShape:
    """As `_shape`. Raises ConfigError (`draft`) where the vocabularies differ."""
    try:
        found = _shape(draft)
    except ConfigError as error:
        raise ConfigError(f"--draft: {error.message}", field="draft", value=draft) from error
    own, wanted = (round(each.embedding_params / each.hidden) for each in (found, model))
    if own != wanted:
        raise ConfigError(
            f"--draft: {draft} has a vocabulary of {own} tokens, the model has {wanted}",
            field="draft",
            value=own,
            limit=wanted,
        )
    return found


def _experts(config: ModelConfig) -> ExpertShape | None:
    if config.moe is None:
        return None
    moe, routing = config.moe, config.moe.routing
    return ExpertShape(config.num_expert_layers, routing.num_experts, routing.top_k, moe.expert_size, moe.shared_size)


def _latent(config: ModelConfig) -> LatentShape | None:
    if config.latent is None:
        return None
    latent = config.latent
    return LatentShape(latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim, latent.q_rank or 0)


def _uri(model: str) -> str:
    """The folder as an absolute path; empty for a named shape, which has no weights."""
    if model.lower() in NAMED_MODELS | SPARSE_MODELS:
        return ""
    path = Path(model).resolve()
    return str(path.parent if path.is_file() else path)


def _one_of(name: str, option: str, known: Collection[str]) -> str:
    if name not in known:
        raise ConfigError(f"--{option}: {name!r} is not one of {', '.join(known)}", field=option, value=name)
    return name


def _kv_dtype(name: str, shape: ModelShape) -> str:
    return _one_of(name, "kv-dtype", KV_DTYPES if shape.latent is None else KV_DTYPES[: -len(KV_CODES)])


def _price(value: float | None, option: str) -> float | None:
    return None if value is None else _between(value, option, 0.0, 1e6)


def _between(value: float, option: str, least: float, most: float) -> float:
    if not least <= value <= most:  # also false for NaN
        raise ConfigError(
            f"--{option}: must be from {least:g} to {most:g}, got {value:g}",
            field=option,
            limit=most if value > most else least,
            value=value,
        )
    return value


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--values: cannot write {path}: {error.strerror}", field="values") from error


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=2))


def count_of(text: str, option: str, most: int, least: int = 1) -> int:
    """A whole number: `8000`, `128k` (128,000), `128Ki` (131,072). Raises ConfigError naming the option."""
    number, unit = _split(text, option, _COUNT_UNITS, "a whole number such as 8000, 128k (128,000) or 128Ki (131,072)")
    value = number * _COUNT_UNITS[unit]
    if value != int(value):
        raise ConfigError(f"--{option}: {text.strip()} is {value:g}, not a whole number", field=option, value=text)
    _check(value, text, option, least, most, "")
    return int(value)


def seconds_of(text: str, option: str, most: float) -> float:
    """A time above 0: `1s`, `40ms`, `2min`; without unit seconds. Raises ConfigError naming the option."""
    number, unit = _split(text, option, _TIME_UNITS, "a time such as 1s or 40ms")
    value = number * _TIME_UNITS[unit]
    _check(value, text, option, 1e-6, most, " s")
    return value


def _split(text: str, option: str, units: dict[str, int] | dict[str, float], expected: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"--{option}: expected {expected}, got {text!r}", field=option, value=text)
    return float(match[1]), match[2].lower()


def _check(value: float, text: str, option: str, least: float, most: float, unit: str) -> None:
    if not least <= value <= most or not math.isfinite(value):
        raise ConfigError(
            f"--{option}: must be from {least:.15g} to {most:.15g}{unit}, got {text.strip()}",
            field=option,
            limit=least if value < least else most,
            value=text,
        )


_QUANTIZED = ("fp8", "int8", "int4")
_GPU_RESOURCE = {"MI300X": "amd.com/gpu"}


def values_yaml(fit: Fit, uri: str) -> str:
    """One pool where collocated serves the load better, else two. `uri` may be empty: then it is for the reader."""
    pools = [fit.collocated] if fit.takes_one_pool and fit.collocated is not None else [fit.prefill, fit.decode]
    model: dict[str, object] = {"uri": uri} if uri else {}
    if uri.startswith(("hf://", "s3://")):  # what the Pods fetch needs room
        model["size"] = f"{math.ceil(1.2 * 2 * fit.model.num_params / (1 << 30))}Gi"
    content: dict[str, object] = {"model": model} if model else {}
    content["pools"] = [_pool(pool, fit) for pool in pools]
    head = ["# Written by `tandem fit`."]
    if not uri:
        head.append("# Set model.uri: hf://…, pvc://…, s3://… or /path.")
    head += [f"# {line}" for line in not_yet(fit)]
    return "\n".join(head) + "\n" + yaml.safe_dump(content, sort_keys=False)


def not_yet(fit: Fit) -> list[str]:
    """The parts of the fit that the chart refuses today, each with the option that avoids it."""
    pools = [fit.prefill, fit.decode]
    found = []
    if (most := max(pool.gpus_each for pool in pools)) > MAX_DEGREE:
        found.append(
            f"a worker has at most {MAX_DEGREE} processes, this has up to {most}; the chart takes what --max-tensor "
            f"{MAX_DEGREE} gives"
        )
    return found


def _pool(pool: PoolFit, fit: Fit) -> dict[str, object]:
    weights = fit.hardware.weights
    resource = _GPU_RESOURCE.get(pool.gpu, "nvidia.com/gpu")
    entry: dict[str, object] = {
        "name": pool.role,
        "role": pool.role,
        "replicas": pool.workers,
        "parallelism": {"tensor": pool.spread.tensor, "pipeline": pool.spread.pipeline, "expert": pool.spread.expert},
        "resources": {"limits": {resource: pool.gpus_each}},
        "dtype": "bf16" if weights in _QUANTIZED else weights,
    }
    if weights in _QUANTIZED:
        entry["quantization"] = weights
    kv_dtype = fit.hardware.kv_dtype
    if kv_dtype in KV_CODES or (kv_dtype, entry["dtype"]) == ("bf16", "fp32"):  # other pairs are served by no worker
        entry["kvDtype"] = kv_dtype
    return entry
