"""An admitted request: its slot, its tokens and how far they are computed."""

from dataclasses import dataclass, field

from scheduler.chunks import Plan
from scheduler.request import Request
from scheduler.slots import Extent


@dataclass(eq=False)
class Stream:
    """A request that holds a slot of state and an extent of the key and value pool.

    tokens: the prompt and what is drawn so far. held: how many of them the state has; a stream
    fills until it has the prompt, then decodes: all but the last token, the pending one, are held.
    marks: where the state is to be kept, and whether for other conversations too. spared: keys of
    the kept states that this pass came from or made. passed_over: how often another prompt was
    taken in a row. is_in_chunk: a chunk was begun and is not committed. is_alone: its chunks share
    no round, since one that they shared failed. last_served: the lower, the longer ago it had a
    turn. has_left: it is finished. Times in seconds of the clock.
    """

    number: int
    request: Request
    plan: Plan
    slot: int
    extent: Extent
    submitted_s: float
    admitted_s: float
    tokens: list[int] = field(init=False)
    held: int = 0
    is_in_chunk: bool = False
    is_alone: bool = False
    has_left: bool = False
    marks: dict[int, bool] = field(default_factory=dict)
    spared: set[bytes] = field(default_factory=set)
    passed_over: int = 0
    last_served: int = 0
    num_cached: int = 0
    has_reuse_failed: bool = False
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    min_rows: int = 0
    prefilled_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def is_filling(self) -> bool:
        return self.held < len(self.request.prompt)

    @property
    def num_left(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.request.prompt) - self.held

    @property
    def num_made(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) - len(self.request.prompt)

    def spoil(self) -> None:
        """What the slot holds cannot be trusted: the pass begins anew at 0."""
        self.held = self.num_cached = 0
        self.is_in_chunk = False
