"""Quantized checkpoints as other tools and releases spell them are the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from tests.integration.engine.families import write_family
from tests.quantized_checkpoints import STORAGES, Change, Packed, Storage, changed_copy, gptq, write_quantized
from tests.unit.model.paged_run import prompt_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16, "num_layers": 1}


def of_group(**fields: Any) -> Change:
    def change(_: object, config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["weights"].update(fields)

    return change


def as_blocks_of_compressed_tensors(_: object, config: dict[str, Any]) -> None:
    config.clear()
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": "32x32"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config |= {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def in_bf16(tensors: dict[str, Tensor], _: object) -> None:
    for name in [name for name in tensors if f"{name}.absmax" in tensors]:
        tensors[name] = tensors[name].flatten().view(torch.bfloat16).view(-1, 1)


def by_projections(tensors: dict[str, Tensor], _: object) -> None:
    published = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for name in list(tensors):
        for own, other in published.items():
            if own in name:
                tensors[name.replace(own, other)] = tensors.pop(name)


def as_modelopt(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """FP8 as Model Optimizer stores it, with the factors that it measured of inputs and cache."""
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name].view(())
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)
    config.clear()
    config |= {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.embed_tokens", "*.gate*"]}


def by_layers_of_modelopt(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    as_modelopt(tensors, config)
    layers = {name.removesuffix("_scale").removesuffix(".weight") for name in tensors if name.endswith("weight_scale")}
    config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": {name: {"quant_algo": "FP8"} for name in layers}}


def as_fbgemm(_: object, config: dict[str, Any]) -> None:
    config.clear()
    config |= {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


def as_quark(dtype: str, scheme: str, **more: Any) -> Change:
    """As AMD's Quark stores weights, with factors of inputs and of the cache."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            if scheme == "per_tensor":
                tensors[name] = tensors[name].view(())
            tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.5)
            tensors[name.replace("weight_scale", "output_scale")] = torch.tensor(0.5)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            tensors[name.removesuffix("_packed")] = tensors.pop(name)
        weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": None, "group_size": None}
        of_all = {"weight": {**weight, **more}, "input_tensors": {"dtype": dtype}, "output_tensors": None, "bias": None}
        config.clear()
        config |= {
            "quant_method": "quark", "global_quant_config": of_all, "layer_quant_config": {},
            "layer_type_quant_config": {}, "exclude": ["lm_head", "*.gate"],
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
        }  # fmt: skip

    return change


def by_layers_of_quark(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    as_quark("fp8_e4m3", "per_channel")(tensors, config)
    of_all = config["global_quant_config"]
    config["layer_quant_config"] = {"*self_attn*": of_all, "model.layers.0.mlp.down_proj": of_all, "*up_proj": of_all}
    config["layer_quant_config"]["*gate_proj"] = of_all
    config["global_quant_config"] = {"weight": {"dtype": "int8", "qscheme": "per_tensor"}}


def as_auto_round(packing: str, **more: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]
        bits = config["bits"]
        config.clear()
        config |= {
            "quant_method": "auto-round",
            "packing_format": packing,
            "bits": bits,
            "group_size": 32,
            "sym": False,
        }
        config |= {"data_type": "int", "block_name_to_quantize": "model.layers", **more}

    return change


SPELLINGS: dict[str, tuple[str, Change, str]] = {
    "order by its other name": ("int4 ordered", of_group(actorder="dynamic"), "LlamaForCausalLM"),
    "order as true": ("int4 ordered", of_group(actorder=True), "LlamaForCausalLM"),
    "columns in their order": ("int4 groups", of_group(actorder="static"), "LlamaForCausalLM"),
    "blocks as text": ("small fp8 blocks", as_blocks_of_compressed_tensors, "LlamaForCausalLM"),
    "version as format": (
        "gptq_v2 int8", lambda _, c: c.update(format=c.pop("checkpoint_format")), "LlamaForCausalLM",
    ),
    "4 bits in bf16": ("nf4", in_bf16, "LlamaForCausalLM"),
    "Model Optimizer": ("fp8 tensor", as_modelopt, "LlamaForCausalLM"),
    "Model Optimizer by layers": ("fp8 tensor", by_layers_of_modelopt, "LlamaForCausalLM"),
    "FBGEMM": ("fp8 rows", as_fbgemm, "LlamaForCausalLM"),
    "Quark": ("fp8 tensor", as_quark("fp8_e4m3", "per_tensor"), "LlamaForCausalLM"),
    "Quark by rows": ("fp8 rows", as_quark("fp8_e4m3", "per_channel", ch_axis=0), "mixtral"),
    "Quark by blocks": (
        "small fp8 blocks", as_quark("fp8_e4m3", "per_block", block_size=[32, 32]), "LlamaForCausalLM",
    ),
    "Quark in int8": ("w8a8", as_quark("int8", "per_channel"), "LlamaForCausalLM"),
    "Quark in MXFP4": (
        "mxfp4 linear", as_quark("fp4", "per_group", group_size=32, scale_format="e8m0"), "LlamaForCausalLM",
    ),
    "Quark by layers": ("fp8 rows", by_layers_of_quark, "LlamaForCausalLM"),
    "AutoRound as GPTQ": ("gptq", as_auto_round("auto_round:auto_gptq"), "LlamaForCausalLM"),
    "AutoRound": ("gptq_v2 int8", as_auto_round("auto_round"), "LlamaForCausalLM"),
    "AutoRound as AWQ": ("awq", as_auto_round("auto_round:auto_awq"), "LlamaForCausalLM"),
    "AutoRound by layers": (
        "gptq_v2 int8",
        as_auto_round("auto_round", bits=4, extra_config={
            "model.layers.0.mlp.down_proj": {"bits": 8}, ".*self_attn.*": {"bits": 8},
            r".*\.(gate|up)_proj": {"bits": 8}, "lm_head": {"bits": 16},
        }),
        "LlamaForCausalLM",
    ),
    "Mixtral by projections": ("int4 groups", by_projections, "mixtral"),
}  # fmt: skip
"""Name → (storage, what is spelled otherwise, family)."""


def logits(folder: Path) -> Tensor:
    return prompt_logits(Decoder.load(folder, torch.float32, "cpu"), PROMPT, 4)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_spelling_is_the_same_model(tmp_path, spelling):
    storage, change, family = SPELLINGS[spelling]
    write_family(tmp_path / "source", family, **SIZES)
    write_quantized(tmp_path / "source", STORAGES[storage], tmp_path / "model", tmp_path / "opened")
    assert logits(changed_copy(tmp_path / "model", tmp_path / "other", change)).equal(logits(tmp_path / "model"))


def test_layers_that_gptqmodel_stored_otherwise_are_read_by_their_patterns(tmp_path):
    bits4, bits8 = gptq(4, "gptq"), gptq(8, "gptq", group=48, ordered=True)

    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        return (bits8 if weight.shape[1] == SIZES["intermediate_size"] else bits4).pack(weight, generator)

    of_down = {"bits": 8, "group_size": 48, "desc_act": True}
    exceptions = {r"-:.*\.layers\.7\..*": {}, r"+:.*\.down_proj.*": of_down, r".*\.down.*": {"bits": 4}}
    write_random_checkpoint(tmp_path / "source", **SIZES)
    storage = Storage({**bits4.config, "dynamic": exceptions}, pack)
    write_quantized(tmp_path / "source", storage, tmp_path / "model", tmp_path / "opened")
    ours, expected = logits(tmp_path / "model"), logits(tmp_path / "opened")
    assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()


def quark_of(**weight: object) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


@pytest.mark.parametrize(
    ("storage", "change", "field"),
    [
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, "dynamic"),
        ("gptq", {"dynamic": {"lm_head": {"bits": 3}}}, "dynamic.lm_head.bits"),
        ("awq", {"version": None, "format": "gemv"}, "format"),
        ("gptq", {"checkpoint_format": None, "format": "marlin"}, "format"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ("gptq", {"quant_method": "auto-round", "bits": 2}, "bits"),
        ("gptq", {"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type"),
        ("gptq", {"quant_method": "auto-round", "extra_config": {"(": {"bits": 8}}}, "extra_config"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ("fp8 rows", {"quant_method": "quark"}, "global_quant_config"),
        ("fp8 rows", quark_of(dtype="uint4", qscheme="per_group"), "global_quant_config.weight.dtype"),
        (
            "fp8 rows",
            quark_of(dtype="fp4", qscheme="per_group", group_size=16),
            "global_quant_config.weight.group_size",
        ),
        (
            "fp8 rows",
            quark_of(dtype="int8", qscheme="per_tensor", symmetric=False),
            "global_quant_config.weight.symmetric",
        ),
        (
            "fp8 rows",
            {**quark_of(dtype="int8", qscheme="per_tensor"), "layer_type_quant_config": {"nn.Linear": {}}},
            "layer_type_quant_config",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_its_own_field(tmp_path, storage, change, field):
    write_random_checkpoint(tmp_path / "source", **SIZES)
    write_quantized(tmp_path / "source", STORAGES[storage], tmp_path / "model", tmp_path / "opened")
    folder = changed_copy(tmp_path / "model", tmp_path / "other", lambda _, config: config.update(change))
    with pytest.raises(ModelLoadError) as caught:
        load_config(folder)
    assert str(caught.value.field).endswith(f".{field}")


@pytest.mark.parametrize("apart", [False, True])
def test_floats_of_4_bits_of_model_optimizer_are_multiplied_by_the_scale_of_the_whole(tmp_path, apart):
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix("_packed")
            tensors[module] = tensors.pop(name)
            tensors[f"{module}_scale_2"] = 1 / tensors.pop(f"{module}_global_scale").view(())
        config.clear()
        config |= {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}

    write_random_checkpoint(tmp_path / "source", **SIZES)
    write_quantized(tmp_path / "source", STORAGES["nvfp4"], tmp_path / "model", tmp_path / "opened")
    other = changed_copy(tmp_path / "model", tmp_path / "other", change)
    if apart:  # as earlier releases say it
        fields = json.loads((other / "config.json").read_text())
        own = fields.pop("quantization_config")
        own["exclude_modules"] = own.pop("ignore")
        del own["quant_method"]
        (other / "config.json").write_text(json.dumps(fields))
        (other / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": own}))
    expected = logits(tmp_path / "opened")
    assert (logits(other) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_scales_of_the_cache_alone_leave_a_plain_model(tmp_path):
    write_random_checkpoint(tmp_path / "source", **SIZES)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    plain = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": {}}
    names = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_zero_point", "k_zero_point")
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(2, 1, 1) for name in names}
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "quantization_config": plain}))
    save_file({**tensors, **scales}, tmp_path / "model" / "model.safetensors")
    assert logits(tmp_path / "model").equal(logits(tmp_path / "source"))
