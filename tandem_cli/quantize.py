"""`tandem quantize`: write a plain checkpoint in fewer bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from services.local.hub import fetch, hub_model
from shared.errors import ConfigError


def quantize(
    model: Annotated[str, typer.Argument(help="Model folder in 16 or 32 bits, or ORG/NAME at the Hugging Face Hub.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="int8 or fp8 (a scale a row), int4 (groups of columns), w8a8, w4a8 (activations in int8 too, a scale "
            "a token).",
        ),
    ] = "int4",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="Text file by which int4 and w4a8 are rounded activation-aware (AWQ), w8a8 smoothed (SmoothQuant); "
            "default: to the nearest code.",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            help="Layer to leave as it is: its name, a part of that (down_proj, layers.0) or re:PATTERN; repeatable.",
        ),
    ] = None,
    group: Annotated[
        int,
        typer.Option("--group", min=0, help="Columns of int4, w4a8 that share a scale; default: 128, or fewer."),
    ] = 0,
) -> None:
    """Write a plain checkpoint in fewer bits, in the format of compressed-tensors.

    Weights are read and written a few MiB at a time; with --calibrate one layer is in memory. The output projection
    stays as it is. OUT is there whole, with tokenizer and all other files, or not at all.
    """
    # Imported here: torch takes a while, which the other commands need not wait for.
    from services.quantize.compressed import KINDS
    from services.quantize.job import Wish
    from services.quantize.job import quantize as write

    scheme = next((known for known in KINDS if known == to), None)
    if scheme is None:
        raise ConfigError(f"--to: {to!r} is not one of {', '.join(KINDS)}", field="to", value=to)
    at_hub = hub_model(model)
    source = Path(model) if at_hub is None else fetch(at_hub)
    console = Console(stderr=True, highlight=False)
    begin = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("quantizing", total=None)
        wish = Wish(scheme, tuple(keep or ()), group, calibrate)
        written = write(source, out, wish, lambda done, total: progress.update(task, completed=done, total=total))
    print(
        f"{out}: {written.read_bytes / 1e9:.3g} GB became {written.written_bytes / 1e9:.3g} GB in "
        f"{time.monotonic() - begin:.0f} s; {written.num_rounded} projections in {to}, {len(written.kept)} layers kept"
    )
