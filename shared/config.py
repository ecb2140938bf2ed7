"""Settings: one frozen object a service, from flags > environment > YAML file > defaults.

A service declares a subclass of `ServiceSettings`; `load_settings` builds it once in `__main__`, and nothing
reads the environment after that. A bad value is a ConfigError that names the setting.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError

from shared.environment import check_variables
from shared.errors import ConfigError
from shared.settings.group import SettingGroup, setting_error
from shared.telemetry.logs import LogFormat, LogLevel
from shared.telemetry.tracing.standard_variables import standard_traces

logger = logging.getLogger(__name__)


class LogSettings(SettingGroup):
    """Log settings of every process, and of a local cluster."""

    log_format: LogFormat = "text"
    """Format of the log on stderr: text, or one JSON object a line."""


class ServiceSettings(BaseSettings, LogSettings):
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
    renamed: ClassVar[Mapping[str, str]] = {}
    """Old name → new name of settings that were renamed, `part.field` for nested ones. Flags, environment variables and
    YAML keys with the old name work for one more release, with a warning."""

    log_level: LogLevel = "info"
    """Lowest level that is logged."""
    production: bool = False
    """Whether failpoints are refused."""
    failpoints: str = ""
    """Faults that SIGUSR1 sets off in this process, for chaos tests, such as `engine.step=hang:20`: see
    `shared/failpoints.py`."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment before the values given to the constructor, which `load_settings` reads from the YAML file;
        OpenTelemetry's own variables last."""
        if isinstance(env_settings, EnvSettingsSource) and issubclass(settings_cls, ServiceSettings):
            env_settings.env_vars = _with_new_variables(settings_cls, env_settings.env_vars)
        if (traces := settings_cls.model_fields.get("traces")) is None or not isinstance(
            env_settings, EnvSettingsSource
        ):
            return env_settings, init_settings
        fields = frozenset(getattr(traces.annotation, "model_fields", {}))
        standard = standard_traces(env_settings.env_vars, fields)
        others = InitSettingsSource(settings_cls, init_kwargs={"traces": standard} if standard else {})
        return env_settings, init_settings, others


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Builds `cls` from `argv` (default: the process's), the environment and `--config FILE` (YAML).

    Raises ConfigError naming the setting, and as `check_variables`; `--help` prints all of them and exits with 0.
    """
    check_variables((cls,))
    arguments = list(sys.argv[1:] if argv is None else argv)
    from_file = _with_new_keys(cls, _read_yaml(_take_config_flag(arguments)))
    arguments = _with_new_flags(cls, arguments)
    try:
        return cls(_cli_parse_args=arguments, **from_file)  # type: ignore[call-arg]  # pydantic-settings' own parameter
    except ValidationError as error:
        raise setting_error(cls, error) from None  # without its cause, which quotes the value
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a day that no month has
        raise ConfigError(f"{path} is not valid YAML: {error}", field="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings", field="config")
    for key in content:
        if not isinstance(key, str) or key.startswith("_"):  # pydantic-settings' own parameters begin so
            raise ConfigError(f"setting {key}: there is none of that name", field=str(key))
    return content


def _with_new_flags(cls: type[ServiceSettings], arguments: list[str]) -> list[str]:
    """The arguments with the flags of renamed settings under their new names."""
    flags = {_flag(old): _flag(new) for old, new in cls.renamed.items()}
    result = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in flags:
            _warn(flag, flags[flag])
            flag = flags[flag]
        result.append(flag + equals + value)
    return result


def _with_new_variables(cls: type[ServiceSettings], variables: Mapping[str, str | None]) -> Mapping[str, str | None]:
    """The same for the environment, with names in lower case; if both names are set, the new one counts."""
    result = dict(variables)
    for old, new in cls.renamed.items():
        old_name, new_name = (f"{cls.model_config['env_prefix']}{name.replace('.', '__')}" for name in (old, new))
        if old_name.lower() in result:
            _warn(old_name.upper(), new_name.upper())
            result.setdefault(new_name.lower(), result.pop(old_name.lower()))
    return result


def _with_new_keys(cls: type[ServiceSettings], content: dict[str, Any]) -> dict[str, Any]:
    """A YAML file's mapping with the new names of renamed keys; a renamed key stays in its section."""
    for old, new in cls.renamed.items():
        part = content
        *parents, old_key = old.split(".")
        for parent in parents:
            inner = part.get(parent)
            part = inner if isinstance(inner, dict) else {}
        if old_key in part:
            _warn(f"{old} in the configuration file", new)
            part.setdefault(new.rpartition(".")[2], part.pop(old_key))
    return content


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _warn(old: str, new: str) -> None:
    logger.warning("%s was renamed: use %s. The old name works in this release only", old, new)
