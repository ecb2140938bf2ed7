"""Train the demo model from nothing: ``python models/recipe/train.py`` (``make demo-model``).

Fetches the corpus, trains the tokenizer and the model, measures held-out perplexity, and writes ``models/demo``; about
40 minutes on one CPU core. A usable checkpoint exists after the first few minutes and is replaced as training goes
on.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from models.recipe import card  # noqa: E402
from models.recipe.chat import BOS, EOS  # noqa: E402
from models.recipe.corpus import Chapter, RecipeError, fetch, read_chapters  # noqa: E402
from models.recipe.data import Rows, Split, chapter_text, split, token_id, train_tokenizer, write_tokenizer  # noqa: E402  # noqa: E402
from models.recipe.export import as_shipped, write_config, write_weights  # noqa: E402
from models.recipe.network import Llama, Shape  # noqa: E402
from models.recipe.optim import Optimizer  # noqa: E402

TOKENS_PER_STEP = 4096
LONG_SHARE = 0.12  # the last steps see rows of max_position tokens, so that long prompts work
SHORT_ROW = 512
CHAT_SHARE = 0.22
EVAL_EVERY = 60
CACHE = Path.home() / ".cache" / "tandem" / "demo-model"


def main(
    steps: Annotated[int, typer.Option(help=f"optimizer steps of {TOKENS_PER_STEP} tokens")] = 1050,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option()] = 20,
    out: Annotated[Path, typer.Option(help="folder to write")] = ROOT / "models" / "demo",
    cache_dir: Annotated[Path, typer.Option(help="where the Debian package is kept")] = CACHE,
) -> None:
    """Train the demo model from nothing: corpus, tokenizer, weights, model card."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    package_root, version = fetch(cache_dir)
    parts = split(read_chapters(package_root))
    shape = Shape()
    tokenizer = train_tokenizer((c.text for c in parts.train), shape.vocab_size)
    model = Llama(shape)
    rows = Rows(tokenizer, parts.train, CHAT_SHARE, seed)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(parts.train)} chapters, {len(rows.stream)} tokens, {num_parameters} parameters", flush=True)

    started = time.monotonic()
    curve = train(model, tokenizer, rows, parts, steps, out)
    run = Run(version, steps, threads, seed, time.monotonic() - started, curve)
    finish(model, tokenizer, parts, len(rows.stream), run, out)


@dataclass(frozen=True)
class Run:
    """Parameters and results of the training loop."""

    package_version: str
    steps: int
    threads: int
    seed: int
    wall_s: float
    curve: tuple[tuple[int, float], ...]  # (step, held-out loss of a quarter of the chapters)


def train(
    model: Llama, tokenizer: Tokenizer, rows: Rows, parts: Split, steps: int, out: Path
) -> tuple[tuple[int, float], ...]:
    """Train in place, writing a checkpoint to ``out`` each EVAL_EVERY steps; returns the held-out curve."""
    optimizer = Optimizer(model, steps)
    curve: list[tuple[int, float]] = []
    started = time.monotonic()
    for done, batch in enumerate(_schedule(rows, steps, model.shape.max_position), start=1):
        loss = model.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(done - 1)
        if done % 10 == 0:
            speed = done * TOKENS_PER_STEP / (time.monotonic() - started)
            print(f"step {done} loss {loss.item():.3f} {speed:.0f} tokens/s", flush=True)
        if done % EVAL_EVERY == 0 and done < steps:
            curve.append((done, held_out(model, tokenizer, parts.held_out[::4])["loss"]))
            print(f"step {done} held-out loss {curve[-1][1]:.3f} (a quarter of the chapters)", flush=True)
            write_checkpoint(model, tokenizer, out)
    return tuple(curve)


def finish(model: Llama, tokenizer: Tokenizer, parts: Split, corpus_tokens: int, run: Run, out: Path) -> None:
    """Write the final files and, measured on the weights as written, the model card."""
    size = write_checkpoint(model, tokenizer, out)
    shipped = as_shipped(model)
    result = held_out(shipped, tokenizer, parts.held_out)
    print(json.dumps(result), flush=True)
    facts = card.Facts(
        package_version=run.package_version,
        num_chapters=len(parts.train),
        held_out_titles=tuple(c.title for c in parts.held_out),
        corpus_tokens=corpus_tokens,
        num_parameters=sum(p.numel() for p in model.parameters()),
        weights_bytes=size,
        steps=run.steps,
        tokens_per_step=TOKENS_PER_STEP,
        wall_minutes=run.wall_s / 60,
        threads=run.threads,
        seed=run.seed,
        loss=result["loss"],
        bytes_per_token=result["bytes"] / result["tokens"],
        curve=run.curve,
    )
    write_held_out(parts.held_out, out)
    samples = card.draw_samples(shipped, tokenizer, parts.held_out)
    (out / "README.md").write_text(card.render_card(facts, model.shape, samples), encoding="utf-8")


def write_held_out(chapters: list[Chapter], out: Path) -> None:
    """Write every third of the chapters, for `make eval`."""
    (out / "held_out.txt").write_text("\n\n".join(c.text for c in chapters[::3]) + "\n", encoding="utf-8")


def write_checkpoint(model: Llama, tokenizer: Tokenizer, out: Path) -> int:
    """Write tokenizer, config and, last, weights; returns the weights' bytes."""
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, out, model.shape.max_position)
    write_config(model, out, token_id(tokenizer, BOS), token_id(tokenizer, EOS))
    return write_weights(model, out)


@torch.inference_mode()
def held_out(model: Llama, tokenizer: Tokenizer, chapters: list[Chapter], window: int = 1024) -> dict[str, float]:
    """Loss in nats a token over whole chapters, each from its BOS, in windows of ``window`` tokens."""
    total, tokens, size = 0.0, 0, 0
    for chapter in chapters:
        ids = tokenizer.encode(chapter_text(chapter), add_special_tokens=False).ids
        size += len(chapter.text.encode())
        for start in range(0, len(ids) - 1, window):
            piece = torch.tensor([ids[start : start + window + 1]])
            if piece.shape[1] > 1:
                total += model.loss(piece, reduction="sum").item()
                tokens += piece.shape[1] - 1
    loss = total / tokens
    return {
        "loss": loss,
        "tokens": tokens,
        "bytes": size,
        "ppl": math.exp(loss),
        "ppl_byte": math.exp(total / size),
    }


def _schedule(rows: Rows, steps: int, long_row: int) -> Iterator[torch.Tensor]:
    num_long = round(steps * LONG_SHARE)
    short = rows.batches(TOKENS_PER_STEP // SHORT_ROW, SHORT_ROW)
    for _ in range(steps - num_long):
        yield next(short)
    long = rows.batches(TOKENS_PER_STEP // long_row, long_row)
    for _ in range(num_long):
        yield next(long)


if __name__ == "__main__":
    try:
        typer.run(main)
    except RecipeError as error:
        sys.exit(f"demo model: {error}")
