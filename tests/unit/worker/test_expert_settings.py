"""Which settings of experts a worker refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.group.expert_balance import ExpertBalance
from services.worker.settings import WorkerSettings
from shared.config import load_settings
from shared.errors import ConfigError
from shared.model.config.model_config import ModelConfig
from tests.integration.engine.families import write_family

SPLIT = ("--tp", "2", "--ep", "2")


def settings(*flags: str) -> WorkerSettings:
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
        settings(*flags)


def test_a_folder_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    config = ModelConfig.load(write_family(tmp_path / "model", "mixtral"))
    chosen = settings(*SPLIT, "--expert-load", str(tmp_path / "none" / "load.json"))
    with pytest.raises(ConfigError, match=r"none/load\.json lies in no folder that exists"):
        ExpertBalance(chosen, config)


def test_what_a_start_computes_and_what_was_kept_is_not_counted_again(tmp_path: Path) -> None:
    config = ModelConfig.load(write_family(tmp_path / "model", "mixtral"))
    path = tmp_path / "d0.json"
    balance = ExpertBalance(settings(*SPLIT, "--expert-load", str(tmp_path / "{name}.json")), config)
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
