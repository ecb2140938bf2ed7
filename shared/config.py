"""Settings: one frozen object a service, from flags > environment > YAML file > defaults.

A service declares a subclass of `ServiceSettings`; `load_settings` builds it once in `__main__`, and nothing
reads the environment after that. A bad value is a ConfigError that names the setting.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from shared.errors import ConfigError
from shared.telemetry.logs import LogFormat, LogLevel


class ServiceSettings(BaseSettings):
    """Base of all services' settings. Subclasses set `env_prefix` (`TANDEM_ROUTER_`, …) in their model_config."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_nested_delimiter="__",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        use_attribute_docstrings=True,
    )

    log_format: LogFormat = "text"
    """Of the log on stderr: text, or one JSON object a line."""
    log_level: LogLevel = "info"
    """Least level that is logged."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment before the values given to the constructor, which `load_settings` reads from the YAML file."""
        return env_settings, init_settings


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Builds `cls` from `argv` (default: the process's), the environment and `--config FILE` (YAML).

    Raises ConfigError naming the setting; `--help` prints all of them and exits with 0.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    from_file = _read_yaml(_take_config_flag(arguments))
    try:
        return cls(_cli_parse_args=arguments, **from_file)  # type: ignore[call-arg]  # pydantic-settings' own
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or cls.__name__
        raise ConfigError(f"setting {name}: {first['msg']} (got {first.get('input')!r})", field=name) from error
    except SettingsError as error:
        raise ConfigError(str(error), field=cls.__name__) from error


def _take_config_flag(arguments: list[str]) -> Path | None:
    """Removes `--config FILE` or `--config=FILE` from the arguments."""
    for i, argument in enumerate(arguments):
        if argument == "--config":
            if i + 1 == len(arguments):
                raise ConfigError("--config needs a file name", field="config")
            path = arguments[i + 1]
            del arguments[i : i + 2]
            return Path(path)
        if argument.startswith("--config="):
            del arguments[i]
            return Path(argument.removeprefix("--config="))
    return None


def _read_yaml(path: Path | None) -> dict[str, Any]:
    """The file's mapping; {} without a file."""
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}", field="config") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", field="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings", field="config")
    return content
