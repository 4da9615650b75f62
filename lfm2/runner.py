"""Runs rounds on a device: picks the compiled form, fills its table, launches it, hands back what
was drawn.

Knows slots, positions and capacities; nothing of requests or text.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, dtypes

from lfm2.artifacts import Artifacts
from lfm2.model import LFM2
from lfm2.state import State
from metal_ops.kernel import divide_up
from metal_ops.launch import Step, copy_in, empty, view_of
from metal_ops.memory import read_tensor
from metal_ops.table import Capacity
from scheduler.chunks import MIN_CAPACITY
from scheduler.rounds import Round

# Of what a step puts out.
NUMPY_DTYPES = {dtypes.float32: np.float32, dtypes.int32: np.int32}
# Hears what is about to be compiled.
Compiling = Callable[[Capacity], None]


@dataclass(frozen=True)
class Drawn:
    """What a round computed for its drawn rows, in the order of its segments."""

    tokens: np.ndarray  # (N) the greedy pick of each row
    is_finite: np.ndarray  # (N) whether all logits of the row are finite
    _logits: Tensor

    def logits(self) -> np.ndarray:
        """The logits (N, V) in fp32; read them before the next round runs."""
        return read(self._logits)[: len(self.tokens)]


@dataclass(frozen=True)
class Form:
    """A captured step of one capacity with the buffer that it reads its round from."""

    capacity: Capacity
    packed: Tensor
    step: Step


class Runner:
    """One model with its state. `compiling` is told of each form that no artifact held."""

    def __init__(
        self,
        model: LFM2,
        state: State,
        device: str,
        artifacts: Artifacts,
        compiling: Compiling | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.device = device
        self.artifacts = artifacts
        self.compiling = compiling or (lambda capacity: None)
        self.forms: dict[Capacity, Form] = {}

    def run(self, round: Round) -> Drawn:
        """Runs one round of at most `state.max_rows` rows: its slots advance by their segments."""
        _, (logits, picks, *_) = self.launch(round)
        picks = read(picks)[: round.num_drawn]
        return Drawn(picks[:, 0], picks[:, 1] == 1, logits)

    def launch(self, round: Round) -> tuple[Form, tuple[Tensor, ...]]:
        """Starts a round, as `run` does: the form that it takes, and what the model gives out, to
        be read before the next one.
        """
        most = self.state.max_rows
        if round.num_rows > most:
            raise ValueError(f"a round holds at most {most} rows, found {round.num_rows}")
        form = self.form(capacity_of(round, self.state.num_slots))
        packed = pack(round, form.capacity, self.state.num_slots, self.state.num_tokens)
        # NOTE: in one copy, which on CUDA takes the host 14 us.
        copy_in(form.packed, 0, memoryview(packed).cast("B"))
        return form, form.step()

    def form(self, capacity: Capacity) -> Form:
        """The compiled form of a capacity: at hand, from an artifact, or captured now and kept as
        one.
        """
        if capacity not in self.forms:
            self.forms[capacity] = self._make_form(capacity)
        return self.forms[capacity]

    def _make_form(self, capacity: Capacity) -> Form:
        start = table_start(capacity)
        packed = empty((start + capacity.table_size,), dtypes.int32, self.device)
        tokens = view_of(packed, 0, capacity.rows, dtypes.int32)
        table = view_of(packed, start * dtypes.int32.itemsize, capacity.table_size, dtypes.int32)
        inputs = [tokens, table, *self.model.tensors, *self.state.tensors]
        step = self.artifacts.load(capacity, inputs)
        if step is None:
            self.compiling(capacity)
            step = Step.capture(lambda: self.model(tokens, table, self.state, capacity), inputs)
            self.artifacts.save(capacity, step)
        return Form(capacity, packed, step)


def read(tensor: Tensor) -> np.ndarray:
    """What a step put into a tensor. `Tensor.numpy` would plan the copy anew each time, which takes
    most of a millisecond.
    """
    content = read_tensor(tensor, 0, tensor.nbytes())
    return np.frombuffer(content, NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)


def capacity_of(round: Round, num_slots: int) -> Capacity:
    """The capacity that a round is computed at: powers of two of rows and segments; one drawn row a
    segment, or all.
    """
    num_rows, num_segments = round.num_rows, len(round.segments)
    rows, segments = bucket(num_rows), bucket(num_segments)
    if 1 < num_segments < num_rows:
        mixed = mixed_capacity(num_rows, max(num_segments, num_slots))
        rows, segments = mixed.rows, mixed.segments
    return Capacity(rows, segments, segments if round.num_drawn <= segments else rows)


def mixed_capacity(num_rows: int, num_slots: int) -> Capacity:
    """The capacity of rounds of chunks and single rows together.

    For as many segments as there can be, and some rows at least: what that costs is little, and a
    form that must be compiled takes seconds.
    """
    rows = bucket(max(num_rows, MIN_CAPACITY))
    segments = min(rows, bucket(num_slots))
    return Capacity(rows, segments, segments)


def bucket(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def table_start(capacity: Capacity) -> int:
    """Where the table begins behind the tokens: on 64 bytes, for loads of any width."""
    return divide_up(capacity.rows, 16) * 16


def pack(round: Round, capacity: Capacity, scratch_slot: int, scratch_base: int) -> array:
    """The tokens (T) of a round, then from `table_start` on its table, int32, padding included. See
    metal_ops/table.py for the table's layout.
    """
    # NOTE: one array out of lists: for 32 streams 17 us. numpy takes a microsecond for each slice
    # of one, and 24 us for them all.
    tokens: list[int] = []
    columns = [len(round.segments)]
    rows: list[int] = []
    drawn: list[int] = []
    for segment in round.segments:
        first, count = len(tokens), len(segment.tokens)
        tokens += segment.tokens
        columns += (segment.slot, segment.start, first, count, segment.base)
        if count == 1:
            rows += (segment.start, segment.base)
        else:
            positions = range(segment.start, segment.start + count)
            rows += _interleaved(positions, [segment.base] * count)
        drawn += range(first + count - segment.num_drawn, first + count)
    num_rows = len(tokens)
    num_padding = capacity.rows - num_rows
    if num_padding:
        columns[0] += 1
        columns += (scratch_slot, 0, num_rows, num_padding, scratch_base)
        # Each at position 0 of a scratch token of its own: no two rows may write the same.
        rows += _interleaved([0] * num_padding, range(scratch_base, scratch_base + num_padding))
    tokens += [0] * (table_start(capacity) - num_rows)
    columns += [0] * (capacity.rows_offset - len(columns))
    drawn += [0] * (capacity.drawn - len(drawn))
    return array("i", tokens + columns + rows + drawn)


def _interleaved(positions: Sequence[int], bases: Sequence[int]) -> list[int]:
    rows = [0] * (2 * len(bases))
    rows[::2], rows[1::2] = positions, bases
    return rows
