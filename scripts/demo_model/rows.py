"""Packs documents into rows of tokens of one length, with a weight for each token's loss.

Run as a script it writes a file of rows for train.py, with one process a core.
"""

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from documents import Documents, render
from writer import WordNet, read_lines

NATURAL_TEXTS = ("austen", "moby", "sotu1934on", "wn_examples")
IM_START = 6
IM_END = 7
# Mean tokens of a natural and of a generated document; they turn a share of tokens into a share of
# documents.
NATURAL_TOKENS = 420
GENERATED_TOKENS = 125
NUM_CANDIDATES = 8
ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Rows:
    """Arrays (rows, length): token, weight of its loss (0 or 1), position in its document."""

    tokens: np.ndarray
    weights: np.ndarray
    positions: np.ndarray

    @classmethod
    def joined(cls, parts: list["Rows"]) -> "Rows":
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.weights for part in parts]),
            np.concatenate([part.positions for part in parts]),
        )

    @classmethod
    def load(cls, file: Path) -> "Rows":
        with np.load(file) as arrays:
            return cls(**arrays)


class RowSource:
    """An endless source of rows. `natural_share` of the tokens come from the natural texts."""

    def __init__(self, tokenizer_file: Path, texts: Path, natural_share: float, seed: int):
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.documents = Documents(seed, WordNet.load(texts))
        self.random = self.documents.writer
        self.natural_share = natural_share
        self.natural = [
            [line for line in read_lines(texts / f"{name}.txt") if line] for name in NATURAL_TEXTS
        ]
        self.natural_sizes = [sum(map(len, paragraphs)) for paragraphs in self.natural]
        encoded = self.tokenizer.encode("assistant\n", add_special_tokens=False)
        self.answer_start = [IM_START, *encoded.ids]
        self.pool = []

    def rows(self, count: int, length: int) -> Rows:
        """Lay documents end to end. A row begins with a document; its last one is cut."""
        rows = Rows(
            np.zeros((count, length), np.uint16),
            np.zeros((count, length), np.uint8),
            np.zeros((count, length), np.uint16),
        )
        for i in range(count):
            filled = 0
            while filled < length:
                ids, weights = self.take(length - filled)
                end = min(filled + len(ids), length)
                rows.tokens[i, filled:end] = ids[: end - filled]
                rows.weights[i, filled:end] = weights[: end - filled]
                rows.positions[i, filled:end] = np.arange(end - filled)
                filled = end
        return rows

    def take(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Take the newest document of a few that fits into the room, else the newest."""
        if not self.pool:
            self.pool = self.encode_batch(64)
        newest = range(len(self.pool) - 1, max(-1, len(self.pool) - 1 - NUM_CANDIDATES), -1)
        fitting = (i for i in newest if len(self.pool[i][0]) <= room)
        return self.pool.pop(next(fitting, len(self.pool) - 1))

    def encode_batch(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids and loss weights of `count` new documents."""
        share = self.natural_share
        ratio = NATURAL_TOKENS / GENERATED_TOKENS
        natural_documents = share / (share + (1 - share) * ratio)
        texts = [
            self.natural_document()
            if self.random.random() < natural_documents
            else render(self.documents.next())
            for _ in range(count)
        ]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(np.asarray(one.ids), self.loss_weights(one.ids)) for one in encoded]

    def natural_document(self) -> str:
        """Some 1,500 characters of whole paragraphs of one of the texts."""
        paragraphs = self.random.choices(self.natural, self.natural_sizes)[0]
        i = self.random.randrange(len(paragraphs))
        chosen = []
        while i < len(paragraphs) and sum(map(len, chosen)) < 1500:
            chosen.append(paragraphs[i])
            i += 1
        return "<|startoftext|>" + "\n\n".join(chosen)[:2000] + "<|endoftext|>"

    def loss_weights(self, ids: list[int]) -> np.ndarray:
        """Of a chat, 1 on the answers and the tokens that end them; of a text, 1 on all."""
        weights = np.ones(len(ids), np.uint8)
        weights[0] = 0
        if ids[1] != IM_START:
            return weights
        weights[:] = 0
        width = len(self.answer_start)
        for at in np.flatnonzero(np.asarray(ids) == IM_START):
            if ids[at : at + width] == self.answer_start:
                end = ids.index(IM_END, at)
                weights[at + width : end + 1] = 1
        return weights


def write(job) -> Rows:
    """Make rows for `options.seconds`, from the seed of this process."""
    options, seed = job
    source = RowSource(
        options.tokenizer / "tokenizer.json", options.texts, options.natural_share, seed
    )
    # One token more than the model reads at once: the last is only predicted.
    parts = [source.rows(ROWS_AT_ONCE, options.length + 1)]
    end = time.time() + options.seconds
    while time.time() < end:
        parts.append(source.rows(ROWS_AT_ONCE, options.length + 1))
    return Rows.joined(parts)


def main():
    parser = argparse.ArgumentParser(
        description="Write rows of tokens for train.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="the folder of extract.py")
    add("--tokenizer", type=Path, required=True, help="the folder of train_tokenizer.py")
    add("--out", type=Path, required=True, help="the file to write, .npz")
    add("--seconds", type=float, default=40, help="how long each process writes")
    add("--processes", type=int, default=os.cpu_count(), help="how many write")
    add("--length", type=int, default=2048, help="tokens a row")
    add("--natural-share", type=float, default=0.05, help="share of tokens from natural texts")
    options = parser.parse_args()
    # Each process tokenizes alone; threads of the tokenizer's own would only compete.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    jobs = [(options, 1000 + i) for i in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = Rows.joined(pool.map(write, jobs))
    np.savez(options.out, tokens=rows.tokens, weights=rows.weights, positions=rows.positions)
    print(f"{len(rows.tokens)} rows, {rows.tokens.size / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
