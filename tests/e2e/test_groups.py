"""Workers that are groups of processes: one answer whatever the split, and any rank's death costs no stream a token."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from shared.identity import WorkerRole
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import load_config
from shared.model.ranks.expert_load import ExpertLoad
from shared.rpc.pb.tandem.v1 import inference_pb2
from tests.e2e.running import BLOCK_SIZE, DEMO, PatientCommands, Running, block_bytes, gone, running
from tests.e2e.stage import HOST_BYTES, staged
from tests.e2e.streams import NUM_STREAMS, Streams, prompt, under_fault, undisturbed
from tests.e2e.test_experts import write_model
from tests.e2e.test_fleet_life import checkpoint
from tests.integration.engine.test_greedy_against_transformers import transformers_greedy
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

MAX_TOKENS = 120
"""Six processes share the cores of a small machine."""
FOLLOWER = "services.worker.group"


def ranks(cluster: Running, worker: str) -> list[psutil.Process]:
    """A worker's processes, the leader first."""
    leader = psutil.Process(cluster.cluster.children[worker].pid)
    return [leader, *(each for each in leader.children() if FOLLOWER in each.cmdline())]


def incarnations(status: inference_pb2.ClusterStatus) -> dict[str, int]:
    return {w.worker.name: w.worker.incarnation for w in status.workers if w.connected}


class TwoWays(PatientCommands):
    """A group over a shared pool, and one whose ranks have pools of their own."""

    def worker(self, plan, kvstore):
        split = ("--pp", "2", "--group-pool", "own") if plan.name == "decode-0" else ("--tp", "2")
        return [*super().worker(plan, kvstore), *split]


async def test_groups_sleep_wake_and_take_other_weights(tmp_path):
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "head_dim": 32, "num_heads": 4}
    old, new = (checkpoint(tmp_path / name, seed, **shape) for seed, name in enumerate(("old", "new"), 1))
    tokens = prompt(0)
    expected = [transformers_greedy(folder, tokens) for folder in (old, new)]
    assert expected[0] != expected[1]
    async with running(tmp_path / "run", old, kind=TwoWays) as cluster:
        assert await cluster.tokens(tokens, max_tokens=64) == expected[0]
        before = {name: ranks(cluster, name) for name in ("prefill-0", "decode-0")}
        assert [len(each) for each in before.values()] == [2, 2]
        assert (await cluster.http.post("/sleep")).status_code == 200
        for name, (leader, follower) in before.items():
            assert ranks(cluster, name) == [leader]
            await gone(follower.pid)
        assert (await cluster.http.post("/wake_up")).status_code == 200
        assert [len(ranks(cluster, name)) for name in before] == [2, 2]
        assert await cluster.tokens(tokens, max_tokens=64) == expected[0]
        response = await cluster.http.post("/v1/update_weights", json={"model_path": str(new)})
        assert response.status_code == 200, response.text
        assert await cluster.tokens(tokens, max_tokens=64) == expected[1]
        (old / "model.safetensors").write_bytes(b"broken")
        response = await cluster.http.post("/v1/update_weights", json={"model_path": str(old)})
        assert response.status_code == 400, response.text
        assert await cluster.tokens(tokens, max_tokens=64) == expected[1]
        assert {name: ranks(cluster, name)[0] for name in before} == {name: each[0] for name, each in before.items()}
        await cluster.idle()


@pytest.mark.slow
async def test_a_prefix_of_one_degree_is_a_hit_at_another(tmp_path):
    """One decode worker computes, another of the same pools fetches: blocks have one form."""
    async with running(tmp_path, prefill_tp=2, decode_tp=4) as cluster, running(tmp_path) as plain:
        expected = await plain.tokens(prompt(0), max_tokens=64)
        assert await cluster.tokens(prompt(0), max_tokens=64) == expected
        first = await cluster.complete(prompt(0), max_tokens=64)
        assert first["choices"][0]["token_ids"] == expected
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        status = await cluster.status()
        assert sorted((w.worker.name, w.tp, w.pp) for w in status.workers) == [("decode-0", 4, 1), ("prefill-0", 2, 1)]
        await cluster.idle()


SPLITS = {"prefill-0": ("--tp", "2"), "prefill-1": ("--pp", "2"), "decode-0": ("--tp", "4")}
OF_EXPERTS = {
    **SPLITS,
    "prefill-0": ("--tp", "2", "--ep", "2", "--expert-spare", "1"),
    "decode-0": ("--tp", "4", "--ep", "2"),
}
IN_SLICES = {
    "prefill-0": ("--tp", "2", "--group-pool", "own", "--collectives", "gloo"),
    "prefill-1": ("--pp", "2"),
    "decode-0": ("--tp", "4", "--group-pool", "own"),
}
"""Pools of the ranks' own beside a shared one."""
LOADS = "{name}.json"
"""Beside the model's folder: counts of experts of the workers with more than one set of ranks."""


class Unequal(PatientCommands):
    """No two workers are split alike."""

    splits = SPLITS

    def worker(self, plan, kvstore):
        splits = OF_EXPERTS if load_config(plan.pools.model).moe is not None else self.splits
        flags = splits[plan.name]
        if "--ep" in flags:
            flags = (*flags, "--expert-load", str(Path(plan.pools.model).with_name(LOADS)))
        return [*super().worker(plan, kvstore), *flags]


class InSlices(Unequal):
    """Some ranks have pools of their own."""

    splits = IN_SLICES


def write_skewed(path: Path, config: ModelConfig) -> ExpertLoad:
    """As if one expert of each layer had been chosen far more often than the others."""
    none = ExpertLoad.none(config)
    hot = [9000, *[10] * (none.num_experts - 1)]
    skewed = none.and_then({layer: hot for layer in range(config.num_layers) if config.has_experts(layer)})
    skewed.write(path)
    return skewed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [("demo", Unequal), ("demo", InSlices), ("mixtral", Unequal), ("deepseek-v3", Unequal)]
)
async def test_hand_offs_and_stored_prefixes_are_the_same_whatever_the_split(tmp_path, family, kind):
    model = DEMO if family == "demo" else write_model(tmp_path / "model", family)
    config = load_config(model)
    loads = {name: tmp_path / LOADS.format(name=name) for name in ("prefill-0", "decode-0")}
    if config.moe is not None:
        skewed = write_skewed(loads["prefill-0"], config)
    tokens = prompt(0) * 3 + prompt(1)[:20]  # 200: 12 full blocks and a part of one
    expected = transformers_greedy(model, tokens)
    async with staged(tmp_path / "run", kind, model=model, num_prefill=2, store_host_bytes=HOST_BYTES) as stage:
        for name in ("prefill-0", "prefill-1"):
            before = stage.load("decode-0").kv_bytes_received
            answer, summary = await stage.ask(tokens, name, tenant=name, max_tokens=64)
            assert (answer, summary.prefill_worker) == (expected, name)
            assert stage.load("decode-0").kv_bytes_received - before == 13 * block_bytes(model), "the KV, no more"
            await stage.stored(tokens, 12, tenant=name)
        for name, other in (("prefill-0", "prefill-1"), ("prefill-1", "prefill-0")):
            answer, summary = await stage.ask(tokens, name, tenant=other, max_tokens=64)
            assert answer == expected
            assert summary.num_cached_tokens == summary.num_fetched_tokens == 12 * BLOCK_SIZE, "from the store"
            assert summary.num_peer_tokens == 0
        if family != "demo":
            welcomes = {link.name: link.welcome for link in stage.fleet.links}
            assert {name: (w.tp, w.pp, w.ep) for name, w in welcomes.items()} == {
                "prefill-0": (2, 1, 2), "prefill-1": (1, 2, 1), "decode-0": (4, 1, 2),
            }  # fmt: skip
        await stage.idle()
    if config.moe is not None:
        kept = {name: ExpertLoad.read(path, config).tokens for name, path in loads.items()}
        assert kept["prefill-0"] != skewed.tokens, "written when they drained"
        assert kept["prefill-0"].keys() == kept["decode-0"].keys() == skewed.tokens.keys()
        assert all(sum(counts) >= 100 for counts in kept["decode-0"].values())


async def dies(cluster: Running, worker: str, rank: int, expected: list[list[int]]) -> None:
    """SIGKILL to the rank under streams: the group comes back as one, no token is another, no block stays used."""
    before = incarnations(await cluster.status())
    processes = ranks(cluster, worker)
    role = WorkerRole.PREFILL if worker == "prefill-0" else WorkerRole.DECODE
    assert len(processes) == cluster.cluster.spec.degrees(role).num_ranks

    async def kill(streams: Streams) -> None:
        assert streams.num_open, "all ended before"
        os.kill(processes[rank].pid, signal.SIGKILL)
        for process in processes:
            await gone(process.pid)

    # A prefill group dies while it may still have prompts, a decode group once it has all the streams.
    num_begun = 1 if worker == "prefill-0" else len(expected)
    await under_fault(cluster, kill, expected, MAX_TOKENS, num_begun)
    after = incarnations(await cluster.until(lambda status: incarnations(status).keys() == before.keys()))
    assert {name for name in after if after[name] != before[name]} == {worker}
    await cluster.idle()
    assert await cluster.tokens(prompt(0), max_tokens=MAX_TOKENS, ignore_eos=True) == expected[0]


KILLS = [("prefill-0:1", "decode-0:0"), ("decode-0:3", "prefill-0:0"), ("decode-0:1", "decode-0:2")]
"""Worker and rank, 0 its leader: two deaths a cluster, since a part that dies a third time in a minute stays away."""
OVER_TCP = {"TANDEM_WORKER_COLLECTIVES": "gloo", "TANDEM_WORKER_GROUP_POOL": "own"}
"""Sums over TCP, each rank with its slices of blocks alone."""


async def die(tmp_path: Path, family: str, deaths: Sequence[str], decode_tp: int = 4, num: int = NUM_STREAMS) -> None:
    """One rank after the other, of one cluster."""
    model = DEMO if family == "demo" else write_model(tmp_path / "model", family)
    split = {"prefill_tp": 2, "decode_tp": decode_tp}
    experts = {} if family == "demo" else {"prefill_ep": 2, "decode_ep": decode_tp}
    async with running(tmp_path / "run", model, num_kv_blocks=1600, restart=True, **split, **experts) as cluster:
        expected = await undisturbed(cluster, MAX_TOKENS, num)
        for death in deaths:
            worker, rank = death.split(":")
            await dies(cluster, worker, int(rank), expected)


async def test_the_death_of_a_follower_costs_no_stream_a_token(tmp_path):
    await die(tmp_path, "demo", ["decode-0:1"], decode_tp=2, num=8)


@pytest.mark.slow
@pytest.mark.parametrize("deaths", KILLS, ids=", ".join)
@pytest.mark.parametrize("family", ["demo", "mixtral", "qwen3-moe"])
async def test_the_death_of_any_rank_costs_no_stream_a_token(tmp_path, family, deaths):
    await die(tmp_path, family, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("death", ["decode-0:2", "prefill-0:1"])
async def test_the_death_of_a_rank_whose_sums_go_over_tcp_costs_no_stream_a_token(tmp_path, monkeypatch, death):
    for name, value in OVER_TCP.items():
        monkeypatch.setenv(name, value)
    await die(tmp_path, "demo", [death])
