"""What the planner reads: figures of the pools, and what they say of a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.planner.cluster.pods import DRAINED_SINCE, Pod, pod_of
from services.planner.executor import choose_victims
from services.planner.figures.observer import Observer, Reading
from services.planner.figures.page import Page, share_above
from services.planner.figures.sources import RouterFigures
from services.planner.policy.config import PlannerConfig, PoolLimits
from services.planner.policy.demand import DemandModel
from services.planner.policy.need import DecodePace
from services.planner.policy.planner import Governor
from shared.errors import Internal
from shared.kv.groups import KVGroups
from shared.rpc.convert import step_times_to_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.sizing.step_time import StepTimes

PAGE = """\
# TYPE tandem_requests_total counter
tandem_requests_total{{outcome="finished"}} {finished}
tandem_requests_total{{outcome="overloaded"}} {refused}
tandem_requests_total{{outcome="invalid_value"}} {finished}
# TYPE gen_ai_server_time_to_first_token_seconds histogram
gen_ai_server_time_to_first_token_seconds_bucket{{le="0.5"}} {early}
gen_ai_server_time_to_first_token_seconds_bucket{{le="1.0"}} {finished}
gen_ai_server_time_to_first_token_seconds_bucket{{le="+Inf"}} {finished}
gen_ai_server_time_to_first_token_seconds_sum 1
gen_ai_server_time_to_first_token_seconds_count {finished}
tandem_engine_step_seconds_total {busy}
"""


STEPS = StepTimes(3e-3, 4e-3, 0.4e-3, 0.2e-3, 0.7e-6, 0.1e-6, overlap=0.8)


def page(finished: float, early: float, refused: float = 0.0, busy: float = 0.0) -> Page:
    return Page.parse(PAGE.format(finished=finished, early=early, refused=refused, busy=busy))


def pod(name: str, pool: str = "prefill", ready_since_s: float | None = 0.0, **more) -> Pod:
    return Pod(
        name,
        "worker",
        pool,
        "10.0.0.1",
        {"metrics": 9090},
        ready_since_s,
        **{"ending": False, "drained_since_s": None, **more},
    )


def reading(now_s: float, router: Page, worker: Page, running: int = 0) -> Reading:
    status = inference_pb2.ClusterStatus(num_running=running, queue_len=2)
    load = types_pb2.Load(
        num_running=6, num_total_blocks=100, num_free_blocks=25, num_decoding=4, num_context_tokens=800
    )
    load.step_times.CopyFrom(step_times_to_proto(STEPS))
    name = types_pb2.WorkerId(name="d-0")
    status.workers.add(worker=name, role=types_pb2.WORKER_ROLE_DECODE, connected=True, load=load)
    pods = [pod("p-0"), pod("p-1", ready_since_s=995.0), pod("p-2", ready_since_s=None), pod("d-0", "decode")]
    return Reading(now_s, 1000.0, pods, 3, 1, [RouterFigures("router", router, status)], {"p-0": worker})


def test_counters_become_differences_and_a_restart_begins_anew():
    observer = Observer(("prefill", "decode"), ttft_s=0.5, tpot_s=0.05, cold_start_s=60.0)
    first = observer.observe(reading(0.0, page(100, 90), page(0, 0, busy=50.0)))
    assert first.num_arrived is None
    seen = observer.observe(reading(10.0, page(140, 120, refused=3), page(0, 0, busy=58.0), running=5))
    assert seen.num_arrived == 40 + 3 + 5
    assert (seen.num_answered, seen.num_late) == (40, 10 + 3)
    assert seen.prefill_busy_s == pytest.approx(8.0)
    assert (seen.queue_len, seen.num_sequences, seen.decode_kv_share) == (2, 6.0, 0.75)
    assert (list(seen.decode_steps), seen.decode_context) == ([STEPS], 200.0)
    assert (seen.prefill.num_ready, seen.prefill.num_cold, seen.prefill.replicas) == (2, 1, 3)
    restarted = observer.observe(reading(20.0, page(7, 7), page(0, 0, busy=2.0), running=5))
    assert restarted.num_arrived == 7
    assert restarted.prefill_busy_s == pytest.approx(2.0)


def test_without_a_router_only_the_sizes_are_known():
    observer = Observer(("prefill", "decode"), 0.5, 0.05, 60.0)
    observer.observe(reading(0.0, page(1, 1), page(0, 0)))
    seen = observer.observe(replace(reading(10.0, page(9, 9), page(0, 0)), routers=None))
    assert (seen.num_arrived, seen.prefill.replicas) == (None, 3)


def test_of_several_models_and_pools_those_are_read_that_the_pools_serve():
    observer = Observer(("prefill", "decode"), ttft_s=0.5, tpot_s=0.05, cold_start_s=60.0)
    names = {"large": "d-0", "small": "s-0"}

    def both(now_s: float, finished: int, running: int, *, is_connected: bool = True) -> Reading:
        pages = {
            model: PAGE.format(finished=count, early=count, refused=0, busy=0).replace(
                "{", f'{{gen_ai_response_model="{model}",'
            )
            for model, count in (("large", finished), ("small", 1000 * finished))
        }
        read = reading(now_s, Page.parse("\n".join(pages.values())), page(0, 0), running + 900)
        (router,) = read.routers or ()
        decode = router.status.workers[0]
        for number, model in enumerate(["large", "small"]):
            router.status.models.add(name=model, num_running=(running, 900)[number], queue_len=number)
            worker = decode if model == "large" else router.status.workers.add()
            worker.CopyFrom(decode)
            worker.worker.name, worker.model = names[model], model
        other = router.status.workers.add()
        other.CopyFrom(decode)
        other.worker.name = "other-0"
        decode.connected = is_connected
        return read

    assert observer.observe(both(0.0, 100, 0, is_connected=False)).num_arrived is None
    assert observer.observe(both(10.0, 140, 0)).num_arrived is None, "now it is known which model they serve"
    seen = observer.observe(both(20.0, 180, 5))
    assert (seen.num_arrived, seen.num_answered, seen.queue_len) == (45, 40, 0)
    assert (seen.num_sequences, len(seen.decode_steps), [one.name for one in seen.workers]) == (6.0, 1, ["d-0"])
    assert seen.num_beside == 1
    seen = observer.observe(both(30.0, 220, 5, is_connected=False))
    assert (seen.num_arrived, seen.num_sequences) == (40, 0.0)


@pytest.mark.parametrize("gap", [{"routers": None}, {"routers": []}, {"prefill_pages": None}])
def test_behind_a_gap_in_the_readings_counters_begin_anew_and_the_rate_is_what_it_was(gap):
    observer, model, rates = Observer(("prefill", "decode"), 0.5, 0.05, 60.0), DemandModel(PlannerConfig()), []
    for tick in range(60):
        read = reading(tick * 10.0, page(20 * tick, 20 * tick), page(0, 0))
        demand = model.observe(observer.observe(replace(read, **gap) if 30 <= tick < 36 else read))
        rates.append(None if demand is None else round(demand.rate_now, 6))
    assert [tick for tick, rate in enumerate(rates) if rate is None] == [0, *range(30, 37)]
    assert set(rates) == {None, 2.0}


def test_the_share_above_a_limit_is_interpolated_between_bounds():
    buckets = {0.5: 50.0, 1.0: 90.0, float("inf"): 100.0}
    assert share_above(buckets, 1.0) == (10.0, 100.0)
    assert share_above(buckets, 0.75) == (30.0, 100.0)
    assert share_above(buckets, 2.0) == (10.0, 100.0)
    assert share_above({}, 1.0) == (0.0, 0.0)


def test_what_is_no_metrics_page_is_a_typed_error():
    with pytest.raises(Internal, match="not a page"):
        Page.parse("<html> 12 {")


def test_victims_are_first_who_does_not_serve_then_who_runs_least_then_the_newest():
    pods = [
        pod("busy", ready_since_s=1.0),
        pod("old", ready_since_s=1.0),
        pod("new", ready_since_s=9.0),
        pod("starting", ready_since_s=None),
        pod("ending", ready_since_s=1.0, ending=True),
        pod("marked", ready_since_s=1.0, drained_since_s=5.0),
    ]
    running = {"busy": 5, "old": 1, "new": 1}
    workers = {
        name: inference_pb2.WorkerStatus(load=types_pb2.Load(num_running=count)) for name, count in running.items()
    }
    chosen = [one.name for one in choose_victims(pods, workers, 4)]
    assert chosen == ["starting", "new", "old", "busy"]
    assert choose_victims(pods, workers, 0) == []


def test_a_pod_is_read_from_the_servers_json():
    content = {
        "metadata": {
            "name": "demo-prefill-1",
            "labels": {"app.kubernetes.io/component": "worker", "tandem-llm.io/pool": "prefill"},
            "annotations": {DRAINED_SINCE: "not a number"},
        },
        "spec": {"containers": [{"ports": [{"name": "metrics", "containerPort": 9090}]}]},
        "status": {
            "podIP": "fd00::1",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:01:40Z"}],
        },
    }
    read = pod_of(content)
    assert read is not None
    assert (read.ready_since_s, read.drained_since_s, read.address("metrics")) == (100.0, 0.0, "[fd00::1]:9090")
    assert not read.started
    draining = pod_of({**content, "status": {"containerStatuses": [{"started": True}]}})
    assert draining is not None
    assert (draining.ready, draining.started) == (False, True)
    assert pod_of({**content, "status": {"phase": "Succeeded"}}) is None


def test_an_elastic_pool_is_read_as_one_that_decodes_with_the_shape_of_its_requests():
    sums = """\
# TYPE tandem_request_prompt_tokens histogram
tandem_request_prompt_tokens_sum {prompt}
tandem_request_prompt_tokens_count {count}
# TYPE tandem_request_output_tokens histogram
tandem_request_output_tokens_sum {output}
tandem_request_output_tokens_count {count}
# TYPE tandem_tokens_total counter
tandem_tokens_total{{kind="prompt"}} {prompt}
tandem_tokens_total{{kind="cached"}} {cached}
"""
    observer = Observer(("", "decode"), ttft_s=0.5, tpot_s=0.05, cold_start_s=60.0)

    def elastic(now_s: float, prompt: int, output: int, count: int, cached: int) -> Reading:
        found = reading(
            now_s, Page.parse(sums.format(prompt=prompt, output=output, count=count, cached=cached)), page(0, 0)
        )
        (router,) = found.routers or ()
        worker = router.status.workers[0]
        worker.max_num_seqs, worker.max_num_batched_tokens, worker.block_size = 64, 512, 32
        return replace(found, prefill_replicas=0, prefill_pages={})

    observer.observe(elastic(0.0, 100, 10, 1, 0))
    seen = observer.observe(elastic(10.0, 4100, 310, 5, 1000))
    assert (seen.num_ended, seen.num_prompt_tokens, seen.num_cached_tokens, seen.num_output_tokens) == (
        4,
        4000,
        1000,
        300,
    )
    (worker,) = seen.workers
    assert (worker.name, worker.times, worker.max_num_seqs, worker.max_step_tokens) == ("d-0", STEPS, 64, 512)
    assert (worker.num_total_blocks, seen.groups, worker.num_decoding) == (100, KVGroups(32), 0)
    assert (seen.prefill.replicas, seen.prefill.num_ready, seen.decode.num_ready) == (0, 0, 1)


TICK_S = 10.0
NOISE = 0.1  # requests/s
SIZE, LESS = 3, 2


def size_after(rates: list[float], begin_s: float = 0.0, governor: Governor | None = None) -> int:
    """Of a pool of SIZE that needs LESS at every rate."""
    governor, size = governor or Governor(PlannerConfig(), PoolLimits()), SIZE
    for number, rate in enumerate(rates):
        now_s = begin_s + number * TICK_S
        wanted, _ = governor.propose(now_s, size, LESS, LESS, LESS, rate, NOISE)
        governor.moved(now_s, wanted - size)
        size = wanted
    return size


def grown() -> Governor:
    """Its pool has just grown to SIZE, an hour after the start."""
    governor = Governor(PlannerConfig(), PoolLimits())
    governor.propose(0.0, LESS, LESS, LESS, LESS, 2.0, NOISE)
    governor.moved(3600.0, SIZE - LESS)
    return governor


def test_a_size_of_the_first_minutes_is_corrected_at_the_same_load():
    assert size_after([2.0] * 60) == LESS


@pytest.mark.parametrize(("rates", "size"), [([2.0] * 300, SIZE), ([2.0] * 100 + [1.75] * 200, SIZE)])
def test_later_noise_gives_no_worker_back(rates, size):
    assert size_after(rates, 3600.0, grown()) == size


def test_a_load_that_has_surely_fallen_does():
    assert size_after([2.0] * 100 + [1.65] * 20, 3600.0, grown()) == LESS


CONFIG = PlannerConfig(tpot_s=0.05, decode_sequences=20.0)
STEP_TIMES = StepTimes(3e-3, 4e-3, 0.4e-3, 0.2e-3, 1e-6, 0.1e-6)


def seen_at(batch: float, tpot_s: float, *steps: StepTimes) -> DecodePace:
    pace = DecodePace(CONFIG)
    pace.observe(batch, tpot_s, 1000, 10.0)
    pace.measured(steps, 500.0)
    return pace


def test_without_reported_steps_the_target_is_reached_at_the_configured_number():
    pace = seen_at(10, 0.030)
    assert [pace.at(batch) for batch in (10, 15, 20)] == pytest.approx([0.030, 0.040, 0.050])


def test_reported_steps_say_how_much_longer_a_step_of_a_larger_batch_is():
    pace = seen_at(8, 0.012, STEP_TIMES)
    longer = STEP_TIMES.decode_step_s(32, 32 * 500) - STEP_TIMES.decode_step_s(8, 8 * 500)
    assert pace.at(8) == pytest.approx(0.012)
    assert pace.at(32) == pytest.approx(0.012 + longer)
    assert pace.at(31) < pace.at(31.5) < pace.at(32)
    assert pace.at(0.5) >= 0.006, "no less than half of what was seen"


def test_workers_that_differ_count_in_the_mean_and_reports_that_stop_are_kept():
    slow = StepTimes(3e-3, 4e-3, 0.4e-3, 1.2e-3, 1e-6, 0.1e-6)
    alone = [seen_at(8, 0.012, steps).at(24) for steps in (STEP_TIMES, slow)]
    both = seen_at(8, 0.012, STEP_TIMES, slow)
    assert both.at(24) == pytest.approx(sum(alone) / 2)
    both.measured((), 0.0)
    assert both.at(24) == pytest.approx(sum(alone) / 2)
