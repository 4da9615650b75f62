"""Random choices and templates: what every task of the generator is written with.

A template holds choices, `[this|that|]`, which may be nested, and slots, `{name}`.
"""

import functools
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
WORDS = SimpleNamespace(**tomllib.loads((HERE / "words.toml").read_text(encoding="utf-8")))
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


@dataclass(frozen=True)
class WordNet:
    """What the generator takes from WordNet: words to copy, to define and to reply to."""

    nouns: tuple[str, ...]
    definitions: tuple[tuple[str, str, str], ...]  # (word, part of speech, definition)
    examples: tuple[str, ...]

    @classmethod
    def load(cls, texts: Path | None):
        """Read the lists beside this file, and the example sentences if `texts` holds them."""
        examples = read_lines(texts / "wn_examples.txt") if texts else []
        return cls(
            tuple(read_lines(HERE / "nouns.txt")),
            tuple(tuple(line.split("\t")) for line in read_lines(HERE / "wn_common.txt")),
            tuple(line.strip() for line in examples if 20 <= len(line) < 109),
        )


class Writer(random.Random):
    """A random generator, of one seed, that picks words and fills templates."""

    def __init__(self, seed: int, wordnet: WordNet):
        super().__init__(seed)
        self.wordnet = wordnet

    def pick(self, options):
        return options[int(self.random() * len(options))]

    def fill(self, template: str, /, **slots) -> str:
        """Decide each choice of the template, then fill its slots."""
        text = "".join(self.decide(parse(template)))
        return text.format_map(slots) if "{" in text else text

    def decide(self, parts):
        """Yield the pieces of text of a parsed template."""
        for part in parts:
            if isinstance(part, str):
                yield part
            else:
                yield from self.decide(self.pick(part))

    def made_up_word(self) -> str:
        num_syllables = self.randint(1, 3)
        return "".join(self.syllable() for _ in range(num_syllables))

    def syllable(self) -> str:
        start = self.pick(CONSONANTS) + self.pick(VOWELS)
        return start + (self.pick(CONSONANTS) if self.random() < 0.3 else "")

    def name(self) -> str:
        """A first name, one in twelve made up."""
        x = self.random()
        if x < 0.46:
            return self.pick(WORDS.girls)
        if x < 0.92:
            return self.pick(WORDS.boys)
        return capital(self.made_up_word())

    def noun(self) -> str:
        """A thing of any kind, so that the model learns to copy words it has never seen."""
        if self.random() < 0.8:
            return self.pick(self.wordnet.nouns)
        return self.made_up_word() if self.random() < 0.1 else self.pick(WORDS.objects)


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@functools.cache
def parse(template: str) -> tuple:
    """Template -> a tuple of strings and of choices, each choice a tuple of such tuples."""
    return parse_until(template, 0, "")[0]


def parse_until(template: str, at: int, stops: str) -> tuple[tuple, int]:
    """Parse from `at` to one of the `stops`; return the parts and where the stop is."""
    parts = []
    text = ""
    while at < len(template) and template[at] not in stops:
        if template[at] != "[":
            text += template[at]
            at += 1
            continue
        if text:
            parts.append(text)
            text = ""
        choice = []
        while template[at] != "]":
            option, at = parse_until(template, at + 1, "|]")
            choice.append(option)
        parts.append(tuple(choice))
        at += 1
    if text:
        parts.append(text)
    return tuple(parts), at


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def with_article(noun: str) -> str:
    return ("an " if noun[:1].lower() in VOWELS else "a ") + noun


def listing(items) -> str:
    """`a`, `a and b`, `a, b, and c`."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + ", and " + items[-1]
