import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from lfm2.errors import RequestError
from lfm2.text_stream import StopText, TextStream
from lfm2.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "lfm2" / "demo"
CAT = "😸".encode()  # F0 9F 98 B8


class SpelledTokens:
    """A vocabulary whose token n is the n-th of the given byte strings."""

    def __init__(self, spellings: list[bytes]):
        self.spellings = spellings

    def token_bytes(self, token: int, skip_special: bool) -> bytes:
        return self.spellings[token]


def stream_pieces(spellings: list[bytes | str], stops=()) -> list[str]:
    """The piece of each token in turn, then that of `finish`."""
    as_bytes = [text.encode() if isinstance(text, str) else text for text in spellings]
    stream = TextStream(SpelledTokens(as_bytes), stops)
    return [stream.add(token) for token in range(len(as_bytes))] + [stream.finish()]


@pytest.mark.parametrize("cuts", [(3,), (2,), (1,), (1, 2, 3), (1, 3)])
def test_a_character_spread_over_tokens_comes_whole_with_its_last_byte(cuts):
    borders = [0, *cuts, 4]
    parts = [CAT[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    assert stream_pieces(parts) == [""] * (len(parts) - 1) + ["😸", ""]


def test_bytes_that_are_not_utf8_become_one_replacement_each():
    assert stream_pieces([b"\xf0", "a"]) == ["", "\ufffda", ""]
    assert stream_pieces(["x", CAT[:3]]) == ["x", "", "\ufffd"]
    assert stream_pieces([CAT[:2], b"", CAT[2:]]) == ["", "", "😸", ""]


@pytest.mark.parametrize("skip_special", [True, False])
def test_pieces_together_equal_decode(skip_special):
    config = SimpleNamespace(vocab_size=4096, bos_token_id=1, eos_token_ids=(7,))
    tokenizer = Tokenizer.from_folder(DEMO, config)
    draw = random.Random(0)
    for _ in range(50):
        # The low ids hold the special tokens and the single bytes, where characters break.
        ids = [draw.randrange(300 if draw.random() < 0.7 else 4200) for _ in range(80)]
        stream = TextStream(tokenizer, skip_special=skip_special)
        pieces = [stream.add(token) for token in ids]
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (["E", "ND!"], ["", "", ""]),
        (["xEN", "D"], ["x", "", ""]),
        (["EN", "X"], ["", "ENX", ""]),
        (["aEN"], ["a", "EN"]),
        (["EE", "ND"], ["E", "", ""]),
        (["END", "more"], ["", "", ""]),
        ([CAT[:3], CAT[3:] + b"END"], ["", "😸", ""]),
        (["EN", CAT[:2]], ["", "", "EN\ufffd"]),
    ],
)
def test_a_stop_string_over_token_borders(spellings, expected):
    assert stream_pieces(spellings, ["END"]) == expected


def test_nothing_comes_after_a_stop():
    stream = TextStream(SpelledTokens([b"aE", b"ND", CAT[:1], b"b"]), "END")
    assert (stream.add(0), stream.is_stopped) == ("a", False)
    assert (stream.add(1), stream.is_stopped) == ("", True)
    assert [stream.add(2), stream.add(3), stream.finish()] == ["", "", ""]


def test_the_stop_that_is_complete_first_cuts():
    assert stream_pieces(["a", "EN", "D"], ["END", "EN"]) == ["a", "", "", ""]
    assert stream_pieces(["abcd"], ["abcd", "bc"]) == ["a", ""]
    assert stream_pieces(["xabc"], ["bc", "abc"]) == ["x", ""]


def text_before_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: read character by character until the text so far ends with a stop."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def test_the_cut_does_not_depend_on_the_pieces():
    draw = random.Random(1)
    for _ in range(3000):
        text = "".join(draw.choices("ab", k=draw.randrange(12)))
        stops = ["".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(3)]
        matcher = StopText(stops)
        shown = ""
        rest = text
        while rest:
            length = draw.randrange(1, 4)
            shown += matcher.add(rest[:length])
            rest = rest[length:]
            # Text already shown cannot be taken back, and none is held that could be shown.
            assert text.startswith(shown)
            assert matcher.is_stopped or len(text) - len(rest) - len(shown) < max(map(len, stops))
        shown += matcher.finish()
        assert (shown, matcher.is_stopped) == text_before_stop(text, stops), (text, stops)


def test_text_is_held_only_while_a_stop_may_follow():
    assert stream_pieces(["Eagle", "E", "a"], ["END"]) == ["Eagle", "", "Ea", ""]


@pytest.mark.parametrize("stops", ["", ["END", ""], [None]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(RequestError, match="stop string needs at least one character"):
        StopText(stops)
