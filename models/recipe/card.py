"""The model card: facts of the run, samples drawn from the finished model, limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from models.recipe.chat import BOS, EOS, Message, render
from models.recipe.corpus import PACKAGE, Chapter
from models.recipe.data import token_id
from models.recipe.network import Llama, Shape

QUESTIONS = (
    "Tell me a story about Moses.",
    "Who was David?",
    "Tell me about wisdom.",
    "Repeat: The king went up to the house of his father.",
    "Continue: He said to them, What do you seek?",
)
MAX_NEW = 90
CARD = Path(__file__).with_name("card.md")
"""The card, with names in braces for what the run found."""


@dataclass(frozen=True)
class Facts:
    """Parameters and results of the training run."""

    package_version: str
    num_chapters: int
    held_out_titles: tuple[str, ...]
    corpus_tokens: int
    num_parameters: int
    weights_bytes: int
    steps: int
    tokens_per_step: int
    wall_minutes: float
    threads: int
    seed: int
    loss: float  # nats a token, held out
    bytes_per_token: float
    curve: tuple[tuple[int, float], ...]  # (step, held-out loss of a quarter of the chapters)


@dataclass(frozen=True)
class Sample:
    """One prompt and the model's output, without EOS."""

    kind: str
    prompt: str
    output: str


def draw_samples(model: Llama, tokenizer: Tokenizer, held_out: Sequence[Chapter]) -> list[Sample]:
    """Greedy continuations of held-out chapters, greedy chat answers and one sampled answer each."""
    eos = token_id(tokenizer, EOS)

    def write(prompt: str, temperature: float) -> str:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        out: str = tokenizer.decode(model.generate(ids, MAX_NEW, eos, temperature, seed=1), skip_special_tokens=True)
        return out.strip()

    samples = []
    for chapter in (held_out[0], held_out[len(held_out) // 2], held_out[-5]):
        prompt = " ".join(chapter.text.partition("\n")[2].split()[:24])
        samples.append(Sample("greedy continuation", prompt, write(BOS + prompt, 0.0)))
    for kind, temperature in (("greedy answer", 0.0), ("sampled answer, temperature 0.8", 0.8)):
        for question in QUESTIONS:
            chat = render([Message("user", question)]) + "<|assistant|>"
            samples.append(Sample(kind, question, write(chat, temperature)))
    return samples


def render_card(facts: Facts, shape: Shape, samples: Sequence[Sample]) -> str:
    """The card as Markdown with a YAML header."""
    tokens, loss_per_byte = facts.steps * facts.tokens_per_step, facts.loss / facts.bytes_per_token
    return CARD.read_text().format(
        facts=facts,
        shape=shape,
        package=PACKAGE,
        max_new=MAX_NEW,
        millions=facts.num_parameters / 1e6,
        num_held_out=len(facts.held_out_titles),
        held_out=", ".join(facts.held_out_titles),
        million_tokens=tokens / 1e6,
        epochs=tokens / facts.corpus_tokens,
        perplexity=math.exp(facts.loss),
        perplexity_per_byte=math.exp(loss_per_byte),
        bits_per_byte=loss_per_byte / math.log(2),
        curve="\n".join(f"| {step} | {loss:.3f} | {math.exp(loss):.1f} |" for step, loss in facts.curve),
        samples="\n\n".join(f"**{s.kind}**\n\n> {_quote(s.prompt)}\n\n{_quote(s.output)}" for s in samples),
    )


def _quote(text: str) -> str:
    return text.replace("\n", " ")
