"""`tandem serve`, also known as `tandem up`: a whole cluster on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.local.cluster_file import OF_A_MODEL, ClusterFile
from services.local.hub import fetch, hub_model
from services.local.model_pools import ModelPools, PoolOptions
from services.local.spec import DEMO_MODEL, ClusterOptions, ClusterSpec
from shared.errors import ConfigError
from shared.settings.named_folders import named_entries
from tandem_cli.foreground import Foreground


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The file's options become the command's defaults."""
    if path is not None:
        known = {str(parameter.name) for parameter in context.command.params} - {"config"}
        content = ClusterFile.read(path, known)
        context.default_map = {**(context.default_map or {}), **content.options}
        context.obj = content.models
    return path


def up(
    context: typer.Context,
    model_argument: Annotated[str, typer.Argument(metavar="[MODEL]", help="As --model.", show_default=False)] = "",
    config: Annotated[  # noqa: ARG001 - its callback reads it
        Path | None,
        typer.Option(
            help="YAML file with these options, and with `models` where there are several.",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder, or ORG/NAME[@REVISION] at the Hugging Face Hub; empty = the demo model.")
    ] = "",
    *,
    options: ClusterOptions,
    example: Annotated[bool, typer.Option(help="Stream one example answer at the start.")] = True,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it. `tandem up` is the same."""
    if model_argument and _is_given(context, "model"):
        raise ConfigError(f"the model is given twice: {model_argument!r} and --model {model!r}", field="model")
    models = [
        entry.model_copy(update=_found_adapters(entry)).pools(find_model, is_first=not number, mode=options.mode)
        for number, entry in enumerate(context.obj or ())
    ]
    if not models:
        spec = _with_model(options, model_argument or model)
    elif model_argument:
        raise ConfigError("a model is given, and the file of --config names its models", field="model")
    elif given := [name for name in sorted(OF_A_MODEL) if _is_given(context, name)]:
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is for one model, and the file of --config names its models", field=given[0])
    else:
        spec = _with_models(options, *models)
    raise typer.Exit(asyncio.run(Foreground(spec, Console(highlight=False), example=example).run()))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_model(options: ClusterOptions, model: str) -> ClusterSpec:
    folder, name = find_model(model)
    found = {"model": folder, "served_model_name": options.served_model_name or name, **_found_adapters(options)}
    return ClusterSpec(**options.values_for(ClusterSpec) | found)


def _with_models(options: ClusterOptions, first: ModelPools, *further: ModelPools) -> ClusterSpec:
    """The first model is the spec's own."""
    values = {n: v for n, v in options.values_for(ClusterSpec).items() if n not in PoolOptions.model_fields}
    own = {**first.values_for(ClusterSpec), "served_model_name": first.name}
    return ClusterSpec(**{**values, **own, "further": further})


def _found_adapters(options: PoolOptions) -> dict[str, str]:
    return {"adapters": find_adapters(options.adapters)} if options.adapters else {}


def find_adapters(adapters: str) -> str:
    """The same names with folders here: those at the Hub are fetched. Raises ModelLoadError, ConfigError."""
    found = []
    for name, entry in named_entries(adapters).items():
        at_hub = hub_model(entry, "adapters")
        folder = entry if at_hub is None else str(fetch(at_hub, "adapters"))
        if len(folder.replace(",", " ").split()) > 1:
            raise ConfigError(f"adapters: {folder} has a space or a comma in its name", field="adapters", value=folder)
        found.append(f"{name}={folder}")
    return " ".join(found)


def find_model(model: str) -> tuple[Path, str]:
    """(folder, what clients call it: empty = the folder's name), fetched where it is at the Hub, and made where it is a
    GGUF file. Raises ModelLoadError, ConfigError."""
    if not model:
        return DEMO_MODEL, ""
    path = Path(model)
    if path.suffix == ".gguf" and os.path.isfile(path):
        from shared.model.gguf.folder import gguf_folder  # imported here: torch takes a while

        return gguf_folder(path, Path.home() / ".cache" / "tandem" / "gguf"), path.stem
    at_hub = hub_model(model)
    return (Path(model), "") if at_hub is None else (fetch(at_hub), at_hub.repo)
