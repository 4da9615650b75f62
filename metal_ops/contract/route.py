"""The contract of route, in one launch and in two, and what lists of given choices hold."""

import numpy as np

from metal_ops.contract.case import Buffers, Case, Contract, Control, Expected, SameBits, pattern
from metal_ops.contract.matmul import BARRIER
from metal_ops.route import Lists, route_kernels

# Of fp32 sums, an exponential and two divisions.
WEIGHT_ROOM = 2e-6
# The logits of a tied case repeat themselves after so many experts: ties between lanes and within
# one.
PERIOD = 4
IN_ORDER_OF_ID = """int num_used = 0;
  for (int i = 0; i < SLOTS; i++) {
    const uint used = lanes_where(totals[i] > 0);
    rank[i] = num_used + int(popcount(used & ((1u << lane) - 1)));
    num_used += int(popcount(used));
  }"""
CONTROLS = (
    Control(
        "ties go to the higher expert id",
        "simd_min(best[r] == largest[r] ? id[r] : NO_ID)",
        "simd_max(best[r] == largest[r] ? id[r] : -1)",
        "reference",
    ),
    Control(
        "ties in a lane go to the higher id",
        "left[r][i] > best[r]",
        "left[r][i] >= best[r]",
        "reference",
    ),
    Control(
        "every choice weighs as the first",
        "chosen[row * ACTIVE + a]]",
        "chosen[row * ACTIVE]]",
        "reference",
    ),
    Control("the bias does not count", " + bias[i]) : NEVER", ") : NEVER", "reference"),
    Control("an expert is chosen again", "left[r][i] = NEVER;", ";", "reference"),
    Control("scores below 0 in reverse order", " ^ ((bits >> 31) & 0x7FFFFFFF)", "", "shapes"),
    Control("rows take the first one's logits", "min(row + r, end_row - 1)", "row", "rows"),
    Control("no barrier before the places", BARRIER, "", "shapes", is_race=True),
    Control(
        "rows beyond the last are chosen for",
        "lane == 0 && row + r < end_row",
        "lane == 0",
        "shapes",
    ),
    Control("rows beyond a launch's are chosen for", "NUM_ROWS - first", "NUM_ROWS", "shapes"),
    Control(
        "all threadgroups choose for the first",
        "chosen[first * ACTIVE + i]",
        "chosen[i]",
        "shapes",
    ),
    Control(
        "pairs beyond the last are grouped",
        "+ OWN_PAIRS, NUM_PAIRS)",
        "+ OWN_PAIRS, 9999)",
        "shapes",
    ),
    Control(
        "experts without pairs are listed",
        "if (totals[i] == 0) continue;",
        "if (totals[i] == 0) rank[i] = num_used;",
        "shapes",
    ),
    Control(
        "of experts with as many pairs the higher id comes first",
        "popcount(equal & before_lane)",
        "popcount(equal & ~before_lane) - 1",
        "reference",
    ),
    Control(
        "experts in order of id",
        "const int num_used = rank_experts(rank, totals, lane);",
        IN_ORDER_OF_ID,
        "reference",
    ),
    Control(
        "pairs beyond a SIMD-group's last are counted",
        "alike.own[i] & pair_lanes",
        "alike.own[i]",
        "shapes",
    ),
    Control(
        "lanes beyond the last expert count",
        "if (32 * i + int(lane) < NUM_EXPERTS) count[i]",
        "count[i]",
        "shapes",
    ),
    Control(
        "every threadgroup chooses for the first rows",
        "int(group) * (SIMDGROUPS * OWN_ROWS)",
        "0",
        "shapes",
    ),
    Control(
        "the rows of every SIMD-group begin at the first place",
        "PAIRS_OFFSET + firsts[i] + before;",
        "PAIRS_OFFSET + firsts[i];",
        "reference",
    ),
    Control(
        "an expert's pairs all go to its first place",
        "popcount(alike.same & before_lane)",
        "popcount(alike.same & 0)",
        "shapes",
    ),
    Control(
        "every 32 pairs begin at the first place",
        "place[i] += int(popcount(alike.own[i]));",
        "",
        "reference",
    ),
    Control(
        "an expert's pairs begin with the list",
        "PAIRS_OFFSET + firsts[i] + before;",
        "PAIRS_OFFSET + before;",
        "reference",
    ),
)


def contracts() -> list[Contract]:
    # Rows, experts and active ones around the borders of lanes, of SIMD-groups and of their rows.
    shapes = [
        (1, 4, 1),
        (1, 64, 4),
        (5, 6, 4),
        (2, 33, 8),
        (9, 101, 3),
        (17, 40, 3),
        (33, 64, 4),
        (50, 250, 2),
        (70, 8, 1),
        (530, 5, 2),
    ]
    cases = [
        *(case(*shape) for shape in shapes),
        case(2, 7, 7, is_normalised=False, scale=2.5),
        case(3, 1, 1, has_bias=False),
        case(3, 40, 40, has_nan=True),
        case(131, 40, 40, has_nan=True),
        case(150, 33, 3, period=PERIOD),
        case(41, 100, 2, is_alike=True),
        case(32, 64, 4, gate="reference"),
        case(1, 64, 4, gate="reference", has_bias=False, scale=1.5),
        case(5, 128, 6, gate="reference", period=PERIOD),
        case(512, 256, 8, gate="reference"),
    ]
    return [Contract("route", tuple(cases), company(), CONTROLS)]


def company() -> tuple[SameBits, ...]:
    """Rows of wide rounds, and the same rows in narrower ones, in another order too: of one launch,
    and of the two of many rows.
    """

    def picked(num_rows: int, rows: list[int]) -> SameBits:
        num_experts = 40
        wide, narrow = case(num_rows, num_experts, 5), case(len(rows), num_experts, 5)

        def routing(found: Buffers) -> np.ndarray:
            return bits_and_choices(found["weights"], found["lists"], num_experts)

        buffers = narrow.buffers | {"logits": wide.buffers["logits"][rows]}
        alone = Case(f"{len(rows)} rows", narrow.kernels, buffers)
        picks = (lambda found: routing(found)[rows], routing)
        return SameBits(f"rows {rows[:3]} of {num_rows}", (wide, alone), picks)

    every = list(range(200))
    return (
        *(picked(70, rows) for rows in ([0], [69], [65, 3], every[8:17], every[4:41])),
        picked(70, every[69::-1]),
        picked(200, [199]),
        picked(200, every[150:15:-1]),
    )


def bits_and_choices(weights: np.ndarray, lists: np.ndarray, num_experts: int) -> np.ndarray:
    """The bits of each row's weights, and its choices: (T, 2 A) int32."""
    layout = Lists(num_experts, weights.size)
    columns = layout.experts_offset, layout.firsts_offset, layout.counts_offset
    chosen = np.full(weights.size, -1, np.int32)
    for used in range(np.clip(lists[0], 0, num_experts)):
        expert, first, count = (int(lists[offset + used]) for offset in columns)
        pairs = lists[layout.pairs_offset + max(first, 0) :][: max(count, 0)]
        chosen[pairs[(pairs >= 0) & (pairs < weights.size)]] = expert
    return np.hstack([weights.view(np.int32), chosen.reshape(weights.shape)])


def case(
    num_rows: int,
    num_experts: int,
    num_active: int,
    gate: str = "shapes",
    has_bias: bool = True,
    is_normalised: bool = True,
    scale: float = 1.0,
    period: int | None = None,
    has_nan: bool = False,
    is_alike: bool = False,
) -> Case:
    """period: of the experts, after which the same logits and biases come again. has_nan: all
    logits of row 1 are NaN, and those of expert 3. is_alike: all rows have the logits of the first.
    """
    again = np.arange(num_experts) % (period or num_experts)
    # Within 4, where the scores of neighbours are still apart in fp32; none twice in a row.
    t = np.zeros(num_rows, int) if is_alike else np.arange(num_rows)
    logits = ((t * (5 * t + 37))[:, None] + 171 * again) % 512 / 64 - 4
    buffers, bias = {"logits": logits}, np.zeros(num_experts)
    if has_nan:
        logits[1] = logits[:, 3] = np.nan
    if has_bias:
        bias = buffers["expert_bias"] = pattern(num_experts, seed=9)[again]
    kernels = route_kernels(num_rows, num_experts, num_active, has_bias, is_normalised, scale)
    chosen, weights = routed(logits, bias, num_active, is_normalised, scale)
    lists = grouped(chosen, num_experts)
    expected = {
        "weights": Expected(weights, relative=WEIGHT_ROOM),
        "lists": Expected(lists, written=lists >= 0),
    }
    if has_nan:
        del expected["weights"]
    what = ", ties" * bool(period) + ", NaN" * has_nan + ", alike" * is_alike
    shape = f"{kernels[0].name}, bias {has_bias}, scale {scale}{what}"
    return Case(shape, kernels, buffers, expected, gate)


def routed(
    logits: np.ndarray, bias: np.ndarray, num_active: int, is_normalised: bool, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The chosen experts, the lowest id of equals, and their weights. Instead of a NaN, 0."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :num_active]
    chosen[np.isnan(np.take_along_axis(scores, chosen, 1))] = 0
    weights = np.take_along_axis(scores, chosen, 1)
    divisor = weights.sum(1, keepdims=True) + 1e-6 if is_normalised else 1.0
    return chosen, weights / divisor * scale


def grouped(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """The pairs of chosen (T, A) as `Lists` lays them out, -1 where nothing is."""
    layout = Lists(num_experts, chosen.size)
    lists = np.full(layout.argument.shape, -1)
    counts = np.bincount(chosen.reshape(-1), minlength=num_experts)
    used = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    lists[0] = len(used)
    for offset, column in (
        (layout.experts_offset, used),
        (layout.firsts_offset, (np.cumsum(counts) - counts)[used]),
        (layout.counts_offset, counts[used]),
        (layout.pairs_offset, np.argsort(chosen.reshape(-1), kind="stable")),
    ):
        lists[offset : offset + len(column)] = column
    return lists
