"""Turns the packages that fetch.sh fetched into plain text files, one paragraph a block."""

import argparse
import re
import zlib
from pathlib import Path

AUSTEN = "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
MOBY_DICK = "moby-dick/package/data"
STATE_OF_THE_UNION = "sotu/package/data"
WORDNET = "wordnet-base/usr/share/wordnet"
# An R character string: type 9 with its flags, its length, then its bytes.
R_STRING = re.compile(rb"\x00[\x00\x04][\x00\x40\x80\x20]\x09(....)", re.DOTALL)
SMALLEST_BOOK_BYTES = 50_000
LONGEST_LINE_BYTES = 200


def austen(packages: Path) -> str:
    """The six novels, out of the database of an R package, which compresses each object alone."""
    paragraphs = []
    for book in zlib_streams((packages / AUSTEN).read_bytes()):
        if len(book) > SMALLEST_BOOK_BYTES:
            paragraphs += split_paragraphs("\n".join(r_strings(book))) + [""]
    return "\n\n".join(paragraphs)


def zlib_streams(raw: bytes):
    """Yield what each zlib stream in `raw` holds; what lies between the streams is skipped."""
    at = raw.find(b"\x78")
    while at >= 0:
        stream = zlib.decompressobj()
        try:
            yield stream.decompress(raw[at:])
            at = len(raw) - len(stream.unused_data)
        except zlib.error:
            at += 1
        at = raw.find(b"\x78", at)


def r_strings(book: bytes):
    """Yield the strings, here the lines, of a serialized R vector."""
    end = 0
    for match in R_STRING.finditer(book):
        length = int.from_bytes(match[1], "big", signed=True)
        if match.start() >= end and 0 <= length < LONGEST_LINE_BYTES:
            end = match.end() + length
            yield book[match.end() : end].decode("utf-8", "replace")


def moby_dick(packages: Path) -> str:
    chapters = (packages / MOBY_DICK).glob("chapter_*.txt")
    ordered = sorted(chapters, key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
    return "\n\n".join(
        paragraph
        for path in ordered
        for paragraph in split_paragraphs(path.read_text(encoding="utf-8"))
    )


def state_of_the_union(packages: Path) -> str:
    """The addresses from 1934 on: the older ones are too far from today's language."""
    paragraphs = []
    for path in sorted((packages / STATE_OF_THE_UNION).glob("*.txt")):
        if int(path.name[:4]) >= 1934:
            text = path.read_text(encoding="utf-8", errors="replace")
            paragraphs += split_paragraphs(text) + [""]
    return "\n\n".join(paragraphs)


def wordnet_examples(packages: Path) -> str:
    """The example sentences of WordNet's glosses, one a line."""
    examples = []
    for part_of_speech in ("noun", "verb", "adj", "adv"):
        path = packages / WORDNET / f"data.{part_of_speech}"
        for line in path.read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):  # the licence at the head of the file
                continue
            gloss = line.split(" | ", 1)[1].strip()
            for part in re.split(r';\s*(?=")', gloss)[1:]:
                examples += re.findall(r'"([^"]{15,})"', part)
    return "\n".join(examples)


def split_paragraphs(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n", text)
    return [" ".join(block.split()) for block in blocks if block.strip()]


TEXTS = {
    "austen": austen,
    "moby": moby_dick,
    "sotu1934on": state_of_the_union,
    "wn_examples": wordnet_examples,
}


def main():
    parser = argparse.ArgumentParser(description="Make plain text files from the packages.")
    parser.add_argument("--packages", type=Path, required=True, help="the folder of fetch.sh")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the texts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, extract in TEXTS.items():
        text = re.sub(r"[ \t]+\n", "\n", extract(options.packages))
        text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
        (options.out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
