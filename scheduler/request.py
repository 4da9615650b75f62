"""What is asked for: a prompt of token ids and when its reply ends. Knows nothing about text."""

from collections.abc import Callable
from dataclasses import dataclass


class RequestRefused(ValueError):
    """A request that can never be served; the message has the numbers."""


@dataclass(frozen=True)
class Request:
    """One reply to make, from token ids to token ids.

    max_tokens: most tokens of the reply. sampling: how the runner draws them, which nothing here
    looks at. stop_tokens end the reply, and are its last token. ends: called with every other token
    of the reply, once and in order, and true if the reply ends with it, as where a stop text is
    complete; if it raises, this request fails. is_background: waits until no foreground request
    does. starts: positions of the prompt where a chunk is to begin, as where a message does. marks:
    the same, and the state there is kept for later prompts that begin alike. keeps_reply: the state
    is kept once more when the reply ends, for a prompt that goes on from it and has that position
    among its `starts`. Raises RequestRefused for an empty prompt and for no room for a reply.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: object = None
    stop_tokens: frozenset[int] = frozenset()
    ends: Callable[[int], bool] | None = None
    is_background: bool = False
    starts: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    keeps_reply: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestRefused("the prompt has no tokens")
        if self.max_tokens < 1:
            raise RequestRefused(f"max_tokens is {self.max_tokens}; it must be at least 1")

    @property
    def num_tokens(self) -> int:
        """Positions it may come to need. A window never reaches beyond the last of them."""
        return len(self.prompt) + self.max_tokens
