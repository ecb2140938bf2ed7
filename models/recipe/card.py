"""The model card: facts of the run, samples drawn from the finished model, limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from models.recipe.chat import BOS, EOS, Message, render
from models.recipe.corpus import PACKAGE, Chapter
from models.recipe.network import Llama, Shape
from models.recipe.vocabulary import token_id

QUESTIONS = (
    "Tell me a story about Moses.",
    "Who was David?",
    "Tell me about wisdom.",
    "Repeat: The king went up to the house of his father.",
    "Continue: He said to them, What do you seek?",
)
MAX_NEW = 90


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
    ppl, ppl_byte = math.exp(facts.loss), math.exp(facts.loss / facts.bytes_per_token)
    tokens = facts.steps * facts.tokens_per_step
    curve = "\n".join(f"| {step} | {loss:.3f} | {math.exp(loss):.1f} |" for step, loss in facts.curve)
    shown = "\n\n".join(f"**{s.kind}**\n\n> {_quote(s.prompt)}\n\n{_quote(s.output)}" for s in samples)
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Tandem demo model

A Llama-architecture model of {facts.num_parameters / 1e6:.2f} M parameters for trying and testing the
cluster: it loads in a moment on a CPU, writes recognisable English sentences, answers in its chat template and
ends most answers itself. It knows one book and nothing else.

| | |
| --- | --- |
| layers, hidden, feed-forward | {shape.num_layers}, {shape.hidden_size}, {shape.intermediate_size} |
| query heads, KV heads, head_dim | {shape.num_heads}, {shape.num_kv_heads}, {shape.head_dim} |
| vocabulary | {shape.vocab_size}, byte-level BPE (any text round-trips) |
| positions | {shape.max_position} (RoPE, theta {shape.rope_theta:.0f}) |
| weights | bfloat16, tied embeddings, {facts.weights_bytes:,} bytes |

## Data and licence

- Text: the World English Bible with Deuterocanon, modern English, in the **public domain**, as the Debian
  package `{PACKAGE}` {facts.package_version} carries it. Notes and headings are left out, quotation marks
  made ASCII; the Greek versions of Esther and Daniel and 1 Esdras are left out because they retell other
  books.
- {facts.num_chapters} chapters for training ({facts.corpus_tokens:,} tokens);
  {len(facts.held_out_titles)} chapters held out from training, tokenizer and chat data:
  {", ".join(facts.held_out_titles)}.
- About a fifth of the tokens are dialogues made from the training chapters by `models/recipe/chat.py` (about
  a name or a thing, continue, how a chapter begins, repeat; some with a system message or a second turn).
- The weights and tokenizer are under Apache-2.0, like the project.

## Training

`make demo-model` (`models/recipe/train.py`), from random weights, seed {facts.seed}: {facts.steps} steps of
{facts.tokens_per_step} tokens ({tokens / 1e6:.1f} M tokens, {tokens / facts.corpus_tokens:.1f} times the
corpus' length), in rows of 512 tokens and, in the last 12 % of the steps, of {shape.max_position}. Muon for
the hidden matrices, AdamW for the rest; fp32 on {facts.threads} CPU thread, {facts.wall_minutes:.0f} minutes.

## Held-out perplexity

**{ppl:.2f} per token** ({facts.loss:.3f} nats; {facts.bytes_per_token:.2f} bytes a token),
**{ppl_byte:.3f} per byte** ({facts.loss / facts.bytes_per_token / math.log(2):.3f} bits), measured with the
bfloat16 weights as shipped, over whole held-out chapters in windows of 1024 tokens. The books quote each
other (Kings and Chronicles, the Gospels), so some held-out sentences have near relatives in training.

Seen during training, on a quarter of the held-out chapters:

| step | loss | perplexity |
| ---: | ---: | ---: |
{curve}

## Samples

Drawn by the training recipe from the finished model, not chosen; at most {MAX_NEW} tokens each. The continued
texts are the beginnings of held-out chapters.

{shown}

## Use and limits

For demonstrations, tests and load generation. Its sentences sound like its corpus but rarely add up to sense;
greedy decoding often falls into repetition, and then does not end; asked to repeat or continue a text it
writes another of its own; names and rare words come out invented. It answers every question in the voice of
that one old book, with that book's view of the world, and nothing it states is to be believed. Not for any
use where an answer must be right.
"""


def _quote(text: str) -> str:
    return text.replace("\n", " ")
