"""Changing and repeating short texts, which teaches the model to copy.

A task takes a writer and returns the turns of a chat: [(what the user says, the answer), ...].
"""

import json
from dataclasses import dataclass

from writer import WORDS, capital, listing, lower, with_article

VERBS = [verb for verb in WORDS.verbs if verb[0] in WORDS.edit_verbs]
SORTED = ["fruits", "vegetables", "sports", "clothes", "flowers", "vehicles", "drinks"]
REVERSED = ["fruits", "vegetables", "sports", "clothes", "flowers", "animals"]


@dataclass(frozen=True)
class Sentence:
    """A simple sentence in each tense."""

    has_name: bool
    verb: str  # in the past tense
    past: str
    present: str
    future: str


def sentence(writer) -> Sentence:
    subject = writer.pick(WORDS.subjects)
    base, past, present, _ = writer.pick(VERBS)
    end = f"{writer.pick(WORDS.edit_objects)} {writer.pick(WORDS.adverbials)}."
    has_name = writer.random() < 0.4
    if has_name:
        subject = writer.name()
    subject = capital(subject)
    return Sentence(
        has_name,
        past,
        f"{subject} {past} {end}",
        f"{subject} {present} {end}",
        f"{subject} will {base} {end}",
    )


def sentences(writer, count: int) -> str:
    return " ".join(sentence(writer).past for _ in range(count))


def repeat(writer):
    if writer.random() < 0.5:
        count = writer.randint(1, 5)
        word = writer.noun()
        times = f" {count} times" if count > 1 else ""
        return [(f'Say "{word}"{times}.', " ".join([word] * count))]
    text = sentences(writer, writer.randint(1, 4))
    request = writer.fill("[Repeat this text|Copy this text|Repeat after me|Write this again]")
    return [(request + writer.pick([": ", ":\n\n"]) + text, text)]


def edit(writer):
    """One of the edits below; each gets the sentence and what separates request and text."""
    given = sentence(writer)
    chosen = EDITS[writer.randint(0, len(EDITS) - 1)]
    return [chosen(writer, given, writer.pick([": ", ":\n", "\n\n"]))]


def to_present(writer, given, separator):
    request = writer.fill(
        "[Change this sentence to the present tense|Rewrite in the present tense"
        "|Put this sentence in the present tense]"
    )
    return request + separator + given.past, given.present


def to_past(writer, given, separator):
    request = writer.fill(
        "[Change this sentence to the past tense|Rewrite in the past tense"
        "|Put this sentence in the past tense]"
    )
    return request + separator + given.present, given.past


def to_future(writer, given, separator):
    request = writer.fill("[Make this sentence future tense|Rewrite in the future tense]")
    return request + separator + given.past, given.future


def to_upper_case(writer, given, separator):
    request = writer.fill(
        "[Write this in upper case|Make this text uppercase|Convert to capital letters]"
    )
    return request + separator + given.past, given.past.upper()


def to_lower_case(writer, given, separator):
    request = writer.fill(
        "[Write this in lower case|Make this text lowercase|Convert to lower case]"
    )
    return request + separator + given.past.upper(), given.past.lower()


def replace_word(writer, given, separator):
    words = given.past[:-1].split()
    old = writer.pick(words)
    candidates = [
        writer.made_up_word(),
        writer.pick(WORDS.categories["colors"][:-1]),
        writer.pick(WORDS.rooms).split()[0],
        writer.name(),
    ]
    new = writer.pick(candidates)
    answer = " ".join(new if word == old else word for word in words) + "."
    return f'Replace "{old}" with "{new}" in this sentence{separator}{given.past}', answer


def sort_list(writer, given, separator):
    members = WORDS.categories[writer.pick(SORTED)]
    words = writer.sample(members, writer.randint(3, 5))
    request = writer.fill(
        "[Sort these words alphabetically|Put these words in alphabetical order|Sort this list]"
    )
    return f"{request}: {', '.join(words)}", ", ".join(sorted(words))


def reverse_list(writer, given, separator):
    members = WORDS.categories[writer.pick(REVERSED)]
    words = writer.sample(members, writer.randint(3, 6))
    request = writer.fill("[Reverse this list|Write this list in reverse order]")
    return f"{request}: {', '.join(words)}", ", ".join(words[::-1])


def bullet_list(writer, given, separator):
    words = writer.sample(WORDS.foods + WORDS.objects, writer.randint(3, 5))
    request = writer.fill("[Turn this into a bullet list|Make a bullet list|Write this as a list]")
    answer = "\n".join(f"- {capital(word)}" for word in words)
    return f"{request}{separator}{capital(listing(words))}.", answer


def count_words(writer, given, separator):
    request = writer.fill("[How many words are in this sentence?|Count the words.]")
    count = len(given.past.split())
    return f"{request} {given.past}", f"There are {count} words in this sentence."


def to_json(writer, given, separator):
    name, age = writer.name(), writer.randint(5, 90)
    city = writer.pick(WORDS.capitals)[1]
    job = writer.pick(WORDS.jobs)[0]
    request = writer.fill("[Extract the data as JSON|Convert this to JSON|Write this as JSON]")
    text = f"{name} is {age} years old, lives in {city}, and works as {with_article(job)}."
    record = dict(name=name, age=age, city=city, job=job)
    return request + separator + text, json.dumps(record, ensure_ascii=False)


def fix_spelling(writer, given, separator):
    """Swap two neighboring letters of a word of three letters or more."""
    words = given.past[:-1].split()
    word = writer.pick(words)
    if len(word) < 3:
        word = given.verb
    i = writer.randint(0, len(word) - 2)
    wrong = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    request = writer.fill("[Fix the spelling|Correct the spelling mistake|Fix the typo]")
    return request + separator + given.past.replace(word, wrong, 1), given.past


def fix_punctuation(writer, given, separator):
    request = writer.fill(
        "[Add the missing capital letter and period|Fix the punctuation and capital letters]"
    )
    return request + separator + lower(given.past[:-1]), given.past


def join_sentences(writer, given, separator):
    other = sentence(writer)
    second = other.past if other.has_name else lower(other.past)
    request = writer.fill(
        '[Combine these two sentences with "and"|Join these sentences with "and"]'
    )
    return f"{request}{separator}{given.past} {other.past}", f"{given.past[:-1]} and {second}"


EDITS = (
    to_present,
    to_past,
    to_future,
    to_upper_case,
    to_lower_case,
    replace_word,
    sort_list,
    reverse_list,
    bullet_list,
    count_words,
    to_json,
    fix_spelling,
    fix_punctuation,
    join_sentences,
)
