"""A worker's metrics: what each is, and where it is read. Nothing here runs unless the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.telemetry.gpu_use import GpuUse
from services.worker.telemetry.load_report import LoadReporter, ShipmentCounters
from shared.engine.speculation.speculator import GuessCounters
from shared.engine.step_counters import STEP_BUCKETS_S, StepCounters
from shared.kv.layout import BlockLayout
from shared.kv.transfer import TransferCounters
from shared.rpc.pb.tandem.v1 import types_pb2
from shared.telemetry.metrics import Observed, counter, gauge, histogram


@dataclass(frozen=True, slots=True)
class WorkerSources:
    """Where a worker's figures are."""

    reporter: LoadReporter
    steps: StepCounters
    transfer: TransferCounters
    shipments: ShipmentCounters
    expert_tokens: Callable[[], Sequence[int]]
    """See `Decoder.expert_tokens`."""
    layout: BlockLayout
    guesses: Callable[[], GuessCounters]
    gpus: GpuUse
    adapters: AdapterPool | None = None
    """None where the worker serves no adapters."""

    @property
    def load(self) -> types_pb2.Load:
        """The newest load report."""
        return self.reporter.message()


def _fetched(worker: WorkerSources) -> Mapping[str, float]:
    load = worker.load
    return {"peer": load.num_peer_hit_tokens, "host": load.num_host_hit_tokens, "disk": load.num_disk_hit_tokens}


def _blocks(worker: WorkerSources) -> Mapping[str, float]:
    load = worker.reporter.engine
    if load is None:
        return {}
    promised = min(load.num_growth_blocks, load.num_free_blocks)
    return {
        "in_use": load.num_total_blocks - load.num_free_blocks,
        "promised": promised,
        "free": load.num_free_blocks - promised,
    }


METRICS: tuple[Observed[WorkerSources], ...] = (
    # GPUs
    Observed(
        gauge(
            "tandem_gpu_utilization_ratio",
            "Share of NVML's last sample period, up to a second, in which a kernel ran, by GPU; none without NVML.",
            "gpu",
        ),
        lambda worker: worker.gpus.utilisation(),
    ),
    Observed(
        gauge(
            "tandem_gpu_used_bytes", "Memory of a GPU that all processes on it use, by GPU; none without NVML.", "gpu"
        ),
        lambda worker: worker.gpus.used_bytes(),
    ),
    Observed(
        gauge("tandem_worker_asleep", "1 while the worker has no weights, since it sleeps, else 0."),
        lambda worker: int(worker.reporter.asleep),
    ),
    # Requests
    Observed(
        gauge("tandem_engine_running_sequences", "Sequences in the running batch."),
        lambda worker: worker.load.num_running,
    ),
    Observed(
        gauge("tandem_engine_waiting_sequences", "Sequences that wait for a place in the batch or for blocks."),
        lambda worker: worker.load.num_waiting,
    ),
    Observed(
        gauge("tandem_engine_queued_tokens", "Prompt tokens that are still to be computed."),
        lambda worker: worker.load.num_queued_tokens,
    ),
    Observed(
        gauge(
            "tandem_worker_draining",
            "1 while the worker takes no new work, since it ends, is drained, sleeps or changes its weights, else 0.",
        ),
        lambda worker: worker.load.draining,
    ),
    # Adapters
    Observed(
        gauge(
            "tandem_adapters", "Adapters ready to compute with: those that requests use now, and the others.", "state"
        ),
        lambda worker: {} if worker.adapters is None else worker.adapters.num_ready(),
    ),
    Observed(
        counter("tandem_adapter_loads_total", "Adapters brought into a slot for requests that waited."),
        lambda worker: 0 if worker.adapters is None else worker.adapters.num_loads,
    ),
    Observed(
        counter(
            "tandem_adapter_load_seconds_total", "Time of those, from the first request's wait to the slot, seconds."
        ),
        lambda worker: 0.0 if worker.adapters is None else worker.adapters.load_s,
    ),
    Observed(
        counter(
            "tandem_adapter_copies_total", "Of these loads, those from a copy in the host's memory, without a read."
        ),
        lambda worker: 0 if worker.adapters is None else worker.adapters.num_copied,
    ),
    Observed(
        gauge(
            "tandem_adapter_host_bytes", "Memory of the host for copies of adapters, in a group on all ranks, bytes."
        ),
        lambda worker: 0 if worker.adapters is None else worker.adapters.host_bytes,
    ),
    Observed(
        counter("tandem_adapters_evicted_total", "Adapters that left their slot for another one."),
        lambda worker: 0 if worker.adapters is None else worker.adapters.num_evicted,
    ),
    # Steps
    Observed(
        counter("tandem_engine_steps_total", "Engine steps."),
        lambda worker: worker.steps.num_steps,
    ),
    Observed(
        counter(
            "tandem_engine_step_seconds_total",
            "Time of all steps, each from the result before it while steps follow each other.",
        ),
        lambda worker: worker.steps.busy_s,
    ),
    Observed(
        histogram(
            "tandem_engine_step_duration_seconds",
            "Duration of a step by kind: decode (a token for each running answer), prefill (chunks of prompts), mixed"
            " (both), copy (only blocks to or from host memory).",
            STEP_BUCKETS_S,
            "kind",
        ),
        lambda worker: worker.steps.durations_s,
    ),
    Observed(
        histogram(
            "tandem_engine_inter_token_seconds",
            "Time between two tokens of an answer in the engine, once for each token behind the first.",
            STEP_BUCKETS_S,
        ),
        lambda worker: worker.steps.gaps_s,
    ),
    Observed(
        counter(
            "tandem_engine_prefill_tokens_total",
            "Tokens of prompts that went through the model, those that had to be computed again included.",
        ),
        lambda worker: worker.steps.num_prefill_tokens,
    ),
    Observed(
        counter(
            "tandem_engine_computed_tokens_total", "Tokens that went through the model, of prompts and of answers."
        ),
        lambda worker: worker.steps.num_computed_tokens,
    ),
    Observed(
        counter(
            "tandem_engine_expert_tokens_total",
            "Tokens' choices of experts, all layers together, by the rank that computes them, or a part of them. Of the"
            " first stage where the worker has several; on CPUs alone.",
            "rank",
        ),
        lambda worker: {str(rank): tokens for rank, tokens in enumerate(worker.expert_tokens())},
    ),
    Observed(
        counter("tandem_engine_output_tokens_total", "Tokens that the engine produced."),
        lambda worker: worker.steps.num_output_tokens,
    ),
    Observed(
        counter(
            "tandem_engine_guessed_tokens_total",
            "Tokens that were guessed and computed beside the next ones of running answers, by what guessed them.",
            "method",
        ),
        lambda worker: worker.guesses().num_guesses,
    ),
    Observed(
        counter(
            "tandem_engine_accepted_tokens_total",
            "Of these, those that were right, and so became tokens of their answers in the same step.",
            "method",
        ),
        lambda worker: worker.guesses().num_accepted,
    ),
    Observed(
        counter("tandem_engine_draft_seconds_total", "Time in which a draft model guessed, and computed its prompts."),
        lambda worker: worker.guesses().drafting_s,
    ),
    Observed(
        counter(
            "tandem_engine_preemptions_total", "Sequences whose blocks were taken for others; they were queued again."
        ),
        lambda worker: worker.load.num_preemptions,
    ),
    Observed(
        counter(
            "tandem_engine_swapped_sequences_total",
            "Preempted sequences whose blocks went to host memory (out) and came back from there (in).",
            "direction",
        ),
        lambda worker: {"out": worker.load.num_swapped_out, "in": worker.load.num_swapped_in},
    ),
    # KV pool
    Observed(
        gauge("tandem_kv_pool_blocks", "Blocks of the KV pool."),
        lambda worker: worker.load.num_total_blocks,
    ),
    Observed(
        gauge("tandem_kv_pool_bytes", "Memory of the KV pool, by the dtype that it keeps K and V in.", "dtype"),
        lambda worker: {worker.layout.dtype: worker.load.num_total_blocks * worker.layout.block_bytes},
    ),
    Observed(
        gauge(
            "tandem_kv_blocks",
            "Blocks of the KV pool by state: in_use (a sequence or a transfer holds them), promised (free, and running"
            " answers are expected to take them), free. Cached ones may be in any of them.",
            "state",
        ),
        _blocks,
    ),
    Observed(
        gauge("tandem_kv_free_blocks", "Free blocks, less those that running answers are expected to take."),
        lambda worker: worker.load.num_free_blocks,
    ),
    Observed(
        gauge("tandem_kv_cached_blocks", "Blocks that can be found by their hash, free ones included."),
        lambda worker: worker.load.num_cached_blocks,
    ),
    Observed(
        counter("tandem_kv_bad_blocks_total", "Blocks that arrived damaged, were dropped and computed."),
        lambda worker: worker.load.num_bad_blocks,
    ),
    # Prefixes
    Observed(
        counter("tandem_prompt_tokens_total", "Prompt tokens of all sequences that started here."),
        lambda worker: worker.load.num_prompt_tokens,
    ),
    Observed(
        counter("tandem_prefix_hit_tokens_total", "Prompt tokens that were not computed: in the pool, or fetched."),
        lambda worker: worker.load.num_prefix_hit_tokens,
    ),
    Observed(
        counter(
            "tandem_prefix_fetched_tokens_total",
            "Tokens whose blocks were fetched: from peers' pools, or from store nodes' host memory or disk.",
            "tier",
        ),
        _fetched,
    ),
    # Transfer
    Observed(
        counter("tandem_transfer_sent_blocks_total", "KV blocks sent to other processes, a message each."),
        lambda worker: worker.transfer.blocks_sent,
    ),
    Observed(
        counter("tandem_transfer_sent_notes_total", "Messages sent that name blocks: notes beside them, and trailers."),
        lambda worker: worker.transfer.notes_sent,
    ),
    Observed(
        counter("tandem_transfer_sent_note_bytes_total", "Bytes of those notes and trailers."),
        lambda worker: worker.transfer.note_bytes_sent,
    ),
    Observed(
        counter("tandem_transfer_sent_bytes_total", "Bytes of KV blocks sent to other processes."),
        lambda worker: worker.transfer.bytes_sent,
    ),
    Observed(
        counter("tandem_transfer_packed_blocks_total", "Of the sent KV blocks, those that were packed."),
        lambda worker: worker.transfer.blocks_packed,
    ),
    Observed(
        counter("tandem_transfer_saved_bytes_total", "Bytes by which packed blocks were smaller as they were sent."),
        lambda worker: worker.transfer.bytes_saved,
    ),
    Observed(
        counter(
            "tandem_transfer_received_bytes_total", "Bytes of KV blocks received from other processes, as unpacked."
        ),
        lambda worker: worker.transfer.bytes_received,
    ),
    Observed(
        counter(
            "tandem_transfer_send_seconds_total",
            "Time that blocks were on their way from here, over all blocks: several at once count each.",
        ),
        lambda worker: worker.transfer.send_s,
    ),
    Observed(
        counter("tandem_transfer_failed_blocks_total", "Blocks that could not be sent."),
        lambda worker: worker.transfer.num_failed_sends,
    ),
    Observed(
        gauge("tandem_transfer_endpoints", "Open UCX endpoints to other processes."),
        lambda worker: worker.transfer.num_endpoints,
    ),
    Observed(
        counter("tandem_shipments_total", "Hand-offs that a prefill worker sent, by outcome.", "outcome"),
        lambda worker: worker.shipments.num_ended,
    ),
    Observed(
        counter(
            "tandem_shipment_seconds_total",
            "Time of finished hand-offs, from the first block to the trailer's arrival.",
        ),
        lambda worker: worker.shipments.total_s,
    ),
    Observed(
        counter(
            "tandem_shipment_exposed_seconds_total",
            "Part of that behind the first token: what computing did not hide.",
        ),
        lambda worker: worker.shipments.exposed_s,
    ),
    Observed(
        counter("tandem_peer_given_blocks_total", "Blocks sent to other workers that fetched a prefix from this one."),
        lambda worker: worker.load.num_blocks_given,
    ),
    Observed(
        gauge("tandem_store_silent_nodes", "Store nodes that do not answer this worker."),
        lambda worker: len(worker.load.silent_stores),
    ),
)
