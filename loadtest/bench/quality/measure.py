"""`python -m loadtest.bench eval`: what fewer bits cost a model in quality, beside the plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch

from loadtest.bench.engine.cpu import DTYPES
from loadtest.bench.quality.judge import Judge, Quality
from loadtest.bench.quality.reader import Reader, Texts, texts_of
from loadtest.rig import markdown
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.models import DEMO
from loadtest.rig.results import commit, machine, write_json
from shared.errors import ConfigError
from shared.kernels.pool_view import KV_DTYPES, dtype_name
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS, Quantization

TEXT = DEMO / "held_out.txt"
"""What is read by default: text that the demo model was not trained on."""
STORED = "stored"
_KV = "kv-"


@dataclass(frozen=True)
class Form:
    """How a model is held: what its weights are rounded to, and its KV."""

    name: str
    quantization: Quantization
    kv_dtype: torch.dtype


def forms_of(names: Sequence[str], dtype: torch.dtype) -> list[Form]:
    """Forms by their names: `stored`, what weights are rounded to, or `kv-` and a dtype of KV, joined with a plus.
    Raises ConfigError for another name."""
    kv_dtypes = {_kv_name(each): each for each in KV_DTYPES[dtype]}
    known = (STORED, *(kind for kind in QUANTIZATIONS if kind != AS_STORED), *kv_dtypes)
    found = []
    for name in names:
        quantization, kv_dtype = AS_STORED, dtype
        for part in name.split("+"):
            choice(part, "forms", known)
            kv_dtype = kv_dtypes.get(part, kv_dtype)
            quantization = next((kind for kind in QUANTIZATIONS if kind == part), quantization)
        found.append(Form(name, quantization, kv_dtype))
    return found


def _kv_name(dtype: torch.dtype) -> str:
    return _KV + next((name for name, each in DTYPES.items() if each == dtype), dtype_name(dtype))


def default_forms(folder: Path, dtype: torch.dtype) -> list[str]:
    """All that there are: of a checkpoint that is quantized, as it is stored."""
    of_weights = [kind for kind in QUANTIZATIONS if kind != AS_STORED]
    of_kv = [_kv_name(each) for each in KV_DTYPES[dtype] if each != dtype]
    return [STORED, *([] if load_config(folder).quantization is not None else of_weights), *of_kv]


def judge(folder: Path, plain: Path, forms: Sequence[Form], texts: Texts, dtype: torch.dtype) -> Iterator[Quality]:
    """Each form's figures as they come; one model is in memory at a time."""
    max_tokens = max(*map(len, texts.windows), *(len(prompt) + texts.num_greedy for prompt in texts.prompts))

    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as scratch, torch.inference_mode():
        decoder = Decoder.load(plain, dtype, "cpu")
        found = Judge(Reader(decoder, dtype, max_tokens), texts, decoder.config.vocab_size, Path(scratch))
        for form in forms:
            del decoder
            decoder = Decoder.load(folder, dtype, "cpu", quantization=form.quantization)
            yield found.quality(form.name, decoder.projection_bytes, Reader(decoder, form.kv_dtype, max_tokens))


def main(
    model: Annotated[Path, Option(help="a model folder")] = DEMO,
    plain: Annotated[Path | None, Option(help="folder of the model to compare with; default: the model itself")] = None,
    text: Annotated[Path, Option(help="a text file; default: what the demo model was not trained on")] = TEXT,
    forms: Annotated[
        str,
        Option(
            help="forms to judge: stored, int8, int4, fp8, w8a8, w4a8, kv-bf16, int4+kv-bf16; default: all there are"
        ),
    ] = "",
    dtype: Annotated[str, Option(help="of the computation: fp32 or bf16")] = "fp32",
    tokens: Annotated[int, Option(help="tokens of the text to read")] = 4096,
    window: Annotated[int, Option(help="tokens that are read as one sequence")] = 512,
    greedy: Annotated[int, Option(help="tokens of each greedy answer")] = 64,
    out: Out = None,
) -> None:
    """Perplexity of a model's forms on a text, and how near they are to the plain model."""
    compute = DTYPES[choice(dtype, "dtype", DTYPES)]
    wanted = forms_of(forms.split() or default_forms(model, compute), compute)
    longest = load_config(model).max_position_embeddings
    for value, name, least in ((tokens, "tokens", 2), (window, "window", 8), (greedy, "greedy", 1)):
        if value < least or (name == "window" and value + greedy > longest):
            raise ConfigError(f"--{name}: {value} is too small, or too long for this model", field=name, value=value)
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {text} cannot be read: {error}", field="text") from error
    texts = texts_of(Tokenizer.load(model), content, tokens, window, greedy)
    rows: list[Quality] = []
    for row in judge(model, plain or model, wanted, texts, compute):
        rows.append(row)
        print(f"{row.name}: perplexity {row.perplexity:.4g}", flush=True)
        if out is not None:
            about = {"machine": machine(), "commit": commit(), "model": str(model), "text": text.name, "dtype": dtype}
            write_json(out, {**about, "tokens": texts.num_predicted, "results": [asdict(each) for each in rows]})
    print(f"\n{model} in {dtype}, {texts.num_predicted} tokens of {text.name}\n")
    print(table(rows))


def table(rows: Sequence[Quality]) -> str:
    """Markdown."""
    return markdown.table(
        ("form", "weights, MB", "perplexity", "change", "KL, nats a token", "top-1 in common", "greedy in common"),
        [
            (
                row.name,
                f"{row.weight_bytes / 1e6:,.1f}",
                f"{row.perplexity:.4g}",
                f"{row.change:+.2%}",
                f"{row.kl:.5f}",
                f"{row.top1:.2%}",
                f"{row.greedy:.1%}",
            )
            for row in rows
        ],
    )
