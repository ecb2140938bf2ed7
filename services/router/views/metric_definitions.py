"""The router's metrics: what each is called and what it means. Where they are counted: `metrics.py`; what
TTFT and TPOT are: `timings.py`.

Names are those of the GenAI semantic conventions of OpenTelemetry where these have one, `tandem_*` otherwise. Every
sample also has the label gen_ai_response_model, but for those of the process as a whole.
"""

from __future__ import annotations

from services.router.dispatch.prefix_lookup import ROUND_TRIP_BUCKETS
from shared.telemetry.metrics import counter, gauge, histogram

# The conventions' advised boundaries, and what an overloaded system needs above them.
TTFT = histogram(
    "gen_ai.server.time_to_first_token",
    "TTFT: time from a request's arrival at the router to its first token there, finished requests only.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    unit="s",
)
TPOT = histogram(
    "gen_ai.server.time_per_output_token",
    "TPOT: (end - first token) / (output tokens - 1) of finished requests; the end is when the reply's writer had"
    " passed on the last token to the client.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    unit="s",
)
DURATION = histogram(
    "gen_ai.server.request.duration",
    "Time from a request's arrival to its end, of all requests; error_type is empty for finished ones.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    "error_type",
    unit="s",
)
QUEUE = histogram(
    "tandem_queue_seconds",
    "Time in the admission queue, finished requests only.",
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
EXPOSED = histogram(
    "tandem_handoff_exposed_seconds",
    "Part of a hand-off that its request waited for: between its first two tokens, the decode step left out.",
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_LENGTHS = tuple(float(1 << i) for i in range(0, 21, 2))
PROMPT_LEN = histogram("tandem_request_prompt_tokens", "Prompt length of finished requests.", _LENGTHS)
OUTPUT_LEN = histogram("tandem_request_output_tokens", "Answer length of finished requests.", _LENGTHS)

REQUESTS = counter(
    "tandem_requests_total",
    "Requests by outcome, each once: finished, cancelled by the client, or the code of the error that ended or refused"
    " it. A call for several answers is a request for each; one refused before that is one.",
    "outcome",
)
FINISHED_REQUESTS = counter(
    "tandem_finished_requests_total", "Finished requests by what ended the answer: stop or length.", "reason"
)
TENANT_REQUESTS = counter(
    "tandem_tenant_requests_total",
    "Accepted requests, by tenant and whether they finished. Tenants that are not configured are `other`.",
    "tenant",
    "finished",
)
RETRIES = counter("tandem_retries_total", "Requests placed again, by the code of the error that caused it.", "cause")
MIGRATIONS = counter(
    "tandem_migrations_total",
    "Requests that went on with another worker after they had begun on one, by what moved: the prompt to another"
    " prefill worker, or an answer behind the tokens that the client has; and by the error's code.",
    "phase",
    "cause",
)
MOVES = counter(
    "tandem_moves_total",
    "Running answers that were to move to another decode worker, each time, by cause and outcome: moved; carried, where"
    " the old worker was lost meanwhile; stayed, where the other one failed or refused; ended, where the answer did.",
    "outcome",
    "cause",
)
PLACEMENTS = counter("tandem_placements_total", "Choices of workers: with a hand-off, or why without one.", "route")
REFUSALS = counter(
    "tandem_refusals_total",
    "Requests refused by admission: at arrival or after they waited; because the queue is full, because they would be"
    " late, or at the end of their time in it.",
    "when",
    "cause",
)
TTFT_SECONDS = counter(
    "tandem_ttft_part_seconds_total",
    "Where the time to the first token of finished requests went; the parts add up to it.",
    "part",
)
PREFIX_TOKENS = counter(
    "tandem_prefix_tokens_total",
    "Prompt tokens of finished requests by tenant and by where their KV came from: local, peer, store, or computed.",
    "tenant",
    "place",
)
TOKENS = counter(
    "tandem_tokens_total", "Tokens of finished requests by kind; cached ones include fetched ones.", "kind"
)
LOST_TOKENS = counter(
    "tandem_unfinished_tokens_total", "Output tokens that clients were given of requests that did not finish."
)
PICKS = counter(
    "tandem_picks_total", "Requests of gateways by the endpoint picker's answer: picked, or an error's code.", "outcome"
)
RECORDED = (
    *(TTFT, TPOT, DURATION, QUEUE, EXPOSED, PROMPT_LEN, OUTPUT_LEN),
    *(REQUESTS, FINISHED_REQUESTS, TENANT_REQUESTS, RETRIES, MIGRATIONS, MOVES, PLACEMENTS, REFUSALS, TTFT_SECONDS),
    *(PREFIX_TOKENS, TOKENS, LOST_TOKENS, PICKS),
)
"""What `RouterMetrics` counts."""

WAITING = gauge("tandem_router_waiting_requests", "Requests in the admission queue.")
RUNNING = gauge("tandem_router_running_requests", "Requests that were given to workers and have not ended.")
WORKERS = gauge("tandem_router_workers", "Workers by role and whether this router is connected to them.", "role", "up")
DECODERS = gauge(
    "tandem_router_decode_preferred_workers",
    "In mode auto: workers with both roles that are to decode just now; the others only prefill.",
)
HEADROOM = gauge(
    "tandem_router_split_headroom",
    "In mode auto: times the present demand that the workers could serve as they are split between prefill and decode"
    " now; absent while nothing is decided.",
)
FLIPS = counter(
    "tandem_router_preference_flips_total",
    "In mode auto: changes of a worker's preference between decode and prefill, each worker counted.",
)
LOOKUPS = histogram(
    "tandem_index_lookup_seconds",
    "Round trips to the KV store that looked up a prompt's prefix, failed ones included.",
    ROUND_TRIP_BUCKETS,
)
LOOKUP_ERRORS = counter(
    "tandem_index_lookup_errors_total", "Look-ups that got no answer; their prompts were placed without hits."
)
HTTP_REQUESTS = counter(
    "tandem_http_requests_total",
    "HTTP requests to this process by method, path (`other`: none of ours, `none`: not understood as HTTP) and status"
    " (499: the client left before its head).",
    "method",
    "path",
    "status",
)
GRPC_CALLS = counter("tandem_grpc_calls_total", "Calls of Generate and GenerateBatch by gRPC status.", "method", "code")
