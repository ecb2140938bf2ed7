"""Settings of experts and groups that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.group.expert_balance import ExpertBalance
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError
from shared.model.families.registry import load_config
from tests.integration.engine.families import write_family

SPLIT = ("--tp", "2", "--ep", "2")


def of_experts(*flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--name", "d0", "--model", "models/demo", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--expert-load", "load.json"), "needs ep above 1"),
        (("--tp", "2", "--expert-load", "load.json"), "needs ep above 1"),
        ((*SPLIT, "--expert-spare", "1"), "is 1, but without expert_load"),
        ((*SPLIT, "--expert-load", "load.json", "--expert-spare", "-1"), "greater than or equal to 0"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_experts(*flags)


def test_a_folder_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    config = load_config(write_family(tmp_path / "model", "mixtral"))
    chosen = of_experts(*SPLIT, "--expert-load", str(tmp_path / "none" / "load.json"))
    with pytest.raises(ConfigError, match=r"none/load\.json lies in no folder that exists"):
        ExpertBalance(chosen, config)


def test_what_a_start_computes_and_what_was_kept_is_not_counted_again(tmp_path: Path) -> None:
    config = load_config(write_family(tmp_path / "model", "mixtral"))
    path = tmp_path / "d0.json"
    balance = ExpertBalance(of_experts(*SPLIT, "--expert-load", str(tmp_path / "{name}.json")), config)
    assert balance.placement == (None, None)
    counts = {0: (4, 0, 0, 0, 0), 1: (1, 1, 1, 1, 0)}
    balance.measure(lambda: counts)
    balance.keep()
    assert not path.exists(), "no token since"
    counts = {0: (4, 2, 0, 0, 0), 1: (1, 1, 1, 1, 2)}
    balance.keep()
    written = path.read_text()
    assert '"0": [0, 2, 0, 0, 0], "1": [0, 0, 0, 0, 2]' in written
    balance.keep()
    assert path.read_text() == written


LEADER = "--group-leader=10.0.0.1:50062"


def settings(*flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, ["--name=w", "--model=m", *flags])


def test_ranks_of_several_hosts_have_pools_of_their_own() -> None:
    group = settings("--tp=4", "--pp=2", "--group-hosts=2", LEADER, "--group-host-index=1", "--group-address=10.0.0.2")
    assert (group.group_hosts, group.group_host_index, group.backend) == (2, 1, "shm")
    assert group.has_own_pools
    assert not settings("--tp=4").has_own_pools


@pytest.mark.parametrize(
    ("field", "flags", "words"),
    [
        ("group_hosts", ("--tp=4", "--group-hosts=3", LEADER), ("is 3", "4 processes", "tp 4 and pp 1")),
        ("group_hosts", ("--group-hosts=2", LEADER), ("is 2", "1 processes")),
        (
            "group_hosts",
            ("--pp=2", "--group-hosts=2", LEADER, "--fleet-key=0123456789abcdef", "--block-encryption=aes-gcm"),
            ("cannot be above 1", "block_encryption aes-gcm"),
        ),
        ("group_leader", ("--pp=2", "--group-hosts=2"), ("missing", "group_hosts is 2")),
        ("group_leader", ("--pp=2", LEADER), ("given", "group_hosts is 1")),
        ("group_leader", ("--pp=2", "--group-hosts=2", "--group-leader=h"), ("'h' is not host:port",)),
        ("group_leader", ("--pp=2", "--group-hosts=2", "--group-leader=h:0"), ("1 to 65535",)),
        (
            "group_host_index",
            ("--pp=2", "--group-hosts=2", LEADER, "--group-host-index=2"),
            ("is 2", "group_hosts 2", "last one is 1"),
        ),
        ("group_host_index", ("--group-host-index=1",), ("is 1", "group_hosts 1")),
        ("group_address", ("--pp=2", "--group-hosts=2", LEADER, "--group-address=host"), ("'host'",)),
        ("group_pool", ("--pp=2", "--group-hosts=2", LEADER, "--group-pool=shared"), ("shared by 2 hosts",)),
    ],
)
def test_what_cannot_be_is_refused_with_the_setting_and_both_numbers(
    field: str, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(*flags)
    assert refused.value.field == field
    assert all(word in refused.value.message for word in words), refused.value.message
