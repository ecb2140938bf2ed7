"""Bad quantized checkpoints are refused by name before weights are read; plain ones are rounded as they are read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ConfigError, ModelLoadError
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import QuantizedWeight, quantize_rows, rounded
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config, parse_config
from shared.model.ranks.shard import Degrees, Shard
from shared.model.ranks.shard_weights import allocate_shard, load_shard
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import fingerprint
from shared.model.weights.plan import WeightPlan
from shared.model.weights.tensor_reader import TensorReader
from tests.integration.engine.families import write_family
from tests.quantized_checkpoints import STORAGES, Change, changed_copy, write_mxfp4, write_quantized
from tests.unit.model.paged_run import prompt_logits

MODULE = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """A quantized checkpoint by its storage's name, written once."""
    root = tmp_path_factory.mktemp("quantized")
    write_random_checkpoint(root / "source", hidden_size=64, num_heads=4, head_dim=16, num_layers=1)

    def folder(name: str) -> Path:
        path = root / name.replace(" ", "-")
        if not path.exists():
            write_quantized(root / "source", STORAGES[name], path, root / "opened" / path.name)
        return path

    return folder


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Tensor:
    """Of bitsandbytes, for `MODULE`."""
    fields = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [64, 64],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0,
    }  # fmt: skip
    return torch.tensor(list(json.dumps({**fields, **changes}).encode()), dtype=torch.uint8)


def _scheme(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


BAD: dict[str, tuple[str, Change, str, str]] = {
    "no scale": ("int4 groups", lambda t, _: t.pop(f"{MODULE}.weight_scale"), f"{MODULE}.weight_scale", "has no scale"),
    "no zeros": ("awq", lambda t, _: t.pop(f"{MODULE}.qzeros"), f"{MODULE}.qzeros", "has no zeros"),
    "no codes": ("gptq", lambda t, _: t.pop(f"{MODULE}.qweight"), f"{MODULE}.qweight", "is missing"),
    "no index": ("gptq ordered", lambda t, _: t.pop(f"{MODULE}.g_idx"), f"{MODULE}.g_idx", "desc_act"),
    "no index of compressed-tensors": (
        "int4 ordered", lambda t, _: t.pop(f"{MODULE}.weight_g_idx"), f"{MODULE}.weight_g_idx", "actorder",
    ),
    "an index out of range": (
        "gptq ordered", lambda t, _: t[f"{MODULE}.g_idx"].fill_(9), f"{MODULE}.g_idx", "from 9 to 9, not 0 to 1",
    ),
    "an order that the configuration denies": (
        "gptq ordered", lambda _, c: c.update(desc_act=False), ".g_idx", "none are ordered",
    ),
    "a scale that is no number": (
        "int8 groups", lambda t, _: t[f"{MODULE}.weight_scale"][3].fill_(float("nan")), f"{MODULE}.weight_scale", "nan",
    ),
    "an infinite scale": (
        "awq", lambda t, _: t[f"{MODULE}.scales"][0].fill_(float("inf")), f"{MODULE}.scales", "inf",
    ),
    "a scale of zero": (
        "fp8 rows", lambda t, _: t[f"{MODULE}.weight_scale"][5].zero_(), f"{MODULE}.weight_scale", "zero or no number",
    ),
    "groups that do not divide": (
        "int4 groups", lambda _, c: _scheme(c).update(group_size=48), ".weight", "64 columns, which groups of 48",
    ),
    "codes of another shape": (
        "int4 groups", lambda t, _: t.update({f"{MODULE}.weight_packed": torch.zeros(64, 9, dtype=torch.int32)}),
        f"{MODULE}.weight_packed", r"has shape \[64, 9\], expected \[64, 8\]",
    ),
    "codes of another dtype": (
        "w8a8", lambda t, _: t.update({f"{MODULE}.weight": t[f"{MODULE}.weight"].to(torch.uint8)}),
        f"{MODULE}.weight", "is stored as U8",
    ),
    "scales of another shape": (
        "int8 groups", lambda t, _: t.update({f"{MODULE}.weight_scale": torch.ones(64, 3)}),
        f"{MODULE}.weight_scale", r"expected \[64, 2\]",
    ),
    "an ignored layer that does not exist": (
        "int4 groups", lambda _, c: c["ignore"].append("model.layers.0.self_attn.w_proj"),
        "model.layers.0.self_attn.w_proj", "no layer of this checkpoint",
    ),
    "a target that does not exist": (
        "int4 groups", lambda _, c: c["config_groups"]["group_0"].update(targets=["Linear", "model.layers.7.mlp"]),
        "model.layers.7.mlp", "no layer of this checkpoint",
    ),
    "a layer that no target names": (
        "int4 groups", lambda _, c: c["config_groups"]["group_0"].update(targets=["re:.*mlp.*"]),
        "self_attn.o_proj.weight", "has no scheme for it",
    ),
    "another shape beside the codes": (
        "int4 groups", lambda t, _: t.update({f"{MODULE}.weight_shape": torch.tensor([64, 60])}),
        f"{MODULE}.weight_shape", r"\[64, 60\]",
    ),
    "a bias that the family has not": (
        "gptq", lambda t, _: t[f"{MODULE}.bias"].fill_(1), f"{MODULE}.bias", "is not zero",
    ),
    "no state": (
        "nf4", lambda t, _: t.pop(f"{MODULE}.{STATE}"), f"{MODULE}.weight", "quant_state.bitsandbytes__nf4 is missing",
    ),
    "no scale for the whole": (
        "nvfp4", lambda t, _: t.pop(f"{MODULE}.weight_global_scale"), ".weight_global_scale", "is missing",
    ),
    "a scale of zero for the whole": (
        "nvfp4", lambda t, _: t[f"{MODULE}.weight_global_scale"].zero_(), ".weight_global_scale", "zero or no number",
    ),
    "fp4 scales that are no number": (
        "nvfp4", lambda t, _: t[f"{MODULE}.weight_scale"].view(torch.uint8).fill_(127), ".weight_scale", "no number",
    ),
    "fp4 scales of other groups": (
        "nvfp4", lambda t, _: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"][:, :1]}), ".weight_scale",
        "has shape",
    ),
    "powers of two that are no number": (
        "mxfp4 linear", lambda t, _: t[f"{MODULE}.weight_scale"][3, 1].fill_(255), ".weight_scale", "no number",
    ),
    "powers of two of fp8 that are no number": (
        "mxfp8", lambda t, _: t[f"{MODULE}.weight_scale"][3, 1].fill_(255), ".weight_scale", "no number",
    ),
    "powers of two beside groups of another size": (
        "mxfp8", lambda t, c: (
            _scheme(c).update(group_size=16),
            t.update({name: part.repeat_interleave(2, 1) for name, part in t.items() if name.endswith("_scale")}),
        ),
        ".weight_scale", "is stored as U8",
    ),
    "a state that is no JSON": ("nf4", lambda t, _: t[f"{MODULE}.{STATE}"].zero_(), STATE, "is no JSON"),
    "blocks of another size": (
        "nf4", lambda t, _: t.update({f"{MODULE}.{STATE}": state(blocksize=128)}), ".absmax", "64 numbers, not the 32",
    ),
    "a state of another shape": (
        "nf4", lambda t, _: t.update({f"{MODULE}.{STATE}": state(shape=[64, 65])}), STATE, r"shape \[64, 65\]",
    ),
    "another type of 4 bits": (
        "nf4", lambda t, _: t.update({f"{MODULE}.{STATE}": state(quant_type="nf5")}), STATE, "expected one of nf4, fp4",
    ),
    "another type of 4 bits, in a column": (
        "nf4", lambda t, _: t.update({f"{MODULE}.{STATE}": state(quant_type="nf5")[:, None]}), STATE, "expected one of",
    ),
    "an index in a dtype that is not read": (
        "gptq", lambda t, _: t.update({f"{MODULE}.g_idx": t[f"{MODULE}.g_idx"].to(torch.uint32)}), ".g_idx",
        "stored as U32, which is not read",
    ),
    "no scales of scales": (
        "nf4", lambda t, _: t.pop(f"{MODULE}.weight.nested_absmax"), ".absmax", "is stored as U8",
    ),
    "a table that is no number": (
        "fp4", lambda t, _: t[f"{MODULE}.weight.quant_map"].fill_(float("nan")), ".quant_map", "no number",
    ),
    "a largest number that is none": (
        "fp4", lambda t, _: t[f"{MODULE}.weight.absmax"][1].fill_(float("inf")), ".absmax", "inf",
    ),
    "a tensor of no use": (
        "gptq", lambda t, _: t.update({f"{MODULE}.more": torch.ones(2)}), f"{MODULE}.more", "is not expected",
    ),
}  # fmt: skip
"""What is wrong → (storage, how it is done, end of the named tensor, words of the message)."""


@pytest.mark.parametrize("problem", BAD)
def test_a_damaged_checkpoint_is_refused_by_tensor_before_weights_are_read(tmp_path, folders, problem, monkeypatch):
    storage, change, tensor, words = BAD[problem]
    folder = changed_copy(folders(storage), tmp_path / "model", change)
    read: list[str] = []
    pieces = TensorReader.pieces
    monkeypatch.setattr(
        TensorReader, "pieces", lambda self, entry, *a: read.append(entry.name) or pieces(self, entry, *a)
    )
    with pytest.raises(ModelLoadError, match=words) as caught:
        Decoder.load(folder, torch.float32, "cpu", kernels="torch")
    assert str(caught.value.details["tensor"]).endswith(tensor)
    assert not read


@pytest.mark.parametrize(
    ("storage", "change", "field"),
    [
        ("int4 groups", {"format": "mxfp6-pack-quantized"}, "format"),
        ("int4 groups", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("int4 groups", {"quant_method": "hqq"}, "quant_method"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit"),
        ("nf4", {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ("nf4", {"quant_method": "mxfp4"}, "quantization_config"),
        ("int4 groups", {"config_groups": None}, "config_groups"),
        ("int4 groups", {"ignore": ["re:("]}, "ignore"),
        ("gptq", {"bits": 3}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("awq", {"version": "gemv"}, "version"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt"),
        ("fp8 blocks", {"weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_an_unknown_scheme_is_refused_by_field(tmp_path, folders, storage, change, field):
    folder = changed_copy(folders(storage), tmp_path / "model", lambda _, config: config.update(change))
    with pytest.raises(ModelLoadError) as caught:
        load_config(folder)
    assert str(caught.value.field).endswith(field)


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        ({}, True),
        ({"dynamic": False}, False),
        ({"strategy": "tensor"}, False),
        ({"symmetric": False}, False),
        ({"num_bits": 4}, False),
        ({"type": "float"}, False),
    ],
)
def test_activations_are_rounded_where_the_checkpoint_says_a_scale_a_token(tmp_path, folders, change, rounds):
    def changed(_: object, config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["input_activations"].update(change)

    folder = changed_copy(folders("w8a8"), tmp_path / "model", changed)
    with Checkpoint.of(folder) as checkpoint:
        plan = WeightPlan.make(checkpoint, load_config(folder))
    assert {spec.rounds_input for spec in plan.specs.values()} == {rounds}
    assert plan.kinds == ("w8a8" if rounds else "int8")


@pytest.mark.parametrize(("kind", "stored"), [("w8a8", True), ("w8a8", False), ("w4a8", False)])
def test_in_16_bits_rows_are_rounded_too_and_in_32_bits_they_are_not(tmp_path, folders, kind, stored):
    folder = folders("w8a8") if stored else tmp_path
    rounding = "auto" if stored else kind
    if not stored:
        write_random_checkpoint(tmp_path, hidden_size=64, num_heads=4, head_dim=16)

    def logits(kernels: str, dtype: torch.dtype, quantization: str) -> Tensor:
        decoder = Decoder.load(folder, dtype, "cpu", kernels=kernels, quantization=quantization)
        return prompt_logits(decoder, PROMPT, 4).float()

    exact = logits("torch", torch.float32, rounding)
    if not stored:
        assert exact.equal(logits("torch", torch.float32, {"w8a8": "int8", "w4a8": "int4"}[kind]))
    ours, expected = (logits(kernels, torch.bfloat16, rounding) for kernels in ("auto", "torch"))
    assert (ours - expected).abs().max() < 0.03 * expected.abs().max()
    assert (ours - exact).abs().max() > 0


MXFP4: dict[str, tuple[Change, str, str]] = {
    "no scales": (lambda t, _: t.pop(f"{EXPERTS}.down_proj_scales"), "down_proj_scales", "has no scales"),
    "a scale that is no number": (
        lambda t, _: t[f"{EXPERTS}.down_proj_scales"][1, 2].fill_(255), "down_proj_scales", "no number",
    ),
    "another shape": (
        lambda t, _: t.update({f"{EXPERTS}.down_proj_blocks": torch.zeros(5, 32, 1, 15, dtype=torch.uint8)}),
        "down_proj_blocks", r"has shape \[5, 32, 1, 15\]",
    ),
    "another dtype": (
        lambda t, _: t.update({f"{EXPERTS}.down_proj_scales": torch.ones(5, 32, 1)}), "down_proj_scales", "as F32",
    ),
    "another method": (
        lambda _, c: c.update(quant_method="fp8"), "", "fp8 is not supported for GptOssForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", MXFP4)
def test_damaged_experts_in_mxfp4_are_refused_by_tensor(tmp_path, problem):
    change, tensor, words = MXFP4[problem]
    source = write_family(tmp_path / "source", "gpt-oss", hidden_size=32, intermediate_size=32)
    write_mxfp4(source, tmp_path / "whole", tmp_path / "opened")
    Decoder.load(tmp_path / "whole", torch.float32, "cpu", kernels="torch")
    folder = changed_copy(tmp_path / "whole", tmp_path / "model", change)
    with pytest.raises(ModelLoadError, match=words) as caught:
        Decoder.load(folder, torch.float32, "cpu", kernels="torch")
    assert str(caught.value.details.get("tensor", "")).endswith(tensor)


@pytest.mark.parametrize("seed", range(4))
def test_any_state_of_bitsandbytes_is_read_or_refused_by_name(folders, seed, monkeypatch):
    chooser = random.Random(seed)
    values = [None, 0, -1, 1, 64, 1 << 70, 0.5, float("nan"), "", "nf4", True, [], [64, 64], [64, 64.0], {}]
    tensors = load_file(folders("nf4") / "model.safetensors")
    refused = 0
    with Checkpoint.of(folders("nf4")) as checkpoint:
        source = WeightPlan.make(checkpoint, load_config(folders("nf4"))).sources[f"{MODULE}.weight"]
        good = bytes(tensors[f"{MODULE}.{STATE}"].tolist())
        for _ in range(300):
            fields = json.loads(good)
            for name in chooser.sample(sorted(fields), chooser.randrange(3)):
                fields[name] = chooser.choice(values)
            raw = bytearray(json.dumps(fields).encode())
            for _ in range(chooser.choice([0, 0, 1, 3])):
                raw[chooser.randrange(len(raw))] = chooser.randrange(256)
            changed = {**tensors, f"{MODULE}.{STATE}": torch.tensor(list(raw), dtype=torch.uint8)}
            monkeypatch.setattr(checkpoint, "whole", changed.__getitem__)
            try:
                source.check(checkpoint)
            except ModelLoadError:
                refused += 1
    assert 20 < refused < 300


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["int4 ordered", "fp8 blocks", "gptq ordered", "awq", "w8a8"])
def test_any_configuration_is_read_or_refused_by_name(folders, storage):
    chooser = random.Random(storage)
    config = json.loads((folders(storage) / "config.json").read_text())
    values = [None, 0, -1, 3, 1 << 70, 0.5, "", "re:*", "group", True, [], [0, 1], ["x"], {}, {"a": {}}, float("nan")]

    def changed(value: Any) -> Any:
        if chooser.random() < 0.1:
            return chooser.choice(values)
        if isinstance(value, dict):
            return {name: changed(item) for name, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else value

    refused = 0
    for _ in range(2000):
        try:
            parse_config({**config, "quantization_config": changed(config["quantization_config"])})
        except ModelLoadError:
            refused += 1
    assert 100 < refused < 2000


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "w8a8", "w4a8"])
def test_rounding_a_plain_checkpoint_gives_what_its_rounded_weights_give(tmp_path, kind):
    write_random_checkpoint(tmp_path, hidden_size=64, num_heads=4, head_dim=16, tie=True)
    rounding = Decoder.load(tmp_path, torch.float32, "cpu", kernels="torch", quantization=kind)
    kinds = {"int4": "int4+int8", "w8a8": "int8+w8a8", "w4a8": "int8+w4a8"}
    assert rounding.quantization == kinds.get(kind, kind)
    plain = Decoder.load(tmp_path, torch.float32, "cpu", kernels="torch")
    assert rounding.projection_bytes < plain.projection_bytes * (0.3 if "4" in kind else 0.31)
    with Checkpoint.of(tmp_path) as checkpoint:
        specs = WeightPlan.make(checkpoint, plain.config, kind).specs
    tensors = load_file(tmp_path / "model.safetensors")
    head = rounded(tensors["model.embed_tokens.weight"], specs["lm_head.weight"]).dense()
    for name, spec in specs.items():
        if name in tensors:
            tensors[name] = rounded(tensors[name], spec).dense()
    tensors["lm_head.weight"] = head
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "opened").mkdir()
    (tmp_path / "opened" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "opened" / "model.safetensors")
    expected = prompt_logits(Decoder.load(tmp_path / "opened", torch.float32, "cpu", kernels="torch"), PROMPT, 4)
    torch.testing.assert_close(prompt_logits(rounding, PROMPT, 4), expected, rtol=1e-3, atol=1e-3)


def test_experts_in_one_tensor_are_not_rounded_nor_read_in_codes_of_linear_layers(tmp_path):
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8}
    write_random_checkpoint(tmp_path, "GptOssForCausalLM", num_layers=1, extra_config=experts)
    with pytest.raises(ConfigError, match="GptOssForCausalLM: its experts lie in one tensor") as caught:
        Decoder.load(tmp_path, torch.float32, "cpu", quantization="int8")
    assert caught.value.field == "quantization"
    content = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="lie in one tensor"):
        parse_config({**content, "quantization_config": STORAGES["awq"].config})


def test_a_checkpoint_with_images_names_layers_as_its_tensors(tmp_path, folders):
    def with_images(tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = torch.zeros(2, 2)
        quantization["ignore"] = ["language_model.lm_head", "vision_tower.patch"]

    plain = folders("int4 groups")
    folder = changed_copy(plain, tmp_path / "model", with_images)
    text = json.loads((folder / "config.json").read_text())
    quantization = text.pop("quantization_config")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "quantization_config": quantization,
                "text_config": {**text, "model_type": "llama"},
            }
        )
    )
    found, expected = (Decoder.load(path, torch.float32, "cpu", kernels="torch") for path in (folder, plain))
    assert torch.equal(prompt_logits(found, PROMPT, 4), prompt_logits(expected, PROMPT, 4))


def test_a_quantized_checkpoint_is_not_rounded_again(folders):
    with pytest.raises(ConfigError, match="quantized already") as caught:
        Decoder.load(folders("awq"), torch.float32, "cpu", quantization="int8")
    assert caught.value.field == "quantization"


def test_fingerprints_tell_storages_and_roundings_apart(tmp_path, folders):
    found = {fingerprint(folders(name), "float32") for name in ("int4 groups", "awq", "gptq", "w8a8")}
    write_random_checkpoint(tmp_path)
    found |= {fingerprint(tmp_path, "float32", kind) for kind in ("auto", "int8", "int4", "fp8", "w8a8", "w4a8")}
    assert len(found) == 10


def test_a_rank_whose_columns_split_a_group_is_refused_with_both_numbers(tmp_path):
    write_random_checkpoint(tmp_path / "source", hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96)
    write_quantized(tmp_path / "source", STORAGES["int4 groups"], tmp_path / "model", tmp_path / "opened")
    config = load_config(tmp_path / "model")
    shard = Shard(config, Degrees(tensor=2), 1)
    with Checkpoint.of(tmp_path / "model") as checkpoint:
        plan = WeightPlan.make(checkpoint, config)
        parameters = allocate_shard(shard, torch.float32, "cpu", plan.specs)
        with pytest.raises(ConfigError, match=r"tp is 2.*48 to 96 of .*down_proj.*, but 32 columns") as caught:
            load_shard(checkpoint, shard, plan, parameters)
    assert caught.value.field == "tp"


def test_the_plan_knows_the_bytes_that_weights_take(folders):
    for name in ("int4 groups", "gptq ordered", "fp8 blocks"):
        with Checkpoint.of(folders(name)) as checkpoint:
            config = load_config(folders(name))
            planned = WeightPlan.make(checkpoint, config).weight_bytes(4)
        decoder = Decoder.load(folders(name), torch.float32, "cpu", kernels="torch")
        norms = sum(4 * config.hidden_size for _ in range(2 * config.num_layers + 1))
        assert planned == decoder.projection_bytes + norms + 4 * config.vocab_size * config.hidden_size


def test_zeros_of_as_few_rows_as_a_word_has_codes_are_read(tmp_path):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "num_layers": 1}
    write_random_checkpoint(tmp_path / "source", **sizes)
    write_quantized(tmp_path / "source", STORAGES["int4 groups with zeros"], tmp_path / "model", tmp_path / "opened")
    ours, expected = (
        prompt_logits(Decoder.load(tmp_path / name, torch.float32, "cpu"), PROMPT, 4) for name in ("model", "opened")
    )
    assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    "spec",
    [
        LinearSpec("int8", 0),
        LinearSpec("int8", 32),
        LinearSpec("int4", 32),
        LinearSpec("int4", 32, has_zeros=True),
        LinearSpec("fp8", 0),
    ],
)
def test_rounding_is_off_by_half_a_step_at_most(spec):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    made = rounded(weight, spec)
    assert isinstance(made, QuantizedWeight)
    steps = quantize_rows(weight, spec).scales.repeat_interleave(64 // made.scales.shape[1], 1)
    steps = steps * (weight.abs() / steps / 16 + 1e-3 if spec.kind == "fp8" else 0.5001)
    assert bool(((made.dense() - weight).abs() <= steps).all())
    assert not made.dense()[7].any()
