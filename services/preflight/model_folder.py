"""The model folder: can it be read, is it whole, does it fit."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.preflight.finding import Finding, fail, ok, warn
from shared.errors import ConfigError, InvalidRequest, ModelLoadError
from shared.kv.layout import BYTES_PER_ELEMENT, BlockLayout
from shared.model.adapters.target_modules import values_of_rank
from shared.model.config.folder import check_folder
from shared.model.config.model_config import ModelConfig
from shared.model.families.eagle3 import read_eagle
from shared.model.families.registry import load_config
from shared.sizes import size
from shared.sizing.adapter_memory import largest_class

if TYPE_CHECKING:
    from shared.model.weights.plan import Quantization, WeightPlan

CHECK = "model"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_KV_DTYPES = {**_DTYPES, "int8": "int8", "fp8": "float8_e4m3fn"}
_FIX = "see that the volume is mounted and complete; a download that was cut off has to be repeated"
_OTHER_HEAD = "take the head that was trained for this model, or speculation auto without a draft"
_LESS = "a larger device or memory limit, a dtype of 16 bits instead of fp32, or a smaller model"


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """The model that a worker would load; the fields are its settings."""

    model: Path
    device: str
    gpu_memory: float
    dtype: str
    quantization: Quantization
    kv_dtype: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    further_gpus: tuple[str, ...] = ()
    """GPUs of the other processes of a group."""
    num_hosts: int = 1
    """Hosts of the group: each holds an even part of the weights and of every block."""
    has_head: bool = False
    """Whether a head is loaded, whose KV is a layer more of every block."""
    head_folder: Path | None = None
    """Folder of a head that is not the checkpoint's."""
    adapter_slots: int = 0
    """Adapters that lie ready, 0 for none."""
    adapter_bytes: int = 0
    """Memory that is kept for them."""
    adapter_host_bytes: int = 0
    """Memory of the host that is kept for copies: on a CPU it is the engine's too."""


def check_weights(need: EngineNeed, memory_bytes: int | None) -> Finding:
    """`memory_bytes`: most memory for the engine; None = unknown, and the fit is not judged. Blocking: imports
    torch."""
    if problem := _unreadable(need.model):
        return problem
    try:
        config = _config(need)
        if need.has_head and need.head_folder is None and (missing := _no_head(need.model, config)):
            return fail(CHECK, f"speculation is heads, but {missing}", "take speculation auto")
        plan = _plan(need, config)
        num_of_head = _head_elements(need, config)
    except ModelLoadError as error:
        return fail(CHECK, error.message, _FIX)
    except ConfigError as error:
        of_head = error.details.get("field") == "draft"
        return fail(CHECK, error.message, _OTHER_HEAD if of_head else "leave quantization at auto")
    try:
        layout = _layout(need, config)
    except InvalidRequest as error:
        return fail(CHECK, error.message, "leave kv_dtype at auto")
    dtype = _dtype(need, config)
    num_elements = sum(math.prod(shape) for shape in plan.shapes.values()) + num_of_head
    weight_bytes = plan.weight_bytes(BYTES_PER_ELEMENT[dtype]) + num_of_head * BYTES_PER_ELEMENT[dtype]
    form = f"{plan.kinds} beside {dtype}" if plan.kinds else dtype
    own_weight_bytes, own_block_bytes = (-(-n // need.num_hosts) for n in (weight_bytes, layout.block_bytes))
    max_len = min(need.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    blocks = max(need.num_kv_blocks, 1)
    text = (
        f"{need.model}: {config.architecture}, {_count(num_elements)} parameters, {size(weight_bytes)} in {form}; "
        f"KV {size(layout.block_bytes / need.block_size)} a token"
    )
    if memory_bytes is None:
        return ok(CHECK, text)
    left = memory_bytes - own_weight_bytes
    rank = 0
    if need.adapter_slots:
        copies = need.adapter_host_bytes if need.device == "cpu" else 0
        left -= -(-(need.adapter_bytes + copies) // need.num_hosts)
        text += f"; {size(need.adapter_bytes + copies)} are kept for adapters"
        rank = _adapter_rank(need, config, dtype)
        text += f", {need.adapter_slots} of rank {rank}" if rank else f", less than {need.adapter_slots} of them take"
    text += f"; it may take {size(memory_bytes)}"
    if need.num_hosts > 1:
        text += f" for one of {need.num_hosts} hosts' parts"
    if left < blocks * own_block_bytes:
        others = "the weights, adapters" if need.adapter_slots else "the weights"
        return fail(CHECK, f"{text}, which {others} and {blocks} KV blocks do not fit into", _LESS)
    tokens = left // own_block_bytes * need.block_size
    if tokens < max_len:
        return warn(CHECK, f"{text}, which leaves room for sequences of {tokens} of {max_len} tokens", _LESS)
    text += f", room for {tokens} tokens"
    if need.adapter_slots and not rank:
        return warn(CHECK, text, "a larger adapter_bytes or fewer adapter_slots")
    return ok(CHECK, text)


def check_tokenizer(folder: Path, chat_template: str = "") -> Finding:
    """Checks what a router reads: files of the folder, and the template that it has in place of the folder's."""
    from shared.model.text.chat_template import ChatTemplate
    from shared.model.text.tokenizer import Tokenizer

    if problem := _unreadable(folder):
        return problem
    try:
        tokenizer = Tokenizer.load(folder)
        ChatTemplate.load(folder, tokenizer.special_tokens, chat_template)
    except ModelLoadError as error:
        return fail(CHECK, error.message, _FIX)
    return ok(CHECK, f"{folder}: tokenizer of {tokenizer.vocab_size} tokens and chat template")


def kv_bytes_per_token(need: EngineNeed) -> float:
    """Bytes of KV for one token of the model. Raises ModelLoadError, InvalidRequest."""
    return _layout(need, _config(need)).block_bytes / need.block_size


def _unreadable(folder: Path) -> Finding | None:
    if os.path.isfile(folder):
        try:
            check_folder(folder)
        except ModelLoadError as error:
            return fail(CHECK, error.message, _FIX)
    try:
        names = os.listdir(folder)
        for name in names:
            if (folder / name).is_file():
                with (folder / name).open("rb") as file:
                    file.read(1)
    except OSError as error:
        where = error.filename or folder
        return fail(CHECK, f"{where} cannot be read by user {os.getuid()}: {error.strerror}", _FIX)
    return None


def _plan(need: EngineNeed, config: ModelConfig) -> WeightPlan:
    """Plan of the tensors that the model needs. Raises ModelLoadError where one is missing, ConfigError."""
    from shared.model.weights.checkpoint import Checkpoint
    from shared.model.weights.plan import WeightPlan

    with Checkpoint.of(need.model) as checkpoint:
        is_own = need.has_head and need.head_folder is None
        return WeightPlan.make(checkpoint, config, need.quantization, has_head=is_own, device=need.device)


def _head_elements(need: EngineNeed, config: ModelConfig) -> int:
    """Elements of a head that has a folder of its own; 0 without one. Raises ModelLoadError for one whose tensors do
    not fit."""
    from shared.model.weights.head_checkpoint import head_elements

    return 0 if need.head_folder is None else head_elements(need.head_folder, config)


def _config(need: EngineNeed) -> ModelConfig:
    """Configuration of the model, with the head of another folder where there is one. Raises ModelLoadError,
    ConfigError."""
    config = load_config(need.model)
    return config if need.head_folder is None else replace(config, head=read_eagle(need.head_folder, config))


def _no_head(folder: Path, config: ModelConfig) -> str:
    from shared.model.weights.head_checkpoint import missing_head

    return missing_head(folder, config)


def _layout(need: EngineNeed, config: ModelConfig) -> BlockLayout:
    kv_dtype = _dtype(need, config) if need.kv_dtype == "auto" else _KV_DTYPES[need.kv_dtype]
    return config.block_layout(need.block_size, kv_dtype, has_head=need.has_head)


def _adapter_rank(need: EngineNeed, config: ModelConfig, dtype: str) -> int:
    """The largest class of rank of which all slots can be filled."""
    least = 16 if need.device == "cpu" else 8  # the CPU's kernels take whole vectors of ranks
    return largest_class(
        values_of_rank(config), need.adapter_slots, need.adapter_bytes, BYTES_PER_ELEMENT[dtype], least
    )


def _dtype(need: EngineNeed, config: ModelConfig) -> str:
    """Torch's name of the largest that `auto` may choose: on a CPU a timing decides between fp32 and bf16."""
    if need.dtype != "auto":
        return _DTYPES[need.dtype]
    return config.dtype if need.device != "cpu" else "float32"


def _count(number: int) -> str:
    """`8.0 billion`."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)
