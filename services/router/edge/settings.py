"""Settings of the edge, a part of the router's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints

from services.router.edge.access import AccessLog
from services.router.edge.answer.families import CallFormatName, ReasoningName
from services.router.edge.key_digest import key_digest
from services.router.edge.limits import LimitSettings
from services.router.edge.text.pooling import PoolingName
from shared.rpc.tls import Tls
from shared.settings.group import SettingGroup
from shared.structure.structured_output import MAX_STRUCTURE_BYTES

ApiKey = Annotated[
    str,
    StringConstraints(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+$"),
    AfterValidator(key_digest),
]
"""A key as given, plain or `sha256:<hex>`; only the digest is kept."""
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]


class TenantSettings(SettingGroup):
    """One tenant."""

    api_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """Bearer keys that speak for this tenant and no other; what x-tenant says must agree."""

    requests_per_minute: int | None = Field(default=None, ge=0, le=10_000_000)
    """This tenant's own `limits.requests_per_minute`; 0 = no limit, none = the general one."""

    tokens_per_minute: int | None = Field(default=None, ge=0, le=10_000_000_000)
    """This tenant's own `limits.tokens_per_minute`; 0 = no limit, none = the general one."""

    adapters: tuple[AdapterName, ...] = ()
    """Names of adapters that are this tenant's, `name` or `beginning*`. Adapters that a tenant names do not exist for
    others that do not name them; those that no tenant names are everybody's."""

    max_adapters: int | None = Field(default=None, ge=0, le=65_536)
    """Most adapters of these names, of each model; loading one more is refused with 429. none = no limit."""

    max_adapter_bytes: int | None = Field(default=None, ge=0)
    """Most memory that all of one model's would take on a worker; loading more is refused with 429. none = no limit.
    Bytes."""

    share: TenantName | None = None
    """Tenants that name the same share prefixes with each other; none = no sharing. The time to a first token shows a
    tenant what the others of its share have sent."""


class StructureSettings(SettingGroup):
    """What a schema, expression or grammar for structured output may take."""

    max_bytes: int = Field(default=65_536, ge=256, le=MAX_STRUCTURE_BYTES)
    """Longest schema, expression or grammar, or all choices together, bytes of UTF-8."""

    compile_timeout_ms: ClassVar[int] = 10_000
    """Longest time for which a request waits until its structure is compiled, milliseconds; then it is refused with
    429. What one may cost is limited apart from that, to some tens of milliseconds of an idle core."""


class KeptSettings(SettingGroup):
    """Responses and conversations that are kept: in Redis where `kvstore` is set, and then for all routers alike, else
    in this router's memory."""

    ttl_s: float = Field(default=30 * 86_400.0, ge=0, le=400 * 86_400.0)
    """Time since its last use after which one is forgotten; 0 = nothing is kept. Seconds."""

    max_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Most bytes in this router's memory; what was used longest ago makes room. In Redis the KV store's
    `records.max_bytes` holds. Bytes."""

    max_background: int = Field(default=256, ge=0, le=65_536)
    """Most responses that are computed in the background at once; one more is refused with 429."""


class BatchSettings(SettingGroup):
    """`/v1/files` and `/v1/batches`: what is idle answers files of requests."""

    folder: Path | None = None
    """Folder of files and batches, of this router alone; both outlive it. None = they are not served."""

    max_file_bytes: int = Field(default=200 << 20, ge=1 << 10)
    """Longest file. Bytes."""

    tenant_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Most bytes of one tenant's files, those of answers included. Bytes."""

    max_bytes: int = Field(default=4 << 30, ge=1 << 10)
    """Most bytes of all files. Bytes."""

    max_lines: int = Field(default=50_000, ge=1, le=10_000_000)
    """Most requests of one batch."""

    max_batches: int = Field(default=64, ge=1, le=65_536)
    """Most batches that run at once; one more is refused with 429."""

    max_parallel: int = Field(default=64, ge=1, le=65_536)
    """Most requests of batches that run at once; fewer do while others leave no room."""

    ttl_s: float = Field(default=30 * 86_400.0, ge=60, le=400 * 86_400.0)
    """Life time of a file, and of a batch, that names none. Seconds."""

    max_line_bytes: ClassVar[int] = 8 << 20
    """Longest line of a batch's input, bytes."""


class McpSettings(SettingGroup):
    """Remote MCP servers, whose tools `/v1/responses` lists and calls for clients that name them."""

    allowed_servers: tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...] = ()
    """Origins of the servers that requests may name (`https://tools.example.com`); none = such requests are refused.
    The router speaks to no other origin for a client."""

    timeout_s: float = Field(default=30.0, gt=0, le=600.0)
    """Longest time of one message to a server and its answer. Seconds."""

    max_result_bytes: int = Field(default=1 << 20, ge=1 << 10, le=64 << 20)
    """Longest answer of a server, and longest lists of tools of one request together. Bytes."""

    max_calls: int = Field(default=16, ge=1, le=128)
    """Most calls of tools for one response, approved ones among them; behind them the model is asked no more."""


class EdgeSettings(SettingGroup):
    """What the HTTP and gRPC front doors accept."""

    api_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """Bearer keys that are accepted, over HTTP and gRPC alike; none = open to everyone. Plain, or `sha256:<hex>`
    (`printf %s KEY | sha256sum`); only the digest is kept."""

    admin_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """Keys that may also see, flush and pin the cache of all tenants. If any key is set, only these may; if none is,
    every client."""

    tenants: dict[TenantName, TenantSettings] = Field(default_factory=dict)
    """By name. A tenant that is not here has a salt of its own like every other, and counts as `other` in metrics."""

    tls: Tls = Tls()
    """TLS of the HTTP and gRPC APIs. With a ca, clients need certificates of their own."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, le=1024 * 1024 * 1024)
    """Longest HTTP request body, bytes."""

    max_choices: int = Field(default=128, ge=1, le=4096)
    """Most answers (prompts times `n`) that one HTTP request may ask for."""

    request_timeout_s: float = Field(default=0.0, ge=0.0, le=86400.0)
    """Longest deadline of a whole request, seconds; 0 = no bound. A gRPC client's own, shorter deadline wins."""

    default_timeout_s: float = Field(default=3600.0, ge=0.0, le=86400.0)
    """Deadline of a whole request that has none of its own, seconds, its wait for a worker included; 0 = none. Not
    above `request_timeout_s` where that is set. A request that is not done by then ends with 504."""

    tool_call_parser: CallFormatName = "auto"
    """How the model writes tool calls; `auto`: its chat template tells. `openai`: in gpt-oss's channels, which hold its
    reasoning too."""

    reasoning_parser: ReasoningName = "auto"
    """Marks around a model's reasoning, which becomes `reasoning_content`: `think` = <think>…</think>, `mistral` =
    [THINK]…[/THINK]; `auto`: those that its chat template has, if any. gpt-oss's channels are read whatever stands
    here."""

    generation_defaults: bool = True
    """Requests that do not say take temperature, top_p, top_k, min_p and repetition_penalty from the model's
    `generation_config.json`, and never get its `suppress_tokens` and `bad_words_ids`, beam searches apart. Its other
    fields that would change answers are named in a warning at the start."""

    pooling: PoolingName = "auto"
    """How `/v1/embeddings`, `/v1/score` and `/v1/rerank` make a vector of a text: of its last token's hidden state or
    of the mean of all, scaled to length 1. auto: as the model's `1_Pooling/config.json` says; without one they are
    refused."""

    cors_origins: tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...] = ()
    """Web pages of these origins (`https://app.example.com`, or `*` for all) may call the HTTP API from a browser; none
    = no CORS headers are sent."""

    structured_output: StructureSettings = StructureSettings()
    """What a request's `response_format` and its like may take."""

    kept: KeptSettings = KeptSettings()
    """Responses and conversations that clients come back to."""

    mcp: McpSettings = McpSettings()
    """Tools of remote servers."""

    batch: BatchSettings = BatchSettings()
    """Files of requests, and what answers them."""

    access_log: AccessLog = "off"
    """A line in the log for each call: `answers` = calls that ask for answers, over HTTP and gRPC, with tokens, TTFT,
    TPOT and workers; `all` = every other HTTP request too. Never what was asked or answered."""

    limits: LimitSettings = LimitSettings()
    """What one client may send, hold and be sent."""

    def deadline_s(self, asked_s: float = 0.0) -> float:
        """The deadline of a request that asks for this one, seconds from its arrival; 0 = none in both."""
        limits = [s for s in (asked_s or self.default_timeout_s, self.request_timeout_s) if s > 0]
        return min(limits, default=0.0)
