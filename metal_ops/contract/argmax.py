"""The contract of argmax.metal."""

import numpy as np

from metal_ops.argmax import argmax_kernel
from metal_ops.contract.case import Case, Contract, Control, Expected, SameBits

REAL = 65536
SMALL = (4, 5, 31, 97, 130, 512, 2051, 8193)
# Steps from an id to one that another component, lane, SIMD-group, load or pass of the loop sees,
# in a threadgroup of 512 threads with 4 loads of 4 logits.
STEPS = (1, 4, 127, 128, 2048, 8192, 8192 - 128, 32768 + 3)
# Ids beside which another one of those begins.
BORDERS = (1, 4, 128, 2048, 8192, 16384)
NOT_FINITE = (np.nan, np.inf, -np.inf)


def contracts() -> list[Contract]:
    cases = [case(pyramids(5, vocab_size)) for vocab_size in SMALL]
    cases += [
        case(made(97), "shapes", "edges"),
        case(pyramids(32, 513)),
        case(made(REAL), "reference", "edges"),
        case(tied(REAL), "reference", "ties"),
        case(flagged(REAL), "reference", "one logit not finite"),
        case(pyramids(2, 128000), "reference"),
    ]
    whole = pyramids(5, 8193)
    whole[3, 8192] = np.nan
    rows = [
        SameBits(
            f"row {n} of 5",
            (case(whole), case(whole[n : n + 1], what="alone")),
            (lambda found, n=n: found["out"][n], lambda found: found["out"][0]),
        )
        for n in (1, 3)
    ]
    lowest = "simd_min(mine.logit == pick.logit ? mine.id : NO_ID)"
    highest = "simd_max(mine.logit == pick.logit ? mine.id : -1)"
    controls = (
        Control("a tie goes to the highest id", lowest, highest, "reference"),
        Control("a tie in a thread goes to the highest id", "] > pick", "] >= pick", "reference"),
        Control("a non-finite logit is not flagged", "isfinite(values[i][j])", "1", "reference"),
        Control(
            "the flag is the first lane's",
            "simd_min(mine.is_finite)",
            "mine.is_finite",
            "reference",
        ),
        Control("a row reads the first row's logits", "logits += row", "logits += 0", "rows"),
    )
    return [Contract("argmax", tuple(cases), tuple(rows), controls)]


def case(logits: np.ndarray, gate: str = "shapes", what: str = "") -> Case:
    num_rows, vocab_size = logits.shape
    ids = np.where(np.isnan(logits), -np.inf, logits).argmax(1)
    out = np.stack([ids, np.isfinite(logits).all(1)], 1).astype(np.int32)
    shape = f"{num_rows}x{vocab_size}" + (f", {what}" if what else "")
    kernel = argmax_kernel(num_rows, vocab_size)
    return Case(shape, (kernel,), {"logits": logits}, {"out": Expected(out)}, gate)


def pyramids(num_rows: int, vocab_size: int) -> np.ndarray:
    """Logits below zero, no two equal, that fall to both sides of a peak: each row's elsewhere."""
    peaks = np.arange(num_rows) * (vocab_size - 1) // max(num_rows - 1, 1)
    ids = np.arange(vocab_size)
    return -1 / 4 - np.abs(2 * (ids - peaks[:, None]) + 1 / 2)


def made(vocab_size: int) -> np.ndarray:
    """Rows that have no largest logit, or one of a kind."""
    last = vocab_size - 1
    rows = np.full((12, vocab_size), -3.0)
    rows[1] = -np.inf
    rows[2] = np.nan
    rows[3] = np.inf
    rows[4] = np.nan
    rows[4, [last // 2, last]] = -np.inf
    rows[5] = -np.inf
    rows[5, last] = -3.4e38
    rows[6] = np.nan
    rows[6, [last - 1, last]] = -3.4e38
    rows[7, ::2] = np.nan
    rows[8, [last // 3, last]] = np.inf
    rows[9, [0, last]] = 0.0, -0.0
    rows[10, [1, last]] = -0.0, 0.0
    rows[11] = np.finfo(np.float32).max
    return rows


def tied(vocab_size: int) -> np.ndarray:
    """Rows with two or more equal largest logits, `STEPS` apart."""
    rows = pyramids(1, vocab_size).repeat(2 * len(STEPS) + 1, 0)
    for n, step in enumerate(STEPS):
        for row, first in ((2 * n, 5 * n + 2), (2 * n + 1, vocab_size - 1 - step)):
            rows[row, [first, first + step]] = 1.0
    rows[-1, vocab_size // 3 :] = 1.0
    return rows


def flagged(vocab_size: int) -> np.ndarray:
    """Rows with one logit that is not finite, in threads all over the threadgroup."""
    places = [place for border in BORDERS for place in (border - 1, border)]
    places += [vocab_size // 2 + 77, vocab_size - 2, vocab_size - 1]
    rows = pyramids(3, vocab_size).repeat(len(places), 0)
    for row, (place, value) in enumerate(
        (place, value) for value in NOT_FINITE for place in places
    ):
        rows[row, place] = value
    return rows
