"""Flags of `vllm serve` and of SGLang's server that `tandem serve` has under another name, elsewhere or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from shared.errors import ConfigError

_ALWAYS = "it is always on, leave it out"
_CHECKPOINT = "the checkpoint says it, leave it out"
_TEXT = "only text is served, leave it out"


def _set(name: str) -> str:
    return f"set {name}"


def _each(answer: str, *flags: str) -> Iterator[tuple[str, str]]:
    return ((flag, answer) for flag in flags)


OURS: Mapping[str, str] = dict(
    [
        *_each("--model", "--model-path"),
        *_each("--http host:port", "--host", "--port"),
        *_each("--kv-dtype", "--kv-cache-dtype"),
        *_each("--max-model-len", "--context-length"),
        *_each("--gpu-memory", "--gpu-memory-utilization", "--mem-fraction-static"),
        *_each("--num-kv-blocks, in blocks", "--num-gpu-blocks-override", "--max-total-tokens"),
        *_each("--tp", "--tensor-parallel-size", "-tp", "--tp-size"),
        *_each("--pp", "--pipeline-parallel-size", "-pp", "--pp-size"),
        *_each("--ep", "--enable-expert-parallel", "-ep", "--ep-size"),
        *_each("--decode N, for several workers", "--data-parallel-size", "-dp", "--dp-size"),
        *_each(_set("TANDEM_WORKER_BLOCK_SIZE"), "--block-size", "--page-size"),
        *_each(_set("TANDEM_WORKER_MAX_NUM_SEQS"), "--max-num-seqs", "--max-running-requests"),
        *_each(
            _set("TANDEM_WORKER_MAX_NUM_BATCHED_TOKENS"),
            *("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
        ),
        *_each(
            _ALWAYS,
            *("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice"),
            "--enable-prompt-tokens-details",
        ),
        *_each("prefixes are always kept, leave it out", "--no-enable-prefix-caching", "--disable-radix-cache"),
        *_each(
            _set("TANDEM_ROUTER_ADMISSION__ORDER"),
            *("--scheduling-policy", "--schedule-policy", "--enable-priority-scheduling"),
        ),
        *_each(_set("TANDEM_ROUTER_QUEUE_LIMIT"), "--max-queued-requests"),
        *_each("--store-host-bytes", "--kv-offloading-size", "--enable-hierarchical-cache", "--hicache-size"),
        *_each(_set("TANDEM_WORKER_HOST_SWAP_BYTES"), "--swap-space"),
        *_each("--mode disaggregated", "--kv-transfer-config", "--disaggregation-mode"),
        *_each(
            "set UCX_TLS and UCX_NET_DEVICES", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"
        ),
        *_each(_set("TANDEM_ROUTER_EDGE__API_KEYS"), "--api-key"),
        *_each(_set("TANDEM_ROUTER_EDGE__TLS__CERT"), "--ssl-certfile"),
        *_each(_set("TANDEM_ROUTER_EDGE__TLS__KEY"), "--ssl-keyfile"),
        *_each(_set("TANDEM_ROUTER_EDGE__TLS__CA"), "--ssl-ca-certs", "--ssl-cert-reqs"),
        *_each(_set("TANDEM_ROUTER_EDGE__CORS_ORIGINS"), "--allowed-origins"),
        *_each("the API is at the root, a proxy removes what is before it", "--root-path"),
        *_each(_set("TANDEM_ROUTER_EDGE__TOOL_CALL_PARSER"), "--tool-call-parser"),
        *_each(_set("TANDEM_ROUTER_EDGE__REASONING_PARSER"), "--reasoning-parser"),
        *_each(_set("TANDEM_ROUTER_EDGE__GENERATION_DEFAULTS"), "--generation-config", "--sampling-defaults"),
        *_each("change the model folder's generation_config.json", "--override-generation-config"),
        *_each("--chat-template-kwargs", "--default-chat-template-kwargs"),
        *_each(_TEXT, "--limit-mm-per-prompt", "--mm-processor-kwargs", "--language-model-only"),
        *_each("at most 20 are served, leave it out", "--max-logprobs"),
        *_each(_set("TANDEM_ROUTER_LOG_LEVEL"), "--uvicorn-log-level", "--log-level"),
        *_each(
            _set("TANDEM_ROUTER_EDGE__ACCESS_LOG"),
            *("--enable-log-requests", "--disable-log-requests", "--no-enable-log-requests", "--log-requests"),
        ),
        *_each("metrics are always served, leave it out", "--disable-log-stats", "--enable-metrics"),
        *_each("decode steps on CUDA are graphs, leave it out", "--enforce-eager", "--disable-cuda-graph"),
        *_each("no code of a checkpoint is run, leave it out", "--trust-remote-code"),
        *_each("the model folder has it, leave it out", "--tokenizer", "--tokenizer-path", "--tokenizer-mode"),
        *_each(_CHECKPOINT, "--load-format", "--config-format", "--task", "--runner"),
        *_each("write the model as ORG/NAME@REVISION", "--revision"),
        *_each("set HF_HOME", "--download-dir"),
        *_each("send seed with requests", "--seed", "--random-seed"),
        *_each("--speculation, --draft", "--speculative-config", "--speculative-algorithm"),
        *_each("--draft", "--speculative-draft-model-path"),
        *_each("--adapters", "--enable-lora", "--lora-modules", "--lora-paths"),
        *_each("--adapter-slots", "--max-loras", "--max-loras-per-batch"),
        *_each("--adapter-max-rank", "--max-lora-rank"),
        *_each("--deterministic", "--enable-deterministic-inference"),
        *_each("--traces-endpoint", "--otlp-traces-endpoint"),
    ]
)
"""Their flag → what to write, set or do instead."""


_BY_ITSELF = "leave it out, a quantized checkpoint says it itself"
VALUES: Mapping[tuple[str, str], str] = {
    ("--dtype", "bfloat16"): "use bf16",
    **{("--dtype", theirs): "use fp16" for theirs in ("float16", "half")},
    **{("--dtype", theirs): "use fp32" for theirs in ("float32", "float")},
    **{
        ("--quantization", theirs): _BY_ITSELF
        for theirs in (
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "compressed-tensors",
            "bitsandbytes",
            "mxfp4",
            "gguf",
        )
    },
}
"""Their value of an option that both have → what to write instead."""


def refuse_foreign(arguments: Sequence[str], own: Sequence[str]) -> None:
    """Raises ConfigError for another server's flag that is none of `own`, or its value of one, with what takes its
    place."""
    words = [word for argument in arguments for word in (argument.split("=", 1) if argument[:1] == "-" else [argument])]
    for flag, value in itertools.pairwise(words):
        if said := VALUES.get((flag, value)):
            raise ConfigError(f"{flag} {value} is not known here: {said}", field=flag.strip("-"))
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag not in own and (ours := OURS.get(flag)):
            said = f"use {ours}" if ours.startswith("--") else ours
            raise ConfigError(f"{flag} is no option of tandem serve: {said}", field=flag.strip("-"))


class ServeCommand(TyperCommand):
    """A command that knows flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises ConfigError for such a flag."""
        own = [flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)]
        refuse_foreign(args, own)
        return super().parse_args(ctx, args)
