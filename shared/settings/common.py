"""Groups of settings that services have in common with each other and with the launcher of a local cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationInfo, field_validator

from shared.kernels.lora.parts import MAX_RANK
from shared.kv.encryption_modes import NO_ENCRYPTION, Encryption
from shared.model.ranks.shard import MAX_DEGREE
from shared.settings.group import SettingGroup

DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:50051"

Mode = Literal["auto", "disaggregated", "collocated"]
PrefixFetch = Literal["auto", "always", "never"]
SpeculationMode = Literal["off", "ngram", "heads", "auto"]

Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
"""Processes, stages or hosts of one worker."""
BlockSize = Annotated[
    Literal[16, 32, 64],
    BeforeValidator(lambda given: int(given) if isinstance(given, str) and given.isdecimal() else given),
]
"""Tokens; flags and variables are text, which a choice of numbers does not take."""
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
"""As clients write it: printable ASCII without spaces."""


UNEQUAL = "a prompt's KV then depends on which worker computed it"
"""Why deterministic mode refuses pools that keep KV in two formats."""


class EngineSettings(SettingGroup):
    """What a worker's engine computes in and keeps: of workers, and of each model of a local cluster."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of weights and computation. auto: the checkpoint's; on a CPU fp32, but for a bf16 checkpoint the one of
    bf16 and fp32 that a short timing finds faster."""
    quantization: Literal["auto", "int8", "int4", "fp8", "w8a8", "w4a8"] = "auto"
    """Form of the projections' weights. auto: as the checkpoint has them, quantized or not. Else plain weights are
    rounded to the nearest code while they are read: int8 and fp8 with a scale a row, int4 with scale and zero a group
    of at most 128 columns and the output projection in int8. w8a8, w4a8: int8, int4, and what they are multiplied
    with in int8 too, a scale a token, but with dtype fp32. All workers of a fleet need the same value."""
    kv_dtype: Literal["auto", "fp32", "bf16", "int8", "fp8"] = "auto"
    """dtype of the KV cache. auto: that of the computation; bf16 beside fp32 halves a block. int8 and fp8 (e4m3) beside
    fp32 or bf16 keep a code for each number and a scale for each token and head: 53 % of the bytes of bf16 with heads
    of 64. Not for models with latent attention. All cost accuracy."""
    prefill_kv_dtype: Literal["same", "fp32", "bf16"] = "same"
    """dtype of the KV cache of prefill workers, where it is not kv_dtype: beside int8 and fp8 alone, to which they
    convert blocks as they send them. Prompts are then read at full accuracy, and decode workers never compute one. The
    same value for all workers of a fleet; not with deterministic, nor with workers that do both."""
    num_kv_blocks: int = Field(default=0, ge=0, le=1_000_000_000)
    """Blocks of each worker's KV pool; 0 = as free memory allows."""
    max_model_len: int = Field(default=0, ge=0, le=1_000_000_000)
    """Longest sequence in tokens; 0 = the model's own limit. At most what the pool holds."""

    @field_validator("prefill_kv_dtype")
    @classmethod
    def _check_converted(cls, value: str, info: ValidationInfo) -> str:
        if value != "same" and (kept := info.data.get("kv_dtype", "int8")) not in ("int8", "fp8"):
            raise ValueError(f"cannot be {value} beside kv_dtype {kept}: blocks are converted to int8 and fp8 alone")
        if value != "same" and info.data.get("deterministic"):
            raise ValueError(f"cannot be {value} beside kv_dtype {kept} with deterministic: {UNEQUAL}")
        return value

    @property
    def converts_kv(self) -> bool:
        """Whether prefill workers convert what they send."""
        return self.prefill_kv_dtype != "same"


class AdapterSettings(SettingGroup):
    """LoRA adapters that requests may ask for by name: of workers, and of each model of a local cluster."""

    adapters: str = ""
    """Adapters that a worker serves from its start on: name=folder, separated by spaces, folders as PEFT saves them.
    All workers of a model need the same ones. `tandem serve` also takes name=ORG/NAME[@REVISION] at the Hub."""
    adapter_folders: str = ""
    """Folders, separated by spaces, in which further adapters may lie that an administrator loads while the worker
    runs; nothing outside is opened. Empty = none can be loaded."""
    adapter_slots: int = Field(default=16, ge=1, le=4096)
    """Most adapters that are ready to compute with at once. Of more, those that no request uses make room; a request
    whose adapter is still to come waits, and holds no place."""
    adapter_bytes: int = Field(default=1 << 30, ge=1)
    """Memory that these may take, in a group of processes on all of them together. Bytes."""
    adapter_host_bytes: int = Field(default=1 << 29, ge=0)
    """Memory of the host for adapters that were read, also when others have their slots: one that comes back is copied,
    not read. In a group of processes for all of them together. 0 = each is read anew. Bytes."""
    adapter_max_rank: int = Field(default=MAX_RANK, ge=1, le=MAX_RANK)
    """Highest rank of an adapter that is taken."""


class AnswerSettings(SettingGroup):
    """How answers come about on every worker: of workers, and of a local cluster."""

    deterministic: bool = False
    """Whether an answer is the same to the bit however its request is batched, chunked, cached, preempted, handed over
    or retried: every result of a sequence depends on that sequence alone. All workers of a fleet need the same value,
    and processors that compute alike; others are refused. Not with kernels torch, or fp16 on a CPU,
    nor for models with experts or latent attention."""
    speculation: SpeculationMode = "off"
    """Which sources guess the next tokens of running answers, so that one step computes several tokens; answers are the
    same with any. ngram: what followed the same tokens before, in the prompt or in the answer. heads: the checkpoint's
    layer that predicts further than the next token, or the EAGLE-3 head in `draft`; refused where there is neither.
    auto: ngram, what a structure leaves no choice about, and what a draft model gives where there is one. No more is
    guessed than makes tokens come faster. On GPUs nothing is guessed for models whose layers keep states. Prefill
    workers guess nothing, but compute a head's KV: with heads, prefill and decode workers need the same setting. A
    request's `speculation` narrows it."""
    draft: str = ""
    """With speculation auto, folder of a draft model: a second, much smaller model of the same vocabulary. Each worker
    that decodes loads it, with a KV pool of its own beside the model's; prefill workers do not. With speculation heads,
    folder of an EAGLE-3 head for this model, which all workers load. Empty = none."""
    prefix_fetch: PrefixFetch = "auto"
    """auto: a prompt waits briefly for a prefix from peers or store nodes, and is computed while the rest arrives.
    always: it waits until the prefix is here. never: prefixes are not fetched."""

    @field_validator("draft")
    @classmethod
    def _check_draft(cls, value: str, info: ValidationInfo) -> str:
        if value and (speculation := info.data.get("speculation", "auto")) not in ("auto", "heads"):
            raise ValueError(f"needs speculation auto or heads, which is {speculation}: nothing else asks a draft")
        return value


class EncryptionSettings(SettingGroup):
    """Settings of every process that sends or receives blocks, and of a local cluster."""

    block_encryption: Encryption = NO_ENCRYPTION
    """How blocks and the messages of hand-offs are encrypted on the transfer plane, with keys derived from the fleet's
    key, which it needs: aes-gcm is fast where the processor has AES instructions, chacha20-poly1305 needs none. The
    same in all services of a fleet. none = blocks travel in plain text."""


class ModeSettings(SettingGroup):
    """Settings of a model behind a router, and of its pools in a local cluster."""

    mode: Mode = "disaggregated"
    """disaggregated: two pools, one prefills, the other decodes. collocated: the decode workers prefill too, as in an
    ordinary serving system. auto: one pool whose workers do both; for each request the router chooses where its prompt
    is computed and where its answer runs, by what the workers' steps take and by `targets.tpot_s`."""


class TemplateSettings(SettingGroup):
    """How conversations become prompts: of a model behind a router, and of each model of a local cluster."""

    chat_template: str = ""
    """Jinja template of conversations, in place of the model folder's own: a file, or the template itself, which has a
    brace. Empty = the folder's."""
    chat_template_kwargs: str = ""
    """JSON object of variables that the template gets where a request's own `chat_template_kwargs` do not name them,
    such as `{"enable_thinking": false}`. Empty = none."""


class AliasSettings(SettingGroup):
    """Names of a model behind a router."""

    aliases: tuple[ModelName, ...] = ()
    """Further names that clients may use for it."""


class ApiSettings(SettingGroup):
    """Where clients reach the cluster: of a router, and of a local cluster's first one."""

    http: str = DEFAULT_HTTP
    """host:port of the OpenAI API; port 0 = any free one."""
    grpc: str = DEFAULT_GRPC
    """host:port of the gRPC API; port 0 = any free one."""
    served_model_name: str = ""
    """The name that clients ask for; empty = the folder's name."""
