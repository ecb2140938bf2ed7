"""Which family serves an architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shared.model.config.folder import CONFIG_FILE, check_model_folder
from shared.model.config.head_names import numbered_names
from shared.model.config.json_fields import JsonFields, read_json_object
from shared.model.config.model_config import HeadConfig, ModelConfig
from shared.model.config.quantization import FIELD, STACKED, STACKED_METHOD
from shared.model.config.quantization_methods import parse_quantization
from shared.model.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    kimi_linear,
    llama,
    llama4,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    smollm,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """An architecture that is served."""

    model_type: str
    describe: Callable[[JsonFields], ModelConfig]


FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama.llama),
    "Llama4ForCausalLM": Family("llama4_text", llama4.llama4),
    "MistralForCausalLM": Family("mistral", mistral.mistral),
    "Qwen2ForCausalLM": Family("qwen2", qwen.qwen2),
    "Qwen3ForCausalLM": Family("qwen3", qwen.qwen3),
    "Ministral3ForCausalLM": Family("ministral3", mistral.ministral3),
    "MixtralForCausalLM": Family("mixtral", mistral.mixtral),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qwen.qwen3_moe),
    "Qwen3NextForCausalLM": Family("qwen3_next", qwen_hybrid.qwen3_next),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", qwen_hybrid.qwen3_5),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", qwen_hybrid.qwen3_5_moe),
    "Cohere2ForCausalLM": Family("cohere2", cohere.cohere2),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", deepseek.deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", deepseek.deepseek_v3),
    "Gemma2ForCausalLM": Family("gemma2", gemma.gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.gemma3),
    "Glm4ForCausalLM": Family("glm4", glm.glm4),
    "Glm4MoeForCausalLM": Family("glm4_moe", glm.glm4_moe),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss.gpt_oss),
    "KimiLinearForCausalLM": Family("kimi_linear", kimi_linear.kimi_linear),
    "GraniteForCausalLM": Family("granite", llama.granite),
    "MinistralForCausalLM": Family("ministral", mistral.ministral),
    "Olmo2ForCausalLM": Family("olmo2", olmo.olmo2),
    "Olmo3ForCausalLM": Family("olmo3", olmo.olmo3),
    "Phi3ForCausalLM": Family("phi3", phi.phi3),
    "SmolLM3ForCausalLM": Family("smollm3", smollm.smollm3),
}
"""Readers of configurations by architecture."""

WITH_IMAGES = (
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Architectures whose text part, of one of the families, is served."""

ARCHITECTURES = (*FAMILIES, *WITH_IMAGES)
"""Names of all architectures that are served."""

_GENERATION_FILE = "generation_config.json"
_MODELOPT_FILE = "hf_quant_config.json"
"""Where Model Optimizer says how weights are stored; its earlier releases say it nowhere else."""
_OF_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
"""Fields that may stand beside `text_config`, and count where it has none of that name."""
_FIRST_OF_WHOLE = ("tie_word_embeddings",)
"""Likewise, and count also where it has one: transformers 5 writes a text part's default beside what it has saved."""


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, if present, `generation_config.json`.

    Raises:
        ModelLoadError: `check_model_folder`'s, or content that `parse_config` refuses.
    """
    check_model_folder(folder)
    config = read_json_object(folder / CONFIG_FILE)
    if FIELD not in config and (folder / _MODELOPT_FILE).is_file():
        config |= _by_modelopt(folder / _MODELOPT_FILE)
    generation_file = folder / _GENERATION_FILE
    return parse_config(config, read_json_object(generation_file) if generation_file.is_file() else {})


def _by_modelopt(file: Path) -> dict[str, object]:
    stored = JsonFields(read_json_object(file), file.name).child("quantization")
    if stored is None:
        return {}
    return {FIELD: {"quant_method": "modelopt", **{name: stored.raw(name) for name in stored.names}}}


def parse_config(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Read the content of `config.json` and of `generation_config.json`.

    Raises:
        ModelLoadError: an architecture, quantization or activation that is not served, or a missing or wrong field;
            `field` names it.
    """
    model = _describe(JsonFields(config, CONFIG_FILE))
    ends = JsonFields(generation or {}, _GENERATION_FILE).token_ids("eos_token_id")
    return replace(model, eos_token_ids=tuple(dict.fromkeys((*ends, *model.eos_token_ids))))


def _describe(fields: JsonFields) -> ModelConfig:
    architecture = _architecture(fields)
    if architecture in WITH_IMAGES:
        text = fields.child("text_config")
        if text is None:
            raise fields.fault("text_config", "is missing")
        fields = text.with_defaults(fields, _OF_WHOLE).replaced_by(fields, _FIRST_OF_WHOLE)
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        model_type = fields.text("model_type")
        if model_type not in by_type:
            raise fields.fault("model_type", f"{model_type!r} is not supported; supported: {', '.join(by_type)}")
        _log.warning("%s: its text part is served, images are not", architecture)
        architecture = by_type[model_type]
    model = FAMILIES[architecture].describe(fields)
    model = _with_head(model, fields)
    quantization = parse_quantization(fields)
    is_stacked_method = quantization is not None and quantization.method == STACKED_METHOD
    if quantization is not None and model.has_stacked_experts and not is_stacked_method:
        raise fields.fault(FIELD, f"{quantization.method} is not supported for {architecture}: {STACKED}")
    if is_stacked_method and not model.has_stacked_experts:
        raise fields.fault(FIELD, f"{STACKED_METHOD} is not supported for {architecture}: its experts are not stacked")
    return replace(model, quantization=quantization)


def _with_head(model: ModelConfig, fields: JsonFields) -> ModelConfig:
    """With the layer of `num_nextn_predict_layers` that guesses. It is as the last layer, with experts where there are
    any, and only where every layer keeps the whole text's KV, from which a wrong guess is taken back."""
    count = fields.integer("num_nextn_predict_layers", default=model.num_unused_layers, minimum=0)
    last = model.layers[-1]
    is_plain = all(layer.window is None and not layer.has_state and layer.temperature is None for layer in model.layers)
    if not count or not is_plain or model.prefix_length:
        return model
    head = HeadConfig(replace(last, has_experts=model.moe is not None), numbered_names(model.num_layers))
    return replace(model, num_unused_layers=count, head=head)


def _architecture(fields: JsonFields) -> str:
    architectures = fields.optional_text_list("architectures") or []
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return architecture
    found = ", ".join(architectures) or "none"
    raise fields.fault("architectures", f"{found} is not supported; supported: {', '.join(ARCHITECTURES)}")
