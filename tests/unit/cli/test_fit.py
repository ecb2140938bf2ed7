"""`tandem fit` reads sizes as people write them, refuses with the option's name, and prints what it found."""

from __future__ import annotations

import json
import math
import socket
import threading
from pathlib import Path

import pytest
import torch
import yaml

from shared.errors import ConfigError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.families.registry import load_config
from shared.model.layers.head import HeadParameters
from shared.model.layers.parameters import DecoderParameters
from shared.sizing.shapes import KEPT_STATES
from tandem_cli.fit.measured_cluster import measured_cluster
from tandem_cli.fit.shape import shape_of
from tandem_cli.quantities import count_of, seconds_of
from tests.demo import DEMO
from tests.integration.engine.families import write_family
from tests.unit.cli.conftest import RunTandem

HEAD = Path(__file__).parents[3] / "loadtest" / "traces" / "mooncake_conversation_head.jsonl"


def test_quantities():
    assert [count_of(text, "context", 10**7) for text in ("128k", "128Ki", "8000", "1.5k", " 2M ")] == [
        128_000, 131_072, 8000, 1500, 2_000_000,
    ]  # fmt: skip
    assert [seconds_of(text, "ttft", 3600) for text in ("1s", "40ms", "2min", "0.5")] == [1.0, 0.04, 120.0, 0.5]


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "12q", "1e9", "0", "99999999999", "nan", "9" * 400])
def test_bad_sizes_name_the_option_and_the_limit(text):
    with pytest.raises(ConfigError, match="--context") as refused:
        count_of(text, "context", 10**7)
    assert refused.value.field == "context"


@pytest.mark.parametrize("text", ["", "ms", "0s", "-1s", "5h", "1e9", "9999min"])
def test_bad_times_name_the_option_and_the_limit(text):
    with pytest.raises(ConfigError, match="--tpot") as refused:
        seconds_of(text, "tpot", 60)
    assert refused.value.field == "tpot"


def test_the_answer_as_json(tandem: RunTandem):
    done = tandem("fit", "70b", "--context", "128k", "--concurrency", "256", "--price", "3", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["gpus_by_memory"] == {"mha": 611, "own_kv_heads": 78}
    assert {pool["role"] for pool in found["pools"]} == {"prefill", "decode"}
    assert found["gpus"] == sum(pool["gpus"] for pool in found["pools"])
    assert found["cost"]["per_hour"] == 3 * found["gpus"]
    assert found["better"] in found["reason"]


def test_the_published_table(tandem: RunTandem):
    done = tandem("fit", "--table", "--gpu", "h100", "--json")
    rows = json.loads(done.out)
    assert [row["gpus_mha"] for row in rows] == [2, 11, 37, 215, 1076, 3393]
    assert [row["kv_gib_of_128k"] for row in rows[:3]] == [15.6, 39.1, 61.5]


def test_values_for_the_chart_of_a_model_folder(tandem: RunTandem, tmp_path: Path):
    values = tmp_path / "values.yaml"
    done = tandem(
        "fit", str(DEMO), "--context", "512", "--concurrency", "200k", "--rate", "5000", "--values", str(values)
    )
    assert done.status == 0, done.err
    content = yaml.safe_load(values.read_text())
    assert content["model"]["uri"] == str(DEMO)
    for pool in content["pools"]:
        assert set(pool) <= {"name", "role", "replicas", "parallelism", "resources", "dtype", "quantization", "kvDtype"}
        assert pool["resources"]["limits"]["nvidia.com/gpu"] == pool["parallelism"]["tensor"]


def test_codes_of_kv_are_counted_with_their_scales_and_asked_of_the_chart(tandem: RunTandem, tmp_path: Path):
    values = tmp_path / "values.yaml"
    load = ("--context", "512", "--concurrency", "20k", "--rate", "500", "--kv-dtype", "int8", "--values", str(values))
    done = tandem("fit", str(DEMO), *load, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["model"]["kv_bytes_per_token"] == 2 * 4 * 4 * (32 + 4)  # K and V, layers, heads, bytes
    assert {pool["kvDtype"] for pool in yaml.safe_load(values.read_text())["pools"]} == {"int8"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing-there"], "neither a model folder"),
        (["8b", "--gpu", "TPU"], "no GPU 'TPU'"),
        (["8b", "--weights", "fp3"], "--weights: 'fp3' is not one of"),
        (["8b", "--kv-dtype", "int4"], "--kv-dtype: 'int4' is not one of fp32, bf16, fp16, fp8, int8"),
        (["deepseek-v3", "--kv-dtype", "int8"], "--kv-dtype: 'int8' is not one of fp32, bf16, fp16"),
        (["8b", "--ttft", "soon"], "--ttft: expected a time"),
        (["8b", "--rate", "nan"], "--rate: must be from"),
        (["8b", "--memory-share", "1.5"], "--memory-share: must be from 0.1 to 1, got 1.5"),
        (["405b", "--gpu", "H100"], "812 GB of bf16 weights do not fit 8 × H100"),
        (["8b", "--values", "/nowhere/values.yaml"], "--values: cannot write /nowhere/values.yaml"),
        (["8b", "--draft", "mixtral-8x7b"], "has a vocabulary of 32000 tokens, the model has 128256"),
        (["8b", "--draft", "/nowhere"], "--draft: /nowhere is neither"),
        (["8b", "--adapters", "5000"], "--adapters: must be from 0 to 4096, got 5000"),
        (["8b", "--adapters", "4", "--adapter-rank", "257"], "--adapter-rank: must be from 1 to 256, got 257"),
        (["deepseek-v3", "--adapters", "4"], "--adapters: adapters of this model are not supported"),
        (["8b", "--gpu", "H100", "--max-tensor", "1", "--adapters", "4096"], "GB of adapters do not fit"),
        (["x" * 300], "is neither a model folder nor one of"),
        ([], "name a model"),
    ],
)
def test_refusals_name_the_option_and_exit_with_2(tandem: RunTandem, arguments: list[str], says: str):
    done = tandem("fit", *arguments)
    assert done.status == 2
    assert says in done.err


@pytest.mark.parametrize("family", ["qwen3-next", "kimi-linear"])
def test_states_count_as_memory_of_a_sequence(tandem: RunTandem, tmp_path: Path, family: str):
    write_family(tmp_path, family)
    config = load_config(tmp_path)
    assert config.delta is not None
    shape = shape_of(str(tmp_path))
    views = DecoderParameters.allocate(config, torch.bfloat16, "meta").checkpoint_views(config)
    counted = sum(view.numel() for view in views.values())
    assert shape.num_params == pytest.approx(
        counted, rel=0.02
    )  # a gate of shared experts and norms of heads are left out
    layout = config.block_layout(16, "bfloat16")
    kv_layers = config.num_layers - len(config.state_layers)
    planes, width = (2, config.head_dim) if config.latent is None else (1, config.latent.cached_dim)
    assert shape.kv_bytes_per_token == kv_layers * planes * 2 * config.num_kv_heads * width
    context = 16 * 64
    states = KEPT_STATES * len(config.state_layers) * config.delta.state_bytes
    assert shape.kv_bytes(config.num_kv_heads, "bf16", context) * context == pytest.approx(
        context * shape.kv_bytes_per_token + states
    )
    # While a prompt is computed; blocks of states are not filled to the last byte.
    held = layout.groups.num_blocks(context, 16) * layout.block_bytes
    assert shape.kv_bytes(config.num_kv_heads, "bf16", context) * context <= held

    device = "memory=1G,bandwidth=60G,flops=900G"
    done = tandem("fit", str(tmp_path), "--gpu", device, "--context", "512", "--tpot", "100ms", "--json")
    assert done.status == 0, done.err
    assert all(pool["kv_tokens"] > 0 for pool in json.loads(done.out)["pools"])
    adapted = tandem("fit", str(tmp_path), "--gpu", device, "--context", "512", "--adapters", "2", "--json")
    assert adapted.status == (0 if config.latent is None else 2), adapted.err
    drafted = tandem("fit", str(tmp_path), "--draft", str(tmp_path))
    assert drafted.status == 2
    assert "have states, from which a wrong guess cannot be taken back" in drafted.err


def test_degrees_as_json_and_as_a_table(tandem: RunTandem):
    arguments = ("fit", "mixtral-8x7b", "--gpu", "H100", "--degrees", "--max-tensor", "4", "--max-pipeline", "2")
    rows = json.loads(tandem(*arguments, "--json").out)
    assert {(row["spread"]["tensor"], row["spread"]["pipeline"]) for row in rows} == {
        (tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)
    }
    assert [row["fits"] for row in rows if row["spread"] == {"tensor": 1, "pipeline": 1, "expert": 1}] == [False]
    shown = tandem(*arguments).out
    assert "does not fit" in shown
    assert "on GPUs no group of ranks has run yet" in shown


def test_a_device_in_numbers_serves_as_a_gpu(tandem: RunTandem):
    device = "memory=24G,bandwidth=60G,flops=900G"
    done = tandem("fit", str(DEMO), "--gpu", device, "--context", "512", "--tpot", "100ms", "--json")
    assert done.status == 0, done.err
    assert {pool["gpu"] for pool in json.loads(done.out)["pools"]} == {"device"}


def test_a_draft_takes_memory_of_workers_that_decode_alone(tandem: RunTandem):
    arguments = ("fit", "70b", "--gpu", "H200", "--max-tensor", "2", "--json")
    (prefill, decode), (same, less) = (
        json.loads(tandem(*arguments, *more).out)["pools"] for more in ((), ("--draft", "8b"))
    )
    assert same == prefill
    assert less["weight_bytes"] - decode["weight_bytes"] == pytest.approx(16e9, rel=0.01)
    assert less["kv_bytes_per_token"] - decode["kv_bytes_per_token"] == 128 * 1024
    assert less["kv_tokens"] < decode["kv_tokens"]


def test_a_head_takes_memory_of_all_workers_of_one_device_each(tandem: RunTandem, tmp_path: Path):
    write_random_checkpoint(tmp_path, max_position_embeddings=512, extra_config={"num_nextn_predict_layers": 1})
    config = load_config(tmp_path)
    views = HeadParameters.allocate(config, torch.float32, "meta").checkpoint_views(config)
    arguments = ("fit", str(tmp_path), "--context", "256", "--concurrency", "4", "--max-tensor", "2", "--json")
    plain, headed = (json.loads(tandem(*arguments, *more).out)["pools"] for more in ((), ("--heads",)))
    for before, now in zip(plain, headed, strict=True):
        added = sum(math.prod(view.shape) for view in views.values())
        assert now["weight_bytes"] - before["weight_bytes"] == pytest.approx(2 * added)
        assert now["kv_bytes_per_token"] == pytest.approx(before["kv_bytes_per_token"] * 3 / 2)
    assert shape_of("deepseek-v3").head_params == pytest.approx(11.5e9, rel=0.02)
    refused = tandem("fit", "8b", "--heads")
    assert refused.status == 2
    assert "--heads: the model has no layer that guesses" in refused.err


def test_the_load_at_which_two_pools_and_one_change_places(tandem: RunTandem):
    command = ("fit", "8b", "--gpu", "H100", "--context", "8k", "--prompt", "7k", "--output", "50", "--ttft", "800ms")
    found = json.loads(tandem(*command, "--concurrency", "32", "--price", "2", "--json").out)
    even, rate = found["break_even"], found["load"]["rate"]
    others = [(name, even[name]) for name in ("rate_below", "rate_above") if even[name] is not None]
    assert others
    for name, at in others:
        assert (at < rate) == (name == "rate_below")
        there = json.loads(
            tandem(*command, "--concurrency", str(round(32 * at / rate)), "--rate", str(at), "--json").out
        )
        assert there["better"] != found["better"]


def test_a_month_and_the_tokens_from_which_own_gpus_pay(tandem: RunTandem):
    found = json.loads(tandem("fit", "8b", "--price", "2", "--token-price", "0.5", "--json").out)
    cost = found["cost"] if found["better"] == "disaggregated" else found["collocated_cost"]
    assert cost["per_month"] == pytest.approx(730 * cost["per_hour"])
    assert found["break_even"]["tokens_a_month"] == pytest.approx(cost["per_month"] / 0.5 * 1e6)
    assert "a month" in tandem("fit", "8b", "--price", "2").out
    assert "month" not in tandem("fit", "8b").out
    refused = tandem("fit", "8b", "--price", "2", "--token-price", "0")
    assert (refused.status, "--token-price" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--trace", "t.jsonl"), "--measured is missing"),
        (("--measured", "http://127.0.0.1:1"), "--trace is missing"),
        (("--trace", "none.jsonl", "--measured", "none.json"), "none.jsonl"),
        (("--trace", str(HEAD), "--measured", "none.json"), "cannot read none.json"),
        (("--trace", str(HEAD), "--measured", "http://127.0.0.1:1"), "does not answer"),
        (("--trace", str(HEAD), "--measured", "http://127.0.0.1:http"), "does not answer: nonnumeric port"),
        (("--trace", str(HEAD), "--measured", str(HEAD)), "is not the status of a cluster"),
    ],
)
def test_a_trace_and_a_cluster_that_cannot_be_read_are_named(tandem: RunTandem, arguments, named):
    done = tandem("fit", *arguments)
    assert (done.status, done.out) == (2, "")
    assert named in done.err


@pytest.mark.parametrize(
    ("status", "says"),
    [
        *((text, "is not the status of a cluster") for text in ("5", "null")),
        ("[]", "names no workers"),
        pytest.param("[" * 100_000, "is not the status of a cluster", id="deep"),
        ('{"mode": "auto", "workers": 5}', "is not the status of a cluster"),
        ('{"mode": "auto", "workers": [{"connected": true, "worker": {"name": "w"}}]}', "worker 'w' has no role"),
        ('{"mode": "auto", "workers": [{"role": "WORKER_ROLE_DECODE"}]}', "no worker that decodes is connected"),
        (
            '{"mode": "disaggregated", "workers": [{"connected": true, "role": "WORKER_ROLE_DECODE"}]}',
            "no worker that prefills is connected",
        ),
    ],
)
def test_a_status_without_workers_that_serve_is_named(tmp_path: Path, status: str, says: str):
    path = tmp_path / "status.json"
    path.write_text(status)
    with pytest.raises(ConfigError, match=says) as refused:
        measured_cluster(str(path), "")
    assert refused.value.field == "measured"


def test_adapters_take_memory_and_are_asked_of_the_chart(tandem: RunTandem, tmp_path: Path):
    values = tmp_path / "values.yaml"
    load = ("8b", "--gpu", "H100", "--adapters", "16", "--adapter-rank", "16", "--values", str(values))
    done = tandem("fit", *load, "--json")
    assert done.status == 0, done.err
    kept = json.loads(done.out)["model"]["adapter_bytes"]
    assert kept == 16 * 2 * 16 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18_432)
    assert "16 of rank 16 take 1.34 GB of each worker" in tandem("fit", *load).out
    for pool in yaml.safe_load(values.read_text())["pools"]:
        assert pool["config"] == {"adapter_slots": 16, "adapter_bytes": kept, "adapter_max_rank": 16}


def test_copies_of_adapters_take_the_hosts_memory_and_none_of_the_gpus(tandem: RunTandem, tmp_path: Path):
    values = tmp_path / "values.yaml"
    load = ("8b", "--gpu", "H100", "--adapters", "16", "--values", str(values))
    without, found = (tandem("fit", *load, *more, "--json").out for more in ((), ("--adapter-copies", "200")))
    before, after = (json.loads(text) for text in (without, found))
    copies = after["model"]["adapter_host_bytes"]
    assert (before["model"]["adapter_host_bytes"], copies) == (0, 200 * after["model"]["adapter_bytes"] // 16)
    assert before["pools"] == after["pools"]
    config = [pool["config"]["adapter_host_bytes"] for pool in yaml.safe_load(values.read_text())["pools"]]
    assert set(config) == {copies}
    assert "copies of 200 take 16.8 GB" in tandem("fit", *load, "--adapter-copies", "200").out


def test_a_port_that_speaks_no_http_is_named():
    """As a router's gRPC port does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00@\x00")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):  # its request, so that the end is no reset
                    pass

        answering = threading.Thread(target=answer)
        answering.start()
        place = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{place} does not answer") as refused:
            measured_cluster(place, "")
        answering.join()
    assert refused.value.field == "measured"
