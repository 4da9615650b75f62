"""What a round costs on this machine, measured once and kept with the compiled steps; and how many
tokens of a prompt a round may have so that nobody waits longer than asked.
"""

import json
import time
from collections.abc import Callable

from lfm2.runner import Runner, bucket
from lfm2.service import MAX_ROUND_STREAMS
from scheduler.chunks import MIN_CAPACITY, RoundCost, planned_chunk
from scheduler.rounds import Round, Segment

# Rounds of so many rows, and of the most, are timed, the fastest of several runs each.
SIZES = (MIN_CAPACITY, 128)
NUM_RUNS = 3
# Rows cost more with more before them; they are timed after so many.
DEPTH = 2048
NAME = "round cost"


def gap_chunk(runner: Runner, streams: int, max_gap_ms: float, warn: Callable[[str], None]) -> int:
    """Most rows of a chunk such that a round of it and of a row of every stream takes at most
    `max_gap_ms`, as far as a round can be that short.
    """
    cost = round_cost(runner)
    least_ms = 1000 * cost.seconds(MIN_CAPACITY)
    if least_ms > max_gap_ms:
        warn(f"a gap of {max_gap_ms:g} ms is too short here: the smallest takes {least_ms:.3g} ms")
    most = runner.state.max_rows
    return planned_chunk(max_gap_ms / 1000, cost, min(streams, MAX_ROUND_STREAMS), most)


def round_cost(runner: Runner) -> RoundCost:
    """The cost that was kept, or else is measured now. For a runner that serves nobody yet."""
    kept = runner.artifacts.load_note(NAME)
    try:
        found = json.loads(kept or "")
        return RoundCost(float(found["fixed_s"]), float(found["row_s"]))
    except (ValueError, KeyError, TypeError):
        # None, or damaged.
        cost = line_above(measure(runner))
        runner.artifacts.save_note(NAME, json.dumps(vars(cost)))
        return cost


def measure(runner: Runner) -> dict[int, float]:
    """Rows of a round -> seconds that it takes."""
    # No larger rounds than there can be.
    most = bucket(min(runner.model.context, runner.state.num_tokens, runner.state.max_rows))
    sizes = {min(size, most) for size in (*SIZES, most)}
    return {size: min(time_round(runner, size) for _ in range(NUM_RUNS)) for size in sizes}


def time_round(runner: Runner, num_rows: int) -> float:
    """Seconds of a round of a chunk and of a row of each other stream."""
    num_tokens = runner.state.num_tokens
    num_others = min(runner.state.num_slots, MAX_ROUND_STREAMS, num_rows // 2) - 1
    room = min(runner.model.context, num_tokens)
    start = max(min(DEPTH, room - num_rows), 0)
    # Whatever is in the pool there: rows that do not go together are timed as well as others.
    tokens = (0,) * min(num_rows - num_others, room)
    segments = [Segment(0, 0, start, tokens, 1)]
    segments += [Segment(slot + 1, 0, 0, (0,), 1) for slot in range(num_others)]
    began = time.perf_counter()
    runner.run(Round(tuple(segments)))
    return time.perf_counter() - began


def line_above(times: dict[int, float]) -> RoundCost:
    """The cost that no measured time is above, of the slope between the smallest and the largest
    round.
    """
    least, most = min(times), max(times)
    row_s = max(times[most] - times[least], 0.0) / max(most - least, 1)
    fixed_s = max(0.0, *(seconds - row_s * size for size, seconds in times.items()))
    return RoundCost(fixed_s, row_s)
