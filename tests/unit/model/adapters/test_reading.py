"""Adapter folders: what is read, how it is named, and what is refused, by name and reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadError
from shared.model.adapters.adapter import read_adapter
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.config.model_config import ModelConfig
from shared.model.families.registry import parse_config

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
CONFIG = parse_config(FIELDS)
DEEPSEEK: dict[str, Any] = {
    **FIELDS,
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
GPT_OSS: dict[str, Any] = {
    **FIELDS,
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
QKV = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def rewrite(folder: Path, tensors: Callable[[dict[str, torch.Tensor]], None] = lambda _: None, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    found = load_file(folder / "adapter_model.safetensors")
    tensors(found)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "adapter_model.safetensors")


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return apply


def test_parts_of_fused_projections_lie_behind_each_other_with_scale_and_rank(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG, rank=4, rank_pattern={"v_proj": 9}, alpha_pattern={"v_proj": 3})
    adapter = read_adapter(tmp_path, CONFIG)
    assert adapter.rank == 9
    found = {name: [(p.begin, *p.b.shape, p.scale) for p in parts] for name, parts in adapter.layers[1].items()}
    assert found == {
        "qkv": [(0, 48, 4, 2.0), (48, 16, 4, 2.0), (64, 16, 9, pytest.approx(1 / 3))],
        "o": [(0, 48, 4, 2.0)],
        "gate_up": [(0, 40, 4, 2.0), (40, 40, 4, 2.0)],
        "down": [(0, 48, 4, 2.0)],
    }


def test_the_identity_follows_every_tensor_and_the_configuration_and_no_name_or_path(tmp_path: Path) -> None:
    def digest(name: str, **given: Any) -> str:
        return read_adapter(write_random_adapter(tmp_path / name, CONFIG, **given), CONFIG).digest

    first = digest("a")
    assert digest("another name") == first
    others = [
        digest("seed", seed=1),
        digest("rank", rank=8),
        digest("alpha", lora_alpha=31),
        digest("rs", use_rslora=True),
    ]
    write_random_adapter(tmp_path / "one", CONFIG)

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QKV][0, 0] += 1e-3

    rewrite(tmp_path / "one", flip)
    others.append(read_adapter(tmp_path / "one", CONFIG).digest)
    half = read_adapter(write_random_adapter(tmp_path / "half", CONFIG, dtype=torch.bfloat16), CONFIG)
    assert len({first, half.digest, *others}) == 7
    assert len(first) == 32


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["gate.weight"]}, "target_parameters names gate.weight"),
        ({"target_parameters": "gate_up_proj"}, "target_parameters must be a list"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 257}, "256"),
        ({"r": "16"}, "r must be an integer"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 1e7}, "lora_alpha must be at most 1000000"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"(q+)+": 3}}, r"rank_pattern\.\(q\+\)\+ is no end of modules' names"),
        ({"rank_pattern": {".*.*.*q": 3}}, "is no end of modules' names"),
        ({"rank_pattern": {f".*{number}": 3 for number in range(17)}}, "more than 16 patterns in which"),
        ({"alpha_pattern": {str(number): 3 for number in range(4097)}}, "alpha_pattern has 4097 patterns"),
        ({"alpha_pattern": {"(q_proj": 3}}, "is no end of modules' names"),
        ({"alpha_pattern": {"q" * 300: 3}}, "is no end of modules' names"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"use_something_new": True}, "use_something_new is set: this way to compute is not known"),
        ({"rank_pattern": {"q_proj": 257}}, r"rank_pattern\.q_proj must be at most 256"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\.q_proj is missing"),
        ({"alpha_pattern": 3}, "alpha_pattern must be an object"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"r": 5}, "shape"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    write_random_adapter(tmp_path, CONFIG)
    rewrite(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=named):
        read_adapter(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("pattern", "scales"),
    [
        ({"v_proj": 3}, {"0.q": 2, "0.v": 3 / 4, "1.v": 3 / 4}),
        ({"layers.1.self_attn.v_proj": 3}, {"0.v": 2, "1.v": 3 / 4}),
        ({"^model.layers.1.self_attn.v_proj": 3}, {"0.v": 2, "1.v": 3 / 4}),
        ({"^v_proj": 3, "proj": 5, "v": 7}, {"0.v": 2, "1.v": 2}),  # no whole name, no part between dots
        ({r".*\.v_proj": 3}, {"0.q": 2, "1.v": 3 / 4}),
        ({r"layers\.[01]\.self_attn\.(q|v)_proj": 3}, {"0.q": 3 / 4, "1.v": 3 / 4}),
        ({r"layers\.\d+\..*_proj$": 3}, {"0.q": 3 / 4, "1.v": 3 / 4}),
        ({"v_proj": 3, "layers.1.self_attn.v_proj": 5}, {"1.v": 3 / 4}),  # the first counts
        ({"layers.1.self_attn.v_proj": 5, "v_proj": 3}, {"0.v": 3 / 4, "1.v": 5 / 4}),
        ({"model.language_model.layers.1.self_attn.v_proj": 3}, {"0.v": 2, "1.v": 3 / 4}),
    ],
)
def test_patterns_name_modules_as_peft_has_them(
    tmp_path: Path, pattern: dict[str, int], scales: dict[str, float]
) -> None:
    write_random_adapter(tmp_path, CONFIG, rank=4, targets=["q_proj", "v_proj"])
    rewrite(tmp_path, alpha_pattern=pattern)
    layers = read_adapter(tmp_path, CONFIG).layers
    found = {name: layers[int(name[0])]["qkv"]["qv".index(name[2])].scale for name in scales}
    assert found == pytest.approx(scales)


def test_the_order_of_patterns_is_a_part_of_the_identity(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG, rank=4)
    digests = set()
    for order in (("v_proj", "layers.1.self_attn.v_proj"), ("layers.1.self_attn.v_proj", "v_proj")):
        rewrite(tmp_path, alpha_pattern={key: len(key) for key in order})
        digests.add(read_adapter(tmp_path, CONFIG).digest)
    assert len(digests) == 2


def test_names_of_a_model_with_images_are_those_of_its_language_model(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG, targets=["q_proj"])
    plain = read_adapter(tmp_path, CONFIG).layers[1]["qkv"][0]
    names = [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    rewrite(tmp_path, rename("model.layers.", "model.language_model.layers."), target_modules=names)
    assert torch.equal(read_adapter(tmp_path, CONFIG).layers[1]["qkv"][0].a, plain.a)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rename("layers.1.", "layers.7."), "layers.7.*does not have"),
        (rename("lora_A.weight", "lora_A.other"), "no half"),
        (rename("q_proj.lora_B", "z_proj.lora_B"), "z_proj"),
        (rename("self_attn.q_proj", "embed_tokens"), "embed_tokens"),
        (lambda tensors: tensors.pop(QKV), "missing"),
        (lambda tensors: tensors.update({QKV: torch.zeros(16, 47)}), r"\[16, 47\].*\[16, 48\]"),
        (lambda tensors: tensors.update({QKV: torch.zeros(16, 48, dtype=torch.int32)}), "I32"),
        (lambda tensors: tensors[QKV].fill_(float("nan")), "NaN"),
        (lambda tensors: tensors.clear(), "no tensors"),
        (lambda tensors: tensors.update({QKV.removeprefix("base_model.model."): torch.zeros(16, 48)}), "twice"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(97, 48)}), "lm_head"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any, named: str) -> None:
    write_random_adapter(tmp_path, CONFIG)
    rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError, match=named):
        read_adapter(tmp_path, CONFIG)


MIXTRAL = parse_config(
    {**FIELDS, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 1}
)


def test_parts_of_experts_lie_by_layer_and_expert(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, MIXTRAL, rank=4, targets=["w1", "w2", "w3"], rank_pattern={"w3": 7})
    rewrite(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0" in name and ".1." in name]
    )
    adapter = read_adapter(tmp_path, MIXTRAL)
    assert {layer: list(experts) for layer, experts in adapter.experts.items()} == {0: [0, 2], 1: [0, 1, 2]}
    found = adapter.experts[1][2]
    assert [(p.begin, *p.b.shape, p.a.shape[1]) for p in found.gate_up] == [(0, 40, 4, 48), (40, 40, 7, 48)]
    assert [(p.begin, *p.b.shape, p.a.shape[1]) for p in found.down] == [(0, 48, 4, 40)]
    assert not any(adapter.layers)
    assert adapter.nbytes == 4 * (5 * (4 * 88 + 7 * 88 + 4 * 88))


STACK = "base_model.model.model.layers.1.mlp.experts"


def write_stacks(folder: Path, rank: int = 2, **fields: Any) -> Path:
    """Pairs of all experts of MIXTRAL's second layer, as PEFT saves them for the parameters of transformers 5."""
    write_random_adapter(folder, MIXTRAL, targets=["q_proj"], target_parameters=["gate_up_proj", "down_proj"], **fields)
    draw = torch.Generator().manual_seed(3)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name, in_size, outputs in ((f"{STACK}.base_layer", 48, 80), (STACK, 40, 48)):
            tensors[f"{name}.lora_A.weight"] = torch.randn(3 * rank, in_size, generator=draw)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, 3 * rank, generator=draw)

    rewrite(folder, add)
    return folder


def twice(tensors: dict[str, torch.Tensor]) -> None:
    for end in ("lora_A", "lora_B"):
        tensors[f"{STACK}.base_layer.base_layer.{end}.weight"] = tensors[f"{STACK}.{end}.weight"].clone()


def test_a_pair_of_all_experts_of_a_layer_is_one_for_each_projection_of_each(tmp_path: Path) -> None:
    write_stacks(tmp_path, rank_pattern={r".*\.experts\..*": 2}, alpha_pattern={"gate_up_proj": 6, "down_proj": 10})
    adapter = read_adapter(tmp_path, MIXTRAL)
    assert adapter.rank == 16
    assert list(adapter.experts) == [1]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for expert, parts in adapter.experts[1].items():
        assert [(part.begin, part.scale) for part in (*parts.gate_up, *parts.down)] == [(0, 3), (40, 3), (0, 5)]
        found = [torch.cat([part.b @ part.a for part in each]) for each in (parts.gate_up, parts.down)]
        for own, name in zip(found, (f"{STACK}.base_layer", STACK), strict=True):
            a = tensors[f"{name}.lora_A.weight"][2 * expert : 2 * expert + 2]
            b = tensors[f"{name}.lora_B.weight"][:, [expert, 3 + expert]]
            torch.testing.assert_close(own, b @ a)


@pytest.mark.parametrize(
    ("change", "fields", "named"),
    [
        (lambda tensors: tensors.pop(f"{STACK}.lora_B.weight"), {}, "the other is missing"),
        (rename("layers.1.mlp.experts", "layers.2.mlp.experts"), {}, "does not have there"),
        (lambda tensors: tensors.update({f"{STACK}.lora_A.weight": torch.zeros(6, 41)}), {}, "fit neither"),
        (lambda tensors: tensors.update({f"{STACK}.lora_A.weight": torch.zeros(0, 40)}), {}, "fit neither"),
        (lambda tensors: tensors.update({f"{STACK}.lora_A.weight": torch.zeros(6)}), {}, "fit neither"),
        (twice, {}, "as another pair does"),
        (lambda _: None, {"target_parameters": ["gate_up_proj"]}, "down_proj, which target_parameters"),
        (lambda _: None, {"rank_pattern": {"experts.down_proj": 3, "experts.gate_up_proj": 2}}, "makes it 3"),
        (lambda _: None, {"rank_pattern": {"experts.down_proj": 256}}, "makes it 256|rank is 256"),
        (
            lambda tensors: tensors.update(
                {
                    f"base_model.model.model.layers.1.block_sparse_moe.experts.0.w2.lora_{end}.weight": torch.zeros(
                        *shape
                    )
                    for end, shape in (("A", (16, 40)), ("B", (48, 16)))
                }
            ),
            {"target_modules": ["q_proj", "w2"]},
            "by itself, and among all experts",
        ),
    ],
)
def test_pairs_of_all_experts_that_do_not_fit_are_refused(
    tmp_path: Path, change: Any, fields: dict[str, Any], named: str
) -> None:
    write_stacks(tmp_path, rank_pattern={"gate_up_proj": 2, "down_proj": 2})
    rewrite(tmp_path, change, **fields)
    with pytest.raises(ModelLoadError, match=named):
        read_adapter(tmp_path, MIXTRAL)


def test_routers_experts_of_one_tensor_and_latents_are_refused_by_name(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG, targets=["q_proj", "gate_proj"])
    rewrite(tmp_path, rename("mlp.gate_proj", "block_sparse_moe.gate"), target_modules=["q_proj", "gate"])
    with pytest.raises(ModelLoadError, match=r"block_sparse_moe\.gate, and adapters of routers"):
        read_adapter(tmp_path, MIXTRAL)
    rewrite(
        tmp_path, rename("block_sparse_moe.gate", "mlp.experts.0.gate_proj"), target_modules=["q_proj", "gate_proj"]
    )
    with pytest.raises(ModelLoadError, match="experts that lie in one tensor, as those of GptOssForCausalLM"):
        read_adapter(tmp_path, parse_config(GPT_OSS))
    with pytest.raises(ModelLoadError, match="latents"):
        read_adapter(tmp_path, parse_config(DEEPSEEK))


def test_limits_of_rank_and_bytes_are_named(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG, rank=16)
    with pytest.raises(ModelLoadError, match=r"rank is 16 .* taken is 8"):
        read_adapter(tmp_path, CONFIG, max_rank=8)
    with pytest.raises(ModelLoadError, match="1000"):
        read_adapter(tmp_path, CONFIG, max_bytes=1000)


def test_a_header_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, CONFIG)
    header = b"[" * 100_000
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="header is not valid"):
        read_adapter(tmp_path, CONFIG)


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path / "nowhere", CONFIG)
    write_random_adapter(tmp_path, CONFIG)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="pickled"):
        read_adapter(tmp_path, CONFIG)


def mutate(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found))
        match draw.randrange(4):
            case 0:
                found[at] = draw.randrange(256)
            case 1:
                del found[at : at + draw.randint(1, 40)]
            case 2:
                found[at:at] = found[at : at + draw.randint(1, 40)] or b"0"
            case _:
                found[at:at] = draw.choice([b"[" * 3000, b"-1", b"1e999", b'"', b"null", b"{}", b"9" * 5000])
        if not found:
            return b""
    return bytes(found)


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_mutated_adapter_is_read_or_refused_with_a_typed_error(tmp_path: Path, count: int) -> None:
    config: ModelConfig = CONFIG
    write_random_adapter(tmp_path, config, rank=1, targets=["q_proj", "down_proj"])
    draw, num_refused = random.Random(5), 0
    files = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    header = int.from_bytes(files["adapter_model.safetensors"][:8], "little") + 8
    for _ in range(count):
        name = draw.choice(list(files))
        data = files[name]
        end = len(data) if name.endswith("json") else header
        (tmp_path / name).write_bytes(mutate(data[:end], draw) + data[end:])
        try:
            read_adapter(tmp_path, config)
        except ModelLoadError:
            num_refused += 1
        (tmp_path / name).write_bytes(data)
    assert num_refused > count / 2
