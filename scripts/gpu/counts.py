"""How much is measured, and the rates it gives: alike for this engine and transformers, which share
no other module.
"""

import argparse
from statistics import median, quantiles

AFTER = 512  # tokens before a decoding
NUM_ROUNDS = 33
NUM_PROMPTS = 5
# A compiled step of transformers is compiled in its first round, and recorded as a graph in its
# second.
NUM_WARM_UPS = 3


def rates(num_tokens: int, seconds: list[float]) -> tuple[float, tuple[float, float]]:
    """Tokens/s by the median of the times that so many took, and by their middle half's ends."""
    # Inclusive, because the other way guesses at times beyond those that were seen.
    short, _, long = quantiles(seconds, n=4, method="inclusive")
    return num_tokens / median(seconds), (num_tokens / long, num_tokens / short)


def positive(text: str) -> int:
    """A number of an option. Raises argparse's error for one below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on expected, found {text}")
    return number


def add_counts(parser: argparse.ArgumentParser) -> None:
    """The options of what is measured."""
    parser.add_argument(
        "--prompt",
        type=positive,
        nargs="+",
        default=[512, 2048, 16384],
        metavar="TOKENS",
        help="prompts to read (512 2048 16384)",
    )
    parser.add_argument(
        "--streams",
        type=positive,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help=f"streams to decode together, after {AFTER} tokens each (1 8 32)",
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="of a shortened model")
    parser.add_argument(
        "--compile-limit",
        type=int,
        default=120,
        metavar="SECONDS",
        help="for all figures of transformers compiled, of a shape; 0: none (120)",
    )
