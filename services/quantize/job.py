"""Reads a plain checkpoint and writes it in fewer bits, into a folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.quantize.calibration import layer_inputs
from services.quantize.checkpoint_writer import OnProgress, Task, copy_others, module_of, raw_names, write_weights
from services.quantize.compressed import KINDS, Scheme, quantization_config
from services.quantize.pairs import pairs_of
from services.quantize.rescaling import Model, Rescaling, activation_aware, rescale, smoothing
from shared.errors import ConfigError
from shared.kernels.linear_spec import LinearSpec
from shared.model.config.folder import CONFIG_FILE, GGUF_FILE
from shared.model.config.json_fields import read_json_object
from shared.model.config.model_config import ModelConfig
from shared.model.config.quantization import FIELD
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.plan import WeightPlan
from shared.model.weights.safetensors_files import STORED, SafetensorsFile, checkpoint_files
from shared.model.weights.sources import TIED_NAME, TIED_SOURCE

CALIBRATED: tuple[Scheme, ...] = ("int4", "w8a8", "w4a8")
"""Schemes that a text can make better."""
_WINDOW = 512
_MOST_WINDOWS = 8
_PATTERN = "re:"


@dataclass(frozen=True)
class Wish:
    """A quantization to be done."""

    scheme: Scheme
    keep: tuple[str, ...] = ()
    """Layers that stay as they are: names of modules, parts of such names between dots, or `re:` and a pattern."""
    group: int = 0
    """Columns that share a scale in int4 and w4a8; 0 = 128, or fewer where that does not divide a row."""
    text: Path | None = None
    """What to calibrate on; None: numbers are rounded to the nearest code."""


@dataclass(frozen=True)
class Written:
    """The result of a quantization."""

    read_bytes: int
    written_bytes: int
    num_rounded: int
    kept: tuple[str, ...]
    """Modules with a weight of two dimensions that stay as they are."""


def quantize(source: Path, out: Path, wish: Wish, on_progress: OnProgress) -> Written:
    """Writes `out` from the model folder `source`.

    Raises:
        ConfigError: `out` exists or cannot be written; a source that is quantized, a GGUF file, or one that is not
            rounded; a name to keep that no layer has; a text that cannot be read or is too short.
        ModelLoadError: the source cannot be served.
    """
    if os.path.exists(out):
        raise ConfigError(f"{out} exists already: name a folder that does not", field="out", value=str(out))
    config = load_config(source)
    files = checkpoint_files(source)
    _check_plain(source, files, config)
    with Checkpoint(files) as checkpoint:
        plan = WeightPlan.make(checkpoint, config, KINDS[wish.scheme])
        specs = _specs(plan, wish)
        rescalings = _rescalings(source, checkpoint, config, plan, specs, wish)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            made = Path(scratch) / out.name
            made.mkdir()
            written = _write(source, made, Task(wish.scheme, specs, rescalings), on_progress)
            made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}", field="out", value=str(out)) from error
    return written


def _check_plain(source: Path, files: Sequence[SafetensorsFile], config: ModelConfig) -> None:
    if config.quantization is not None:
        raise ConfigError(
            f"{source} is quantized already ({config.quantization.method}): take the checkpoint in 16 or 32 bits that "
            "it was made from",
            field="model",
            value=str(source),
        )
    if any(file.path.name == GGUF_FILE for file in files):
        raise ConfigError(
            f"{source} holds a GGUF file, which is not written in another form: take safetensors files in 16 or 32 "
            "bits",
            field="model",
            value=str(source),
        )


def _specs(plan: WeightPlan, wish: Wish) -> dict[str, LinearSpec]:
    """Forms of the weights that are rounded. The output projection stays as it is and int4 has no zeros: not all
    software reads other ones."""
    specs = {name: replace(spec, has_zeros=False) for name, spec in plan.specs.items() if name != TIED_NAME}
    if wish.group:
        for name, spec in specs.items():
            columns = plan.shapes[name][1]
            if spec.kind != "int4" or columns % wish.group:
                why = f"{name} has {columns} columns" if spec.kind == "int4" else "one scale a row is all that it has"
                raise ConfigError(
                    f"groups of {wish.group} do not fit {wish.scheme}: {why}", field="group", limit=columns
                )
            specs[name] = replace(spec, group=wish.group)
    for name in wish.keep:
        matched = [each for each in specs if _is_named(name, module_of(each))]
        if not matched:
            raise ConfigError(
                f"no layer that would be rounded is named {name}; layers are named as {module_of(next(iter(specs)))}",
                field="keep",
                value=name,
            )
    kept = {name for name in specs if any(_is_named(wanted, module_of(name)) for wanted in wish.keep)}
    found = {name: spec for name, spec in specs.items() if name not in kept}
    if not found:
        raise ConfigError("nothing would be rounded: every layer is kept", field="keep")
    return found


def _is_named(wanted: str, module: str) -> bool:
    if not wanted.startswith(_PATTERN):
        return f".{wanted}." in f".{module}."
    try:
        return re.match(wanted.removeprefix(_PATTERN), module) is not None
    except re.error as error:
        raise ConfigError(f"{wanted} is no regular expression: {error}", field="keep", value=wanted) from None


def _rescalings(
    source: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    plan: WeightPlan,
    specs: Mapping[str, LinearSpec],
    wish: Wish,
) -> dict[str, Rescaling]:
    if wish.text is None:
        return {}
    if wish.scheme not in CALIBRATED:
        raise ConfigError(
            f"a text does not change how {wish.scheme} is rounded; it does with {', '.join(CALIBRATED)}",
            field="calibrate",
            value=str(wish.text),
        )
    if config.delta is not None:
        raise ConfigError(
            f"a text does not calibrate {config.architecture}, whose layers have states: round it without one",
            field="calibrate",
            value=str(wish.text),
        )
    windows = _windows(Tokenizer.load(source), wish.text, min(_WINDOW, config.max_position_embeddings))
    entries = checkpoint.entries
    model = Model(
        weight=lambda name: checkpoint.whole(name).float(),
        has=lambda name: name in entries,
        specs=specs,
        norm_offset=config.norm_offset,
        norm_dtype=lambda name: getattr(torch, STORED[entries[name].dtype].torch_name),
    )
    is_int4 = KINDS[wish.scheme] == "int4"
    choose = activation_aware if is_int4 else smoothing
    found: dict[str, Rescaling] = {}
    with torch.inference_mode():
        for layer, inputs in enumerate(layer_inputs(checkpoint, config, plan, windows)):
            found |= rescale(model, pairs_of(config, layer), inputs, choose, cuts=is_int4)
    return found


def _windows(tokenizer: Tokenizer, path: Path, size: int) -> list[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}", field="calibrate", value=str(path)) from error
    ids = tokenizer.encode(text)[: size * _MOST_WINDOWS]
    if len(ids) < size:
        raise ConfigError(
            f"{path} has {len(ids)} tokens, too few to calibrate on: at least {size} are needed",
            field="calibrate",
            limit=size,
            value=len(ids),
        )
    return [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]


def _write(source: Path, made: Path, task: Task, on_progress: OnProgress) -> Written:
    files = checkpoint_files(source)
    written = write_weights(files, made, task, on_progress)
    copy_others(source, made)
    rounded: dict[str, LinearSpec] = {}
    kept: list[str] = []
    for file in files:
        for name, entry in zip(raw_names(file), file.entries, strict=True):
            if entry.name in task.specs:
                rounded[module_of(name)] = task.specs[entry.name]
            elif name.endswith(".weight") and len(entry.shape) == 2 and entry.name != TIED_SOURCE:
                kept.append(module_of(name))
    if "lm_head" not in kept:
        kept.append("lm_head")  # a tied one is named too: it must not be taken for a layer that is rounded
    fields = read_json_object(source / CONFIG_FILE)
    fields[FIELD] = quantization_config(task.scheme, rounded, kept)
    (made / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    read = sum(entry.num_bytes for file in files for entry in file.entries)
    return Written(read, written, len(rounded), tuple(kept))
