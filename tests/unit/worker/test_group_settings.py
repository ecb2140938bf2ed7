"""What a worker's settings say of the hosts of its group, and what they may not."""

from __future__ import annotations

import pytest

from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError

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
