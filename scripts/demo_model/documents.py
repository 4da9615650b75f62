"""Mixes the tasks into documents: chats of one or more tasks, and plain stories.

Prints samples:  python documents.py --seed 1 --count 5
"""

import argparse
import itertools
from pathlib import Path

import chat_tasks
import edit_tasks
import fact_tasks
import number_tasks
import reading_tasks
import story_tasks
from stories import story
from writer import WORDS, WordNet, Writer

# Target share of the characters of all chat turns. Drawing tasks by these numbers alone would give
# stories three quarters of the text, so `task_weights` divides by the tasks' mean lengths.
SHARES = {
    story_tasks.tell_story: 30,
    story_tasks.story_of_any_noun: 4,
    story_tasks.read_story: 10,
    reading_tasks.read_facts: 9,
    edit_tasks.edit: 9,
    edit_tasks.repeat: 3,
    number_tasks.arithmetic: 5,
    number_tasks.told_sum: 3,
    fact_tasks.name_some: 2,
    fact_tasks.capital_city: 2,
    fact_tasks.animal: 2,
    fact_tasks.word_form: 2,
    fact_tasks.job_or_tool: 2,
    chat_tasks.persona: 3,
    chat_tasks.remember: 3,
    fact_tasks.explain: 3,
    chat_tasks.joke: 0.5,
    fact_tasks.how_to: 1.5,
    story_tasks.poem: 1,
    story_tasks.letter: 1.5,
    fact_tasks.python_function: 1,
    story_tasks.describe: 1,
    fact_tasks.define: 2,
    chat_tasks.admit_ignorance: 1.5,
    chat_tasks.reply_to_anything: 0.5,
}
TASKS = list(SHARES)


class Documents:
    """An endless source of documents, the same for the same seed.

    A document is a list of (role, text): a chat, or one entry of the role "plain".
    """

    def __init__(self, seed: int, wordnet: WordNet):
        self.writer = Writer(seed, wordnet)
        self.weights = task_weights(wordnet)

    def next(self) -> list[tuple[str, str]]:
        x = self.writer.random()
        if x < 0.06:
            return [("plain", plain_story(self.writer))]
        if x < 0.065:
            text = edit_tasks.sentences(self.writer, self.writer.randint(4, 12))
            return [("plain", text)]
        return self.chat()

    def chat(self) -> list[tuple[str, str]]:
        writer = self.writer
        turns = []
        for _ in range(self.num_tasks()):
            task = writer.choices(TASKS, cum_weights=self.weights)[0]
            turns += task(writer)
        messages = []
        if writer.random() < 0.25:
            messages.append(("system", writer.pick(WORDS.system_prompts)))
        for request, answer in turns:
            messages += [("user", request), ("assistant", answer)]
        return messages

    def num_tasks(self) -> int:
        """Mostly one; a few long chats teach long contexts."""
        x = self.writer.random()
        if x < 0.58:
            return 1
        return self.writer.randint(2, 4) if x < 0.94 else self.writer.randint(5, 14)


def plain_story(writer: Writer) -> str:
    told = story(writer)
    title = f"{told.title}\n\n" if writer.random() < 0.6 else ""
    return title + told.text


def task_weights(wordnet: WordNet) -> list[float]:
    """Cumulative weights of the tasks, from their shares and their mean lengths."""
    writer = Writer(12345, wordnet)
    num_samples = 150
    weights = []
    for task, share in SHARES.items():
        turns = [turn for _ in range(num_samples) for turn in task(writer)]
        num_chars = sum(len(request) + len(answer) for request, answer in turns)
        weights.append(share / (num_chars / num_samples))
    return list(itertools.accumulate(weights))


def render(document: list[tuple[str, str]]) -> str:
    """The document as the model reads it, in LFM2's chat format."""
    if document[0][0] == "plain":
        return f"<|startoftext|>{document[0][1]}<|endoftext|>"
    messages = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in document)
    return "<|startoftext|>" + "".join(messages)


def main():
    parser = argparse.ArgumentParser(description="Print documents of the text generator.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10, help="how many documents")
    parser.add_argument("--texts", type=Path, help="the folder that extract.py filled, if any")
    options = parser.parse_args()
    documents = Documents(options.seed, WordNet.load(options.texts))
    for _ in range(options.count):
        print(render(documents.next()), end="\n=====\n")


if __name__ == "__main__":
    main()
