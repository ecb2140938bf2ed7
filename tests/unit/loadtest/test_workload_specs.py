"""Workloads by name."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from loadtest.workloads.conversation import Conversation, Workload, ideal_cached_share
from loadtest.workloads.lengths import Fixed
from loadtest.workloads.spec import KINDS, TraceOptions, describe_workloads, parse_workload
from loadtest.workloads.synthetic import Chats, Random, SharedPrefix
from loadtest.workloads.trace import Replay
from shared.errors import ConfigError


def some(workload: Workload, count: int, seed: int = 0) -> list[Conversation]:
    return list(islice(workload.conversations(np.random.default_rng(seed)), count))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("mooncake", "azure")])
def test_every_drawn_workload_works_with_its_defaults_and_follows_its_seed(name: str) -> None:
    workload = parse_workload(name)
    assert some(workload, 20, seed=3) == some(workload, 20, seed=3)
    assert all(turn.num_new_tokens >= 1 and turn.num_output_tokens >= 1 for c in some(workload, 20) for turn in c.turns)


def test_fields_replace_the_defaults() -> None:
    assert parse_workload("fixed:input=7,output=3") == Random(Fixed(7), Fixed(3))
    assert parse_workload("fixed:output=3") == Random(Fixed(512), Fixed(3))


def test_random_prompts_share_no_label() -> None:
    labels = [span.label for c in some(parse_workload("random"), 100) for span in c.turns[0].spans]
    assert len(set(labels)) == len(labels)


def test_shared_prefixes_are_shared_within_their_group_only() -> None:
    workload = parse_workload("shared-prefix:prefix=40,groups=3,input=5,output=2")
    assert isinstance(workload, SharedPrefix)
    found = some(workload, 200)
    assert {c.turns[0].spans[0].label for c in found} == {"prefix/0", "prefix/1", "prefix/2"}
    assert {c.turns[0].num_new_tokens for c in found} == {45}


def test_conversations_open_with_the_system_prompt_and_pause_between_turns() -> None:
    workload = parse_workload("conversation:system=10,turns=3,input=4,output=2,think=500ms")
    assert isinstance(workload, Chats)
    assert workload.turns_per_conversation == 3
    found = some(workload, 200)
    assert all([t.num_new_tokens for t in c.turns] == [14, 4, 4] for c in found)
    assert all(c.turns[0].think_s == 0 for c in found)
    assert np.mean([t.think_s for c in found for t in c.turns[1:]]) == pytest.approx(0.5, rel=0.2)


def test_traces_take_a_bare_path_and_their_options(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 80, "hash_ids": [0, 1]}\n')
    replay = parse_workload(f"mooncake:{path}", TraceOptions(scale=32, scale_output=8))
    assert isinstance(replay, Replay)
    turn = some(replay, 1)[0].turns[0]
    assert (turn.num_new_tokens, turn.num_output_tokens) == (32, 10)
    assert parse_workload(f"mooncake:path={path}") == parse_workload(f"mooncake:{path}")


def test_azure_takes_any_scale(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    turn = some(parse_workload(f"azure:{path}", TraceOptions(scale=10, scale_output=4)), 1)[0].turns[0]
    assert (turn.num_new_tokens, turn.num_output_tokens) == (38, 11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poem", "unknown workload 'poem'; known are fixed, uniform"),
        ("fixed:inputs=3", "cannot read 'inputs=3'; its fields are input, output"),
        ("fixed:input", "cannot read 'input'"),
        ("fixed:input=3-9", "not of this workload's kind"),
        ("uniform:input=9-3", "9 is above 3"),
        ("shared-prefix:groups=1-3", "expected one number"),
        ("conversation:think=2", "has no unit"),
        ("mooncake", "needs a file: mooncake:PATH"),
    ],
)
def test_what_cannot_be_read_says_what_could(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_workload(text)


def test_every_workload_is_described() -> None:
    assert all(name in describe_workloads() for name in KINDS)


def test_the_ideal_cached_share_of_each_kind() -> None:
    assert ideal_cached_share(some(parse_workload("fixed"), 50)) == 0
    shared = parse_workload("shared-prefix:prefix=90,groups=1,input=10,output=1")
    assert ideal_cached_share(some(shared, 100)) == pytest.approx(0.9 * 0.99)
    chat = some(parse_workload("conversation:system=10,turns=2,input=10,output=20"), 1)
    assert ideal_cached_share(chat) == pytest.approx(40 / (20 + 50)), "the second turn's history"
