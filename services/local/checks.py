"""Checks of a cluster before any of its services starts: settings, configuration, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from services.kvstore.settings import KVStoreSettings
from services.router.configured import discovery_of
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from shared.config import ServiceSettings, load_settings
from shared.environment import check_variables
from shared.model.ranks.shard import Degrees

SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "kvstore": KVStoreSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "worker": WorkerSettings,
    "router": RouterSettings,
}
"""By the module in `services` that each service is started from."""


def check_settings(*, router: Sequence[str], worker: Sequence[str], kvstore: Sequence[str]) -> None:
    """Reads the settings of three commands as the services will, the environment's among them.

    Raises ConfigError naming the setting or the variable.
    """
    check_variables((RouterSettings, WorkerSettings, KVStoreSettings))
    load_settings(KVStoreSettings, _flags(kvstore))
    load_settings(WorkerSettings, _flags(worker))
    settings = load_settings(RouterSettings, _flags(router))
    settings.tls.check("tls", mutual=True)
    settings.edge.tls.check("edge.tls", mutual=False)
    discovery_of(settings)


def check_model(folder: Path, splits: Iterable[Degrees] = ()) -> None:
    """Reads what workers and routers read of a model folder before its weights, and the weights' headers.

    `splits`: how its workers split it over processes. Blocking. Raises ModelLoadError, ConfigError.
    """
    # Imported here: most commands need neither.
    from shared.model.config.model_config import ModelConfig
    from shared.model.text.chat_template import ChatTemplate
    from shared.model.text.tokenizer import Tokenizer
    from shared.model.weights.safetensors_files import checkpoint_files

    config = ModelConfig.load(folder)
    for degrees in splits:
        degrees.check(config)
    tokenizer = Tokenizer.load(folder)
    ChatTemplate.load(folder, tokenizer.special_tokens)
    checkpoint_files(folder)


def _flags(command: Sequence[str]) -> list[str]:
    """The arguments of a command, without the interpreter and the module."""
    first = next((i for i, argument in enumerate(command) if argument.startswith("--")), len(command))
    return list(command[first:])
