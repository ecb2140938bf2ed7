"""`tandem quantize`: what it writes is what the format says, in every scheme and family, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from loadtest.bench.quality.judge import Quality
from loadtest.bench.quality.measure import TEXT, forms_of, judge
from loadtest.bench.quality.reader import texts_of
from services.quantize.compressed import KINDS
from services.quantize.job import Wish, Written, quantize
from shared.errors import ConfigError, TandemError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.decoder import Decoder
from shared.model.gguf.folder import gguf_folder
from shared.model.text.tokenizer import Tokenizer
from tandem_cli.main import build_app
from tests.demo import DEMO
from tests.gguf_files import write_model
from tests.integration.engine.families import write_family
from tests.integration.engine.heads import FAMILIES as HEADED
from tests.integration.engine.test_greedy_against_transformers import load_transformers
from tests.quantized_checkpoints import STORAGES, write_quantized
from tests.unit.model.paged_run import prompt_logits

PROMPT = [7 + (i * 37) % 190 for i in range(53)]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 8, "vocab_size": 3072}
MOST_ERROR = {"int8": 0.01, "w8a8": 0.01, "fp8": 0.04, "int4": 0.15, "w4a8": 0.15}
"""Scheme → most root mean square of a rounded weight's errors, of the weight's own."""
MIDDLES = {4: 8, 8: 128}


def slow(*families: str) -> list[object]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first half of the text that the demo model was not trained on, to calibrate on."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(TEXT.read_text()[:20_000])
    return path


def written(source: Path, out: Path, wish: Wish) -> Written:
    return quantize(source, out, wish, lambda done, total: None)


def opened(folder: Path, plain: Path) -> dict[str, Tensor]:
    """Writes the folder's weights as plain fp32 numbers, by the definition of the format, and returns them."""
    config = json.loads((folder / "config.json").read_text())
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        scales = stored.get(f"{module}.weight_scale")
        if scales is None:
            found[name] = tensor.float()
            continue
        if end not in ("weight", "weight_packed"):
            continue
        codes = tensor.float()
        if end == "weight_packed":
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            bits = 8 if tensor.shape[1] * 4 == columns else 4
            words = tensor.to(torch.int64) & 0xFFFFFFFF
            parts = [words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
            codes = torch.stack(parts, dim=-1).view(rows, -1)[:, :columns].float() - MIDDLES[bits]
        scales = scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)
        found[f"{module}.weight"] = codes * scales
    del config["quantization_config"]
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, plain / "model.safetensors")
    return found


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", *slow("mixtral", "deepseek-v3", "gemma3", "phi3", "glm4-moe")])
def test_both_readers_find_the_rounded_weights(tmp_path, family, scheme):
    source = write_family(tmp_path / "source", family, **SIZES, dtype=torch.bfloat16)
    found = written(source, tmp_path / "out", Wish(scheme))
    weights, plain = opened(tmp_path / "out", tmp_path / "plain"), load_file(source / "model.safetensors")
    rounded = [name for name, weight in weights.items() if not weight.equal(plain[name].float())]
    assert len(rounded) == found.num_rounded > 0
    for name in rounded:
        error = (weights[name] - plain[name].float()).square().mean().sqrt()
        assert error <= MOST_ERROR[scheme] * plain[name].float().square().mean().sqrt(), name
    decoder = Decoder.load(tmp_path / "out", torch.float32, "cpu")
    expected = logits_of(load_transformers(tmp_path / "plain"), PROMPT)
    assert distance(prompt_logits(decoder, PROMPT, 20), expected) <= 1e-3


@pytest.mark.parametrize("scheme", ["int4", "w8a8", pytest.param("w4a8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    ["LlamaForCausalLM", "gemma2", "phi3", *slow("Qwen2ForCausalLM", "Qwen3ForCausalLM", "glm4", "granite"),
     *slow("olmo2", "mixtral", "glm4-moe", "deepseek-v3", "cohere2", "smollm3", "ministral3")],
)  # fmt: skip
def test_factors_cancel_out_in_every_family(tmp_path, text, family, scheme):
    """What a text changes of the weights changes nothing of what they compute, beyond what rounding does."""
    source = write_family(tmp_path / "source", family, **SIZES, dtype=torch.bfloat16, tokenizer_from=DEMO)
    expected = logits_of(load_transformers(source), PROMPT)
    errors = []
    for name, wish in (("nearest", Wish(scheme)), ("calibrated", Wish(scheme, text=text))):
        written(source, tmp_path / name, wish)
        opened(tmp_path / name, tmp_path / f"{name} opened")
        found = logits_of(load_transformers(tmp_path / f"{name} opened"), PROMPT)
        errors.append(float((found - expected).square().mean().sqrt() / expected.std()))
    assert errors[1] <= 1.5 * errors[0] + 0.01


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("family", HEADED)
def test_a_head_stays_as_wide_as_it_is_and_guesses_for_the_rounded_model(tmp_path, family, scheme):
    architecture, fields = HEADED[family]
    options = {"vocab_size": 320, "hidden_size": 64, "extra_config": fields, "dtype": torch.bfloat16}
    config = write_random_checkpoint(tmp_path / "source", architecture, **options)
    found, prefix = written(tmp_path / "source", tmp_path / "out", Wish(scheme)), config.head.names.prefix
    plain, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    of_head = {name: tensor for name, tensor in plain.items() if name.startswith(prefix)}
    assert of_head.keys() == {name for name in stored if name.startswith(prefix)}
    assert all(stored[name].dtype == tensor.dtype and stored[name].equal(tensor) for name, tensor in of_head.items())
    assert f"{prefix}{config.head.names.projection}" in found.kept
    decoder = Decoder.load(tmp_path / "out", torch.float32, "cpu", has_head=True)
    assert decoder.head is not None
    assert decoder.quantization == scheme


def with_outliers(folder: Path) -> Path:
    """The demo model with some activations 32 times as large, as those of large models are, and the same answers."""
    shutil.copytree(DEMO, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            factors = torch.ones(256)
            factors[torch.randperm(256, generator=generator)[:8]] = 32.0
            tensors[f"{prefix}{norm}.weight"] *= factors
            for reader in readers:
                tensors[f"{prefix}{reader}.weight"] /= factors
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_text_makes_int4_better_where_some_activations_are_large(tmp_path, text):
    source = with_outliers(tmp_path / "source")
    texts = texts_of(Tokenizer.load(DEMO), TEXT.read_text()[20_000:], num_tokens=2048, window=512, num_greedy=1)
    found: list[Quality] = []
    for name, wish in (("nearest", Wish("int4")), ("aware", Wish("int4", text=text))):
        written(source, tmp_path / name, wish)
        found += judge(tmp_path / name, source, forms_of(["stored"], torch.float32), texts, torch.float32)
    nearest, aware = found
    assert aware.kl < 0.7 * nearest.kl
    assert aware.change < min(0.03, nearest.change)


def per_token(model: PreTrainedModel) -> PreTrainedModel:
    """Rounds what each projection of the layers reads to int8, a scale a token."""

    def rounded(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scales = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / scales).round() * scales, *args[1:])

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(rounded)
    return model


def test_a_text_makes_activations_of_eight_bits_better(tmp_path, text):
    source = with_outliers(tmp_path / "source")
    ids = Tokenizer.load(DEMO).encode(TEXT.read_text()[20_000:22_000])
    expected = logits_of(load_transformers(source), ids).log_softmax(1)
    found = []
    for name, wish in (("nearest", Wish("w8a8")), ("smooth", Wish("w8a8", text=text))):
        written(source, tmp_path / name, wish)
        opened(tmp_path / name, tmp_path / f"{name} opened")
        logits = logits_of(per_token(load_transformers(tmp_path / f"{name} opened")), ids).log_softmax(1)
        found.append(float((expected.exp() * (expected - logits)).sum(1).mean()))
    assert found[1] < 0.5 * found[0]


def test_files_and_shards_are_carried_along(tmp_path):
    source = write_family(
        tmp_path / "source", "LlamaForCausalLM", **SIZES, tokenizer_from=DEMO, max_shard_bytes=400_000
    )
    (source / "LICENSE").write_text("terms")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    whole = write_family(tmp_path / "whole", "LlamaForCausalLM", **SIZES)
    written(source, tmp_path / "out", Wish("int4"))
    written(whole, tmp_path / "one", Wish("int4"))
    names = {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    shards = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert len(shards) > 2
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    expected = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_named_layers_stay_as_they_are(tmp_path):
    source = write_family(tmp_path / "source", "LlamaForCausalLM", **SIZES)
    written(source, tmp_path / "out", Wish("int8", keep=("layers.1", "down_proj", r"re:.*\.0\.self_attn\.q_proj")))
    plain, found = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0"
    kept = {name for name in plain if name.startswith("model.layers.1") or name == f"{layer}.mlp.down_proj.weight"}
    kept |= {f"{layer}.self_attn.q_proj.weight", "lm_head.weight"}
    assert all(found[name].equal(plain[name]) for name in kept)
    assert f"{layer}.self_attn.k_proj.weight" not in found
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    modules = {name.removesuffix(".weight") for name in kept if plain[name].dim() == 2}
    assert set(config["ignore"]) == modules
    assert Decoder.load(tmp_path / "out", torch.float32, "cpu").quantization == "int8"


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (Wish("int4", keep=("attention",)), "keep"),
        (Wish("int4", keep=("re:(",)), "keep"),
        (Wish("int4", keep=("layers",)), "keep"),
        (Wish("int4", group=48), "group"),
        (Wish("int8", group=32), "group"),
        (Wish("int8", text=TEXT), "calibrate"),
        (Wish("int4", text=Path("nowhere.txt")), "calibrate"),
        (Wish("int4", text=DEMO / "generation_config.json"), "calibrate"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_is_written(tmp_path, wish, field):
    with pytest.raises(ConfigError) as refused:
        written(DEMO, tmp_path / "out", wish)
    assert refused.value.details["field"] == field
    assert not list(tmp_path.iterdir())


def test_sources_that_are_not_plain_and_folders_that_exist_are_refused(tmp_path):
    source = write_family(tmp_path / "source", "LlamaForCausalLM", **SIZES)
    write_quantized(source, STORAGES["int4 groups"], tmp_path / "quantized", tmp_path / "opened")
    stacked = write_family(tmp_path / "stacked", "gpt-oss", **SIZES)
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM, whose layers have states: round it without one"):
        written(
            write_family(tmp_path / "states", "qwen3.5", tokenizer_from=DEMO, **SIZES),
            tmp_path / "out",
            Wish("int4", text=TEXT),
        )
    write_model(source, ("F32",), tmp_path / "plain.gguf", tmp_path / "same")
    (tmp_path / "tokenizer.json").write_text("{}")
    of_gguf = gguf_folder(tmp_path / "plain.gguf", tmp_path / "cache")
    before = sorted(tmp_path.iterdir())
    for folder, why in (
        (tmp_path / "quantized", "quantized already.*take the checkpoint in 16 or 32 bits"),
        (of_gguf, "holds a GGUF file"),
        (stacked, "experts"),
        (tmp_path / "no", "exist"),
    ):
        with pytest.raises(TandemError, match=why):
            written(folder, tmp_path / "out", Wish("int4"))
    with pytest.raises(ConfigError, match="exists already"):
        written(source, source, Wish("int4"))
    with pytest.raises(ConfigError, match="cannot be written"):
        written(source, tmp_path / ("x" * 300), Wish("int4"))
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(DEMO, tmp_path / "out", Wish("int8"), interrupt)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_it_wrote(tmp_path):
    arguments = [
        "quantize",
        str(DEMO),
        str(tmp_path / "out"),
        "--to",
        "int8",
        "--keep",
        "o_proj",
        "--keep",
        "down_proj",
    ]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    assert "20 projections in int8" in done.output
    assert "9 layers kept" in done.output
    wrong = CliRunner().invoke(build_app(), ["quantize", str(DEMO), str(tmp_path / "other"), "--to", "int3"])
    assert isinstance(wrong.exception, ConfigError)
