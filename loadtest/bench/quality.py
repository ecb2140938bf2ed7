"""`python -m loadtest.bench eval`: what fewer bits cost a model in quality, beside the plain model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from loadtest.rig import markdown
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.models import DEMO
from loadtest.rig.results import commit, machine, write_json
from shared.errors import ConfigError
from shared.kernels.batch import AttentionBatch
from shared.kernels.pool_view import KV_DTYPES, PoolView, dtype_name
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS, Quantization

TEXT = DEMO / "held_out.txt"
"""What is read by default: text that the demo model was not trained on."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED = "stored"
_KV = "kv-"
_BLOCK_SIZE = 16
_MOST_PROMPTS = 8


@dataclass(frozen=True)
class Form:
    """How a model is held: what its weights are rounded to, and its KV."""

    name: str
    quantization: Quantization
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class Texts:
    """Token ids: windows that are read each by itself, and the beginnings that answers continue."""

    windows: list[list[int]]
    num_ahead: int
    """Tokens of a window that stand ahead of the text, such as BOS, which nothing predicts."""
    prompts: list[list[int]]
    num_greedy: int
    """Tokens of an answer."""

    @property
    def num_predicted(self) -> int:
        """Tokens whose probability counts."""
        return sum(len(window) - max(1, self.num_ahead) for window in self.windows)


@dataclass(frozen=True)
class Quality:
    """One form's figures; all but the first two are beside the plain model."""

    name: str
    weight_bytes: int
    """Bytes of the projections as they lie in memory."""
    perplexity: float
    change: float
    """Relative change of the perplexity."""
    kl: float
    """Kullback-Leibler divergence of its next tokens' distribution from the plain model's, mean in nats a token."""
    top1: float
    """Share of tokens for which both find the same one the most likely."""
    greedy: float
    """Share of the tokens of greedy answers before the first that differs."""


class Reader:
    """A decoder that reads single sequences, outside of any engine."""

    def __init__(self, decoder: Decoder, kv_dtype: torch.dtype, max_tokens: int) -> None:
        """Allocates KV of `max_tokens`."""
        self._decoder = decoder
        layout = decoder.config.block_layout(_BLOCK_SIZE, dtype_name(kv_dtype))
        num_blocks = -(-max_tokens // _BLOCK_SIZE)
        self._pool = PoolView.of(torch.zeros(layout.shape(num_blocks), dtype=torch.uint8), layout)
        self._table = list(range(num_blocks))

    def logits(self, token_ids: Sequence[int], begin: int, length: int, rows: Sequence[int]) -> Tensor:
        """[len(rows), vocab_size] fp32, of those of the tokens given, which stand at `begin`, …; `length`: of the whole
        sequence, as far as it is known."""
        count, end = len(token_ids), begin + len(token_ids)
        lengths = torch.full((count,), length) if self._decoder.rotary.needs_lengths else None
        batch = AttentionBatch.from_lists([count], [end], [self._table], _BLOCK_SIZE)
        ids, places = torch.tensor(token_ids), torch.arange(begin, end)
        return self._decoder.forward(ids, places, self._pool, batch, torch.tensor(rows), lengths)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The most likely tokens behind a prompt, one after the other."""
        found: list[int] = []
        fed, begin = list(prompt), 0
        while len(found) < num_tokens:
            logits = self.logits(fed, begin, begin + len(fed), [len(fed) - 1])
            begin += len(fed)
            fed = [int(logits[0].argmax())]
            found += fed
        return found


def texts_of(tokenizer: Tokenizer, text: str, num_tokens: int, window: int, num_greedy: int) -> Texts:
    """The text's first `num_tokens`, cut into windows. Raises ConfigError for a text that is too short."""
    ahead = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    room = window - len(ahead)
    windows = [ahead + ids[first : first + room] for first in range(0, len(ids), room)]
    windows = [each for each in windows if len(each) > max(1, len(ahead))]
    prompt_len = min(room, 32) + len(ahead)
    prompts = [each[:prompt_len] for each in windows if len(each) >= prompt_len][:_MOST_PROMPTS]
    if not prompts:
        raise ConfigError(f"the text has {len(ids)} tokens, too few to judge a model by", field="text", value=len(ids))
    return Texts(windows, len(ahead), prompts, num_greedy)


def log_probabilities(reader: Reader, texts: Texts) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window ([num_predicted, vocab_size] fp32 of the tokens that come next, those tokens)."""
    first = max(1, texts.num_ahead)
    for window in texts.windows:
        logits = reader.logits(window[:-1], 0, len(window), range(first - 1, len(window) - 1))
        yield logits.log_softmax(1), torch.tensor(window[first:])


class Judge:
    """Compares forms of a model with the plain one, whose log probabilities lie in a file."""

    def __init__(self, plain: Reader, texts: Texts, vocab_size: int, scratch: Path) -> None:
        """Reads all texts with the plain model; `scratch`: a folder for the file."""
        self._texts = texts
        shape = (texts.num_predicted, vocab_size)
        self._plain = torch.from_file(str(scratch / "plain"), shared=True, size=math.prod(shape)).view(shape)
        total, first = 0.0, 0
        for found, tokens in log_probabilities(plain, texts):
            self._plain[first : first + len(tokens)] = found
            total -= float(found.gather(1, tokens[:, None]).double().sum())
            first += len(tokens)
        self._loss = total / texts.num_predicted
        self._answers = [plain.greedy(prompt, texts.num_greedy) for prompt in texts.prompts]

    def quality(self, name: str, weight_bytes: int, reader: Reader) -> Quality:
        """A form's figures."""
        total, kl, same, first = 0.0, 0.0, 0, 0
        for found, tokens in log_probabilities(reader, self._texts):
            plain = self._plain[first : first + len(tokens)]
            total -= float(found.gather(1, tokens[:, None]).double().sum())
            # A distribution has no mass where its logarithm is -inf, and 0 times that would be no number.
            kl += float((plain.exp() * (plain - found)).nan_to_num(nan=0.0).double().sum())
            same += int((plain.argmax(1) == found.argmax(1)).sum())
            first += len(tokens)
        count, texts = self._texts.num_predicted, self._texts
        answers = [reader.greedy(prompt, texts.num_greedy) for prompt in texts.prompts]
        equal = sum(_num_equal(a, b) for a, b in zip(answers, self._answers, strict=True))
        return Quality(
            name,
            weight_bytes,
            perplexity=math.exp(total / count),
            change=math.expm1(total / count - self._loss),
            kl=kl / count,
            top1=same / count,
            greedy=equal / (len(answers) * texts.num_greedy),
        )


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


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
