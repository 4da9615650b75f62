"""Turns one stream's tokens into text as they come: whole characters, cut at a stop string.

Knows the bytes of tokens and nothing else: whether a token ends the stream (EOS) is the
generation loop's business, which does not add it.
"""

import codecs
from collections.abc import Sequence

from lfm2.errors import RequestError
from lfm2.tokenizer import Tokenizer


class StopText:
    """Passes text on until a stop string is complete, holding back what may become one.

    The match that completes first wins, the longest of those that complete together, so the cut
    does not depend on how the text was split into pieces.
    """

    def __init__(self, stops: str | Sequence[str] = ()):
        """`stops` is one string or several; RequestError for an empty one."""
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"a stop string needs at least one character, got {stop!r}")
        self.is_stopped = False
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that is now certain to stand before any stop string."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        starts = [(text.find(stop), len(stop)) for stop in self.stops]
        matches = [(start + length, start) for start, length in starts if start >= 0]
        if matches:
            self.is_stopped = True
            self._held = ""
            _, cut = min(matches)
            return text[:cut]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        rest = self._held
        self._held = ""
        return rest

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


class TextStream:
    """The text of one stream: `add` each token, then `finish` once.

    All pieces together equal `Tokenizer.decode` of the tokens, cut before the first stop string.
    Stop strings are looked for in the shown text, so a skipped special token cannot be part of one.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: str | Sequence[str] = (), skip_special: bool = True
    ):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop_text = StopText(stops)

    @property
    def is_stopped(self) -> bool:
        """True once a stop string is complete; every later piece is empty."""
        return self._stop_text.is_stopped

    def add(self, token: int) -> str:
        """The text that this token makes certain; empty inside a character or a possible stop."""
        piece = self._tokenizer.token_bytes(token, self._skip_special)
        return self._stop_text.add(self._utf8.decode(piece))

    def finish(self) -> str:
        """The text still held back; a character cut short becomes one U+FFFD."""
        last = self._stop_text.add(self._utf8.decode(b"", final=True))
        return last + self._stop_text.finish()
