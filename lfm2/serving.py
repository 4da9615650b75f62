"""The runner that a scheduler wants, on that of a model: runs its windows in one round, draws the
tokens, copies states.

A token depends on its request's options, its position and the logits before it; never on the
company of the round.
"""

from collections.abc import Sequence

import numpy as np

from lfm2.errors import NonFiniteLogits
from lfm2.kept import Copier, StateCopy
from lfm2.runner import Drawn as DrawnRows
from lfm2.runner import Runner
from lfm2.sampling import Draw, Sampling, draw, seed_of
from scheduler.rounds import Round
from scheduler.runner import Drawn, Outcome, Window


class Drawing:
    """How the tokens of one request are drawn; what its `Request.sampling` is."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], max_tokens: int) -> None:
        self.sampling = sampling
        self.seed = seed_of(prompt) if sampling.seed is None else sampling.seed
        # The tokens so far, in an array because the repetition penalty wants one for every draw.
        self._context = np.zeros(len(prompt) + max_tokens, np.int64)
        self._num_filled = 0

    def context(self, window: Window, num_rows: int) -> np.ndarray:
        """The tokens before the one that row `num_rows` - 1 of a window draws."""
        start, end = window.segment.start, window.segment.start + num_rows
        # Those before a window are settled, those in it may be drafts.
        first, self._num_filled = self._num_filled, max(self._num_filled, start)
        self._context[first : self._num_filled] = window.stream.tokens[first : self._num_filled]
        self._context[start:end] = window.segment.tokens[:num_rows]
        return self._context[:end]


class DrawingRunner:
    """A `scheduler.runner.Runner` over the slots of a model's state."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.copier = Copier(runner.state, runner.model.config, runner.device)
        # Up to which position each slot's rings were written since its stream began.
        self._written = [0] * runner.state.num_slots

    def prefill_step(self, chunks: Sequence[Window]) -> list[Outcome]:
        return self.run(chunks)

    def cancel_prefill(self, slot: int) -> None:
        """Nothing is under way between rounds."""

    def run(self, windows: Sequence[Window]) -> list[Outcome]:
        for window in windows:
            slot, end = window.segment.slot, window.end
            is_fresh = window.segment.start == 0
            self._written[slot] = end if is_fresh else max(self._written[slot], end)
        drawn = self.runner.run(Round(tuple(window.segment for window in windows)))
        rows = Rows(drawn)
        outcomes, first = [], 0
        for window in windows:
            outcomes.append(draw_window(window, rows, first))
            first += window.segment.num_drawn
        return outcomes

    def keep(self, slot: int, base: int, at: int) -> StateCopy:
        return self.copier.keep(slot, base, at, self._written[slot])

    def restore(self, kept: StateCopy, slot: int, base: int) -> None:
        self.copier.restore(kept, slot, base)
        self._written[slot] = kept.written

    def release(self, kept: StateCopy) -> None:
        kept.memory = None


class Rows:
    """What a round computed; its logits are read once, if at all."""

    def __init__(self, drawn: DrawnRows) -> None:
        self.drawn = drawn
        self._logits: np.ndarray | None = None

    def logits(self, row: int) -> np.ndarray:
        if self._logits is None:
            self._logits = self.drawn.logits()
        return self._logits[row]


def draw_window(window: Window, rows: Rows, first: int) -> Outcome:
    """A token for each drawn row of a window, the first of which is row `first` of those drawn."""
    num_drawn = window.segment.num_drawn
    try:
        made = [draw_row(window, rows, first + j, num_drawn - j - 1) for j in range(num_drawn)]
    except NonFiniteLogits as error:
        return Outcome(error=error)
    return Outcome(tuple(Drawn(one.token, one) for one in made))


def draw_row(window: Window, rows: Rows, row: int, num_after: int) -> Draw:
    """The token after one row of a window, with `num_after` rows of the window after it: the
    device's pick where that is the answer, else a keyed draw over the logits.
    """
    drawing: Drawing = window.stream.request.sampling
    if drawing.sampling.is_greedy and rows.drawn.is_finite[row]:
        return Draw(int(rows.drawn.tokens[row]))
    position = window.end - num_after
    context = ()
    if drawing.sampling.repetition_penalty != 1:
        context = drawing.context(window, window.num_rows - num_after)
    return draw(rows.logits(row), drawing.sampling, drawing.seed, position, context)
