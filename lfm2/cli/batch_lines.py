"""What `lfm2 batch` is asked: the lines of IN, each a request for `Model.batch` or refused.

Reads a line when it is wanted. Knows nothing of models, nor of what becomes of a request.
"""

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields

from lfm2.cli.batch_source import Source
from lfm2.cli.loading import decode
from lfm2.errors import LFM2Error, RequestError
from lfm2.request import REPLY_OPTIONS, check_request
from lfm2.sampling import Sampling

# A context of 128,000 tokens is under a megabyte of text: more than this is another kind of file.
MAX_LINE_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
SAMPLING_KEYS = tuple(field.name for field in fields(Sampling))
KEYS = ("id", "prompt", "messages", *REPLY_OPTIONS, *SAMPLING_KEYS)
# As JSON calls them.
KINDS = {list: "an array", str: "a text", bool: "true or false", type(None): "null"}
# Token ids are shorter; Python refuses to read whole numbers of over 4,300 digits.
MAX_ID_DIGITS = 18

Id = str | int


@dataclass(frozen=True)
class Asked:
    """A request: the id of its record, the number of its line, what `Model.batch` is given."""

    id: Id
    line: int
    request: dict


@dataclass(frozen=True)
class Refused:
    """A line that cannot be served. id: None where it has none that is its own."""

    id: Id | None
    line: int
    reason: str


class Lines:
    """Iterates, once, over the lines of a source; blank ones and requests in `served` are left out.

    Yields None where the next line is not there yet. name: what errors call the source. defaults:
    options that a line may override. num_skipped counts the requests that were in `served`. Raises
    LFM2Error where the source cannot be read.
    """

    def __init__(self, source: Source, name: str, defaults: dict, served: Set[Id]) -> None:
        self.source = source
        self.name = name
        self.defaults = defaults
        self.served = served
        self.num_skipped = 0
        # The line that each id was first in.
        self._first: dict[Id, int] = {}

    def __iter__(self) -> Iterator[Asked | Refused | None]:
        number = 0
        try:
            for line in self.source:
                if line is None:
                    yield None
                    continue
                number += 1
                content = line.removeprefix(BOM) if number == 1 else line
                if content.strip():
                    yield from self._read(number, content)
        except OSError as error:
            raise LFM2Error(f"{self.name} cannot be read: {error.strerror}") from error

    def _read(self, number: int, line: bytes) -> Iterator[Asked | Refused]:
        own = None
        try:
            found = parsed(line)
            own = self._claimed(found.pop("id", None), number)
            if own in self.served:
                self.num_skipped += 1
                return
            request = request_of_line(found, self.defaults)
        except RequestError as error:
            yield Refused(own, number, str(error))
        else:
            yield Asked(own, number, request)

    def _claimed(self, given: object, number: int) -> Id:
        """The id of a line, which by default is its number. Raises RequestError if it has none."""
        own = number if given is None else given
        if not isinstance(own, str | int) or isinstance(own, bool):
            raise RequestError(f"id is {own!r}; it must be a text or a whole number")
        first = self._first.setdefault(own, number)
        if first != number:
            raise RequestError(f"the id {own!r} is that of line {first} already")
        return own


def parsed(line: bytes) -> dict:
    """The JSON object that a line is. Raises RequestError."""
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    text = decode(line, "the line")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the line is not JSON: {error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
        ) from error
    except ValueError as error:
        raise RequestError("the line has a number of too many digits") from error
    except RecursionError as error:
        raise RequestError("the line is nested too deeply") from error
    if not isinstance(found, dict):
        raise RequestError(f"the line is {KINDS.get(type(found), 'a number')}, not an object")
    return found


def request_of_line(found: dict, defaults: dict) -> dict:
    """What `Model.batch` is given for an object without its id. Raises RequestError.

    null counts as not given.
    """
    for key in found:
        if key not in KEYS:
            raise RequestError(f"unknown key {key!r}; all keys: {', '.join(KEYS)}")
    given = {key: value for key, value in found.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = biases(given["logit_bias"])
    check_types(given)
    request = defaults | given
    options = {key: request[key] for key in request if key not in ("prompt", "messages")}
    check_request(given.get("prompt", given.get("messages")), **options)
    return request


def check_types(given: dict) -> None:
    """Raises RequestError for what JSON can hold and `check_request`, on Python's side, lets by."""
    if len({"prompt", "messages"} & given.keys()) != 1:
        raise RequestError('the line needs either "prompt" or "messages"')
    prompt = given.get("prompt", "")
    is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise RequestError("prompt must be a text or a list of token ids")
    for key in ("messages", "tools"):
        value = given.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise RequestError(f"{key} must be a list of objects")
    if not isinstance(given.get("raw", False), bool):
        raise RequestError(f"raw is {given['raw']!r}; it must be true or false")


def biases(value: object) -> object:
    """Token ids and biases, an object or a list of pairs, in the form that is checked later."""
    if isinstance(value, dict):
        return tuple((token_of(key), bias) for key, bias in value.items())
    if isinstance(value, list):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return value


def token_of(key: str) -> Id:
    return int(key) if key.isdecimal() and len(key) <= MAX_ID_DIGITS else key
