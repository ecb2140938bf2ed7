"""Chat-formatted training data from the corpus, so that the model learns the chat template.

Every dialogue answers with verses of the corpus: about a name or a thing, the continuation of a verse, the beginning of
a chapter, or a repetition. A second turn ("Go on.") continues where the first one stopped.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from models.recipe.corpus import Chapter

ROLES = ("system", "user", "assistant")
BOS, EOS = "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (BOS, EOS, *(f"<|{role}|>" for role in ROLES))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You are a storyteller. Answer in a few sentences.",
    "Answer briefly.",
    "You tell old stories in plain English.",
)
ABOUT = (
    "Tell me about {}.",
    "Tell me a story about {}.",
    "What do you know about {}?",
    "Write a few sentences about {}.",
    "What is written about {}?",
    "Tell me something about {}.",
)
ABOUT_NAME = (*ABOUT, "Who is {}?", "Who was {}?", "What did {} do?")
CONTINUE = ("Continue: {}", "Continue this text: {}", "What comes after this? {}")
BEGIN = ("How does {} begin?", "Read me the beginning of {}.")
REPEAT = ("Repeat: {}", "Repeat after me: {}", "Say this again: {}")
MORE = ("Go on.", "Please go on.", "What happened then?", "And then?", "Tell me more.")
THINGS = (  # [article:]word[:the word to look up]
    "love, faith, wisdom, water, fire, bread, wine, gold, silver, peace, war, light, darkness, death, "
    "life, joy, fear, sin, mercy, anger, justice, truth, prayer, money, work, sleep, food, marriage, "
    "friendship, children, kings, prophets, priests, soldiers, angels, sheep, lions, horses, birds, "
    "fish, trees, mountains, rivers, the:sea, the:sun, the:moon, the:stars, the:temple, the:city, "
    "the:desert:wilderness, the:king, the:law, the:earth, the:sky, the:wind, the:rain, a:king, a:woman, "
    "a:father, a:mother, a:son, a:brother, a:servant, a:prophet, a:priest, a:house, a:vineyard, "
    "a:sword, a:ship, a:feast, a:dream, a:tower, a:garden"
)
OPENING = frozenset('"ABCDEFGHIJKLMNOPQRSTUVWXYZ')  # first characters of a verse that begins a sentence


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str


def render(messages: Sequence[Message], bos: str = BOS, eos: str = EOS) -> str:
    """The text that TEMPLATE renders for a whole dialogue (no generation prompt)."""
    return bos + "".join(f"<|{m.role}|>{m.content.strip()}{eos}" for m in messages)


class Dialogues:
    """An endless, seeded source of dialogues over the given chapters."""

    def __init__(self, chapters: Sequence[Chapter], seed: int) -> None:
        self.chapters = chapters
        self.random = random.Random(seed)
        self.places = [(c, v) for c, chapter in enumerate(chapters) for v in range(len(chapter.verses))]
        self.by_word: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place in self.places:
            for word in set(re.findall(r"[A-Za-z]+", self._verse(*place))):
                self.by_word[word].append(place)
        names: Counter[str] = Counter()
        for chapter in chapters:
            for verse in chapter.verses:
                names.update(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", verse))
        self.names = [name for name, n in names.items() if n >= 12 and not self.by_word.get(name.lower())]

    def draw(self) -> list[Message]:
        """One dialogue of one or two turns."""
        kind = self.random.choices((self._about, self._continue, self._begin, self._repeat), (55, 25, 8, 12))[0]
        question, (chapter, verse), answer = kind()
        messages = [Message("user", question), Message("assistant", answer)]
        if self.random.random() < 0.3:
            messages.insert(0, Message("system", self.random.choice(SYSTEMS)))
        if verse < len(self.chapters[chapter].verses) and self.random.random() < 0.35:
            more, _ = self._passage(chapter, verse, self.random.randint(1, 3))
            messages += [Message("user", self.random.choice(MORE)), Message("assistant", more)]
        return messages

    def _about(self) -> tuple[str, tuple[int, int], str]:
        if self.random.random() < 0.6:
            word = topic = self.random.choice(self.names)
            question = self.random.choice(ABOUT_NAME)
        else:
            *article, word = self.random.choice(THINGS.split(", ")).split(":")
            topic = " ".join([*article, word])
            question = self.random.choice(ABOUT)
        places = self.by_word[word] or self.places
        opening = [place for place in self.random.choices(places, k=8) if self._verse(*place)[0] in OPENING]
        chapter, verse = opening[0] if opening else self.random.choice(places)
        answer, end = self._passage(chapter, verse, self.random.randint(1, 4))
        return question.format(topic), (chapter, end), answer

    def _continue(self) -> tuple[str, tuple[int, int], str]:
        chapter, verse = self.random.choice(self.places)
        verse = max(0, min(verse, len(self.chapters[chapter].verses) - 2))
        answer, end = self._passage(chapter, verse + 1, self.random.randint(1, 3))
        return self.random.choice(CONTINUE).format(self._verse(chapter, verse)), (chapter, end), answer

    def _begin(self) -> tuple[str, tuple[int, int], str]:
        chapter = self.random.randrange(len(self.chapters))
        answer, end = self._passage(chapter, 0, self.random.randint(1, 4))
        return self.random.choice(BEGIN).format(self.chapters[chapter].title), (chapter, end), answer

    def _repeat(self) -> tuple[str, tuple[int, int], str]:
        chapter, verse = self.random.choice(self.places)
        text = self._verse(chapter, verse)
        return self.random.choice(REPEAT).format(text), (chapter, len(self.chapters[chapter].verses)), text

    def _verse(self, chapter: int, verse: int) -> str:
        return self.chapters[chapter].verses[verse].strip()

    def _passage(self, chapter: int, verse: int, num_verses: int) -> tuple[str, int]:
        """Text of at least ``num_verses`` verses, up to a sentence's end, and the verse after it."""
        verses = self.chapters[chapter].verses
        end = min(verse + num_verses, len(verses))
        while end < min(verse + 8, len(verses)) and not verses[end - 1].endswith((".", "!", "?", '"')):
            end += 1
        return " ".join(v.strip() for v in verses[verse:end]), end
