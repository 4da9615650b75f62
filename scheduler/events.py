"""What the owner of a scheduler hears, request by request: first `Prefilled`, then `Tokens` any
number of times, then one `Finished`; only the last if the prompt was never through.
"""

from dataclasses import dataclass
from typing import Literal

from scheduler.runner import Drawn

# "stop": a stop token, or `Request.ends` said so. "length": max_tokens are made.
Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Stats:
    """What serving a request took.

    num_cached: prompt tokens restored from a kept state. has_reuse_failed: a kept state could not
    be restored and its tokens were computed. num_drafted, num_accepted: drafted tokens tried, and
    those that the draw confirmed. min_rows: the fewest rows of a round that it decoded in, 0 before
    the first. Seconds: in the queue, from admission to the first token, and from there.
    """

    num_prompt: int
    num_cached: int = 0
    has_reuse_failed: bool = False
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    min_rows: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Prefilled:
    """A prompt is through, `num_cached` of its tokens without being computed."""

    number: int
    num_cached: int


@dataclass(frozen=True)
class Tokens:
    """The next tokens of a reply, a stop token included."""

    number: int
    drawn: tuple[Drawn, ...]


@dataclass(frozen=True)
class Finished:
    """Nothing more comes of a request. `error` is what the runner raised or reported."""

    number: int
    reason: Reason
    stats: Stats
    error: Exception | None = None


Event = Prefilled | Tokens | Finished
