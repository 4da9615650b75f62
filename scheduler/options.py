"""The sizes that a scheduler plans with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """num_slots: most streams at once, filling ones included. num_tokens: of the pool that holds
    their keys and values. chunk: most prompt rows of a turn, see `planned_chunk`. max_rows: of the
    largest round. round_rows, round_streams: most rows and streams that decode in one round.
    max_window: most rows of one decoding stream. is_mixing: whether the runner serves chunks and
    decoding streams in one round. patience: how often a prompt is passed over before it goes first.
    background_patience: the same for background requests in the queue. min_gap: tokens between
    planned starts of chunks. Raises ValueError for sizes that do not go together.
    """

    num_slots: int
    num_tokens: int
    chunk: int
    max_rows: int
    round_rows: int = 32
    round_streams: int = 32
    max_window: int = 1
    is_mixing: bool = True
    patience: int = 8
    background_patience: int = 64
    min_gap: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "is_mixing" and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("chunk", "round_rows"):
            if getattr(self, name) > self.max_rows:
                raise ValueError(f"{name} is {getattr(self, name)}, max_rows {self.max_rows}")
