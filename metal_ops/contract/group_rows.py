"""The contract of group_rows.metal, and choices of experts."""

import numpy as np

from metal_ops.contract.case import Case, Contract, Control, Expected
from metal_ops.contract.matmul import BARRIER
from metal_ops.group_rows import Lists, group_rows_kernel


def contracts() -> list[Contract]:
    cases = [
        case(spread(1, 1, 4), 4),
        case(spread(1, 4, 64), 64),
        case(spread(5, 2, 6), 6),
        case(spread(9, 4, 4), 4),
        case(spread(33, 3, 40), 40),
        case(same(70, 1, 4), 4),
        case(same(41, 2, 100), 100),
        # What rows of NaN choose.
        case(np.zeros((7, 3), int), 8),
        case(spread(32, 4, 64), 64, "reference"),
        case(spread(512, 8, 256), 256, "reference"),
    ]
    controls = (
        Control("no barrier before the places", BARRIER, "", "shapes", is_race=True),
        Control(
            "a step's pairs all go to the first place",
            "mine & ((1u << lane) - 1)",
            "mine & 0",
            "shapes",
        ),
        Control(
            "every step begins at the first place",
            "place[i] += int(popcount(mine));",
            "",
            "reference",
        ),
        Control(
            "experts without pairs are used",
            "if (lane == 0 && count[i] > 0)",
            "if (lane == 0)",
            "shapes",
        ),
        Control(
            "an expert's pairs begin with the list",
            "PAIRS_OFFSET + first;",
            "PAIRS_OFFSET;",
            "reference",
        ),
    )
    return [Contract("group_rows", tuple(cases), (), controls)]


def case(chosen: np.ndarray, num_experts: int, gate: str = "shapes") -> Case:
    kernel = group_rows_kernel(*chosen.shape, num_experts)
    lists = grouped(chosen, num_experts)
    expected = {"lists": Expected(lists, written=lists >= 0)}
    return Case(kernel.name, (kernel,), {"chosen": chosen}, expected, gate)


def grouped(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """The pairs of chosen (T, A) as `Lists` lays them out, -1 where nothing is."""
    layout = Lists(num_experts, chosen.size)
    lists = np.full(layout.argument.shape, -1)
    counts = np.bincount(chosen.reshape(-1), minlength=num_experts)
    used = np.flatnonzero(counts)
    lists[0] = len(used)
    for offset, column in (
        (layout.experts_offset, used),
        (layout.firsts_offset, (np.cumsum(counts) - counts)[used]),
        (layout.counts_offset, counts[used]),
        (layout.pairs_offset, np.argsort(chosen.reshape(-1), kind="stable")),
    ):
        lists[offset : offset + len(column)] = column
    return lists


def spread(num_rows: int, num_active: int, num_experts: int) -> np.ndarray:
    """Choices (T, A) all over the experts, none twice in a row."""
    t = np.arange(num_rows)[:, None]
    return (3 * t * t + t + np.arange(num_active) * (num_experts // num_active)) % num_experts


def same(num_rows: int, num_active: int, num_experts: int) -> np.ndarray:
    """Choices (T, A) of the same last experts by every row."""
    return np.tile(num_experts - 1 - np.arange(num_active), (num_rows, 1))
