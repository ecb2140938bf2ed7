"""Train the demo model's draft: ``python models/recipe/draft.py`` (``make demo-draft``).

A model of a tenth of the size learns what the demo model gives for each next token of its training text, rather than
the text itself: a guess is right where both choose alike. Some minutes on one CPU core.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from models.recipe.chat import BOS, EOS  # noqa: E402
from models.recipe.corpus import Chapter, RecipeError, fetch, read_chapters  # noqa: E402
from models.recipe.data import Rows, Split, chapter_text, split, token_id  # noqa: E402
from models.recipe.export import as_shipped, write_config, write_weights  # noqa: E402
from models.recipe.network import Llama, Shape  # noqa: E402
from models.recipe.optim import Optimizer  # noqa: E402
from models.recipe.train import CACHE, CHAT_SHARE, LONG_SHARE, SHORT_ROW, TOKENS_PER_STEP  # noqa: E402

SHAPE = Shape(hidden_size=96, intermediate_size=160, num_layers=1, num_heads=3, num_kv_heads=1)
REPORT_EVERY = 25


def main(
    steps: Annotated[int, typer.Option(help=f"optimizer steps of {TOKENS_PER_STEP} tokens")] = 500,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option()] = 21,
    target: Annotated[Path, typer.Option(help="the model that it guesses for")] = ROOT / "models" / "demo",
    out: Annotated[Path, typer.Option(help="folder to write")] = ROOT / "models" / "demo-draft",
    cache_dir: Annotated[Path, typer.Option(help="where the Debian package is kept")] = CACHE,
) -> None:
    """Train a draft of the demo model by the demo model's own probabilities."""
    teacher, tokenizer, parts = begin(target, cache_dir, threads, seed)
    model = Llama(SHAPE)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, teacher)]
    print(f"{sizes[0]} parameters beside {sizes[1]}", flush=True)
    train(model, teacher, Rows(tokenizer, parts.train, CHAT_SHARE, seed), steps)
    out.mkdir(parents=True, exist_ok=True)
    write_config(model, out, token_id(tokenizer, BOS), token_id(tokenizer, EOS))
    size = write_weights(model, out)
    found = agreement(as_shipped(model), teacher, tokenizer, parts.held_out)
    print(json.dumps({**found, "bytes": size}), flush=True)


def begin(target: Path, cache_dir: Path, threads: int, seed: int) -> tuple[Llama, Tokenizer, Split]:
    """The model that is guessed for, its tokenizer, and the text that it was trained on. Sets torch's seed and threads,
    before anything is drawn. Raises RecipeError."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    package_root, _ = fetch(cache_dir)
    parts = split(read_chapters(package_root))
    return load(target, Shape()), Tokenizer.from_file(str(target / "tokenizer.json")), parts


def load(folder: Path, shape: Shape) -> Llama:
    """The checkpoint in fp32."""
    model = Llama(shape)
    model.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return model.requires_grad_(requires_grad=False)


def train(model: Llama, teacher: Llama, rows: Rows, steps: int) -> None:
    """Bring the model's probabilities near to the teacher's, in place."""
    optimizer = Optimizer(model, steps)
    num_long, long_row = round(steps * LONG_SHARE), model.shape.max_position
    short, long = (
        rows.batches(TOKENS_PER_STEP // SHORT_ROW, SHORT_ROW),
        rows.batches(TOKENS_PER_STEP // long_row, long_row),
    )
    started = time.monotonic()
    for done in range(1, steps + 1):
        ids = next(long if done > steps - num_long else short)[:, :-1]
        with torch.inference_mode():
            wanted = teacher(ids).log_softmax(-1)
        loss = divergence(model(ids), wanted.clone())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(done - 1)
        if done % REPORT_EVERY == 0:
            speed = done * TOKENS_PER_STEP / (time.monotonic() - started)
            print(f"step {done} divergence {loss.item():.3f} {speed:.0f} tokens/s", flush=True)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence in nats a token; logits, and wanted log-probabilities: [batch, seq, vocab_size]."""
    return F.kl_div(logits.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")


@torch.inference_mode()
def agreement(model: Llama, teacher: Llama, tokenizer: Tokenizer, chapters: list[Chapter]) -> dict[str, float]:
    """Over held-out chapters: nats of divergence a token, the share of tokens of which both find the same likeliest,
    and the mean overlap of the two distributions, which no sampling of guesses can pass."""
    sums, count = torch.zeros(3), 0
    for chapter in chapters:
        ids = torch.tensor([tokenizer.encode(chapter_text(chapter), add_special_tokens=False).ids[:1024]])
        ours, wanted = model(ids).log_softmax(-1), teacher(ids).log_softmax(-1)
        same = (ours.argmax(-1) == wanted.argmax(-1)).sum()
        overlap = torch.minimum(ours, wanted).exp().sum()
        sums += torch.stack((divergence(ours, wanted) * ids.shape[1], same.float(), overlap))
        count += ids.shape[1]
    return dict(zip(("divergence", "same_likeliest", "overlap"), (sums / count).tolist(), strict=True))


if __name__ == "__main__":
    try:
        typer.run(main)
    except RecipeError as error:
        sys.exit(f"demo draft: {error}")
