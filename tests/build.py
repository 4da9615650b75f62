"""Runners over checkpoints for tests: no tokenizer needed, all state NaN at first, steps shared
between tests.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from lfm2.artifacts import Artifacts, model_key
from lfm2.config import Config
from lfm2.loading import compute_dtype
from lfm2.model import LFM2
from lfm2.runner import Runner
from lfm2.state import State
from lfm2.weights import load_weights
from metal_ops.launch import copy_in
from metal_ops.table import Capacity
from scheduler.rounds import Round, Segment

DEVICE = "CPU"
# One size of state for all tests, so that they share compiled steps.
NUM_SLOTS = 10
NUM_TOKENS = 1024
ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "lfm2" / "demo"
GOLDENS = ROOT / "tests" / "goldens"


class PinnedRunner(Runner):
    """Runs every round in one form, so that no other is compiled: padding never changes a row."""

    capacity: Capacity

    def form(self, capacity: Capacity):
        return super().form(self.capacity)


def build_runner(
    folder: Path,
    steps: Path | None = None,
    dtype: str = "float32",
    capacity: Capacity | None = None,
    compiling: Callable[[Capacity], None] | None = None,
    device: str = DEVICE,
    tapped: tuple[int, ...] = (),
) -> Runner:
    """A runner of the checkpoint in `folder`; pinned to `capacity`, if one is given.

    steps: the folder of compiled steps.
    """
    config = Config.from_folder(folder)
    compute = compute_dtype(dtype)
    weights = load_weights(folder, config, device)
    state = State.create(config, NUM_SLOTS, NUM_TOKENS, compute, device)
    poison(state)
    model = LFM2(config, weights, compute, device, NUM_TOKENS, tapped)
    key = model_key(model, state, device)
    runner = (Runner if capacity is None else PinnedRunner)(
        model, state, device, Artifacts(steps, key, fail), compiling
    )
    runner.capacity = capacity
    return runner


def fail(message: str) -> None:
    raise AssertionError(message)


def poison(state: State) -> None:
    """Fills the state with NaN: in every float type, all bits set are one."""
    for tensor in state.tensors:
        copy_in(tensor, 0, memoryview(bytearray(b"\xff" * tensor.nbytes())))


def run(runner: Runner, *segments: Segment) -> list[np.ndarray]:
    """The logits of each segment's drawn rows, in the order given."""
    drawn = runner.run(Round(segments))
    ends = np.cumsum([segment.num_drawn for segment in segments])
    return np.split(drawn.logits(), ends[:-1])


def segment(
    slot: int, base: int, start: int, tokens: Sequence[int], num_drawn: int | None = None
) -> Segment:
    """A segment whose rows are all drawn, unless told otherwise."""
    tokens = tuple(map(int, tokens))
    return Segment(slot, base, start, tokens, len(tokens) if num_drawn is None else num_drawn)


def chunked(
    runner: Runner, slot: int, base: int, tokens: Sequence[int], sizes: Iterable[int]
) -> np.ndarray:
    """Every row's logits of a fresh stream that is fed in chunks of these sizes."""
    rows, start = [], 0
    for size in sizes:
        rows += run(runner, segment(slot, base, start, tokens[start : start + size]))
        start += size
    return np.concatenate(rows)
