"""Train a head for the demo model: ``python models/recipe/head.py`` (``make demo-head``).

One layer more learns what the demo model gives for the token after the next one, of its training text, also from what
it gave itself one and two tokens before. The folder has the demo model with it. Some minutes on one CPU core.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from models.recipe.corpus import RecipeError  # noqa: E402
from models.recipe.data import Rows, chapter_text  # noqa: E402
from models.recipe.draft import begin, divergence  # noqa: E402
from models.recipe.network import Layer, Llama, Shape  # noqa: E402
from models.recipe.optim import Optimizer  # noqa: E402
from models.recipe.train import CACHE, CHAT_SHARE, SHORT_ROW, TOKENS_PER_STEP  # noqa: E402

REPORT_EVERY = 25
WEIGHTS = (1.0, 0.7, 0.5)
"""Weights of the losses by depth: guesses from the model's own states first, then from the head's."""


class Head(Layer):
    """Named as in published checkpoints with multi-token prediction."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.enorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hnorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(shape.hidden_size, shape.norm_eps)})
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.03)

    def guess(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All [batch, seq, hidden] but the angles; embedded: of the tokens behind."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        out: Tensor = self.shared_head["norm"](self(x, cos, sin))
        return out


def states(model: Llama, ids: Tensor) -> Tensor:
    """[batch, seq, hidden] behind the final norm."""
    cos, sin = model.get_buffer("cos")[: ids.shape[1]], model.get_buffer("sin")[: ids.shape[1]]
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = layer(x, cos, sin)
    out: Tensor = model.model.norm(x)
    return out


def guesses(head: Head, model: Llama, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
    """Logits by depth, d = 1, 2, …: [batch, seq - d, vocab_size] of the tokens behind d + 1, d + 2, …"""
    found: list[Tensor] = []
    cos, sin, embedding = model.get_buffer("cos"), model.get_buffer("sin"), model.model.embed_tokens.weight
    for d in range(1, depth + 1):
        embedded = F.embedding(ids[:, d:], embedding)
        count = embedded.shape[1]
        hidden = head.guess(embedded, hidden[:, :count], cos[d - 1 : d - 1 + count], sin[d - 1 : d - 1 + count])
        found.append(F.linear(hidden, embedding))
    return found


def main(
    steps: Annotated[int, typer.Option(help=f"optimizer steps of {TOKENS_PER_STEP} tokens")] = 180,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seed: Annotated[int, typer.Option()] = 22,
    target: Annotated[Path, typer.Option(help="the model that it guesses for")] = ROOT / "models" / "demo",
    out: Annotated[Path, typer.Option(help="folder to write")] = ROOT / "models" / "demo-head",
    cache_dir: Annotated[Path, typer.Option(help="where the Debian package is kept")] = CACHE,
) -> None:
    """Train a head of the demo model by the demo model's own probabilities."""
    teacher, tokenizer, parts = begin(target, cache_dir, threads, seed)
    head = Head(Shape())
    optimizer = Optimizer(head, steps)
    batches = Rows(tokenizer, parts.train, CHAT_SHARE, seed).batches(TOKENS_PER_STEP // SHORT_ROW, SHORT_ROW)
    started = time.monotonic()
    for done in range(1, steps + 1):
        ids = next(batches)[:, :-1]
        with torch.no_grad():
            hidden = states(teacher, ids)
            wanted = F.linear(hidden, teacher.model.embed_tokens.weight).log_softmax(-1)
        found = guesses(head, teacher, ids, hidden, len(WEIGHTS))
        losses = [divergence(logits, wanted[:, depth:]) for depth, logits in enumerate(found, 1)]
        loss = sum((weight * part for weight, part in zip(WEIGHTS, losses, strict=True)), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(done - 1)
        if done % REPORT_EVERY == 0:
            speed = done * TOKENS_PER_STEP / (time.monotonic() - started)
            shown = " ".join(f"{part.item():.3f}" for part in losses)
            print(f"step {done} divergence {shown} {speed:.0f} tokens/s", flush=True)
    write(head, target, out)
    same = torch.zeros(3)
    with torch.inference_mode():
        for chapter in parts.held_out:
            ids = torch.tensor([tokenizer.encode(chapter_text(chapter), add_special_tokens=False).ids[:1024]])
            hidden = states(teacher, ids)
            chosen = F.linear(hidden, teacher.model.embed_tokens.weight).argmax(-1)
            found = guesses(head, teacher, ids, hidden, 3)
            for depth, logits in enumerate(found, 1):
                same[depth - 1] += (logits.argmax(-1) == chosen[:, depth:]).float().mean() / len(parts.held_out)
    print(json.dumps({"same_likeliest_by_depth": [round(share, 3) for share in same.tolist()]}), flush=True)


def write(head: Head, target: Path, out: Path) -> None:
    """The target with the head, as one folder."""
    out.mkdir(parents=True, exist_ok=True)
    for file in target.iterdir():
        if file.name not in ("model.safetensors", "README.md", "held_out.txt"):
            shutil.copyfile(file, out / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    number = config["num_hidden_layers"]
    text = json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    own = {f"model.layers.{number}.{name}": weight.bfloat16() for name, weight in head.state_dict().items()}
    save_file({**load_file(target / "model.safetensors"), **own}, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    try:
        typer.run(main)
    except RecipeError as error:
        sys.exit(f"demo head: {error}")
