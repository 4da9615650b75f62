"""A model's chat template: checks the messages and renders them to one string.

Owns jinja2. Knows nothing about tokens. Rendering follows transformers' conventions, which the
templates are written for: sandboxed, `trim_blocks`, `lstrip_blocks`, the functions
`raise_exception` and `strftime_now`, a `tojson` without HTML escapes, and `{% generation %}`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lfm2.errors import LFM2Error, RequestError, TokenizerError


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, because a variable set inside does not reach the outside in transformers either.
        return nodes.Scope(body, lineno=line)


@dataclass(frozen=True)
class ChatTemplate:
    """One template; `origin` is the file that errors name, `now` the clock of `strftime_now`."""

    source: str
    origin: Path
    now: Callable[[], datetime] = datetime.now

    def render(self, variables: dict) -> str:
        """The text for these variables; TokenizerError when the template fails or refuses them."""
        try:
            return self._compiled.render(variables)
        except LFM2Error:
            raise
        # A template is a program that others wrote: it may raise anything.
        except Exception as error:
            raise TokenizerError(
                f"the chat template in {self.origin} failed: {type(error).__name__}: "
                f"{_one_line(error)}"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        # Compiled at the first chat: plain completion need not wait for it.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = self._strftime_now
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template in {self.origin} is damaged at line {error.lineno}: "
                f"{_one_line(error.message)}"
            ) from error

    def _refuse(self, message: str) -> None:
        raise TokenizerError(
            f"the chat template in {self.origin} refuses these messages: {_one_line(message)}"
        )

    def _strftime_now(self, pattern: str) -> str:
        return self.now().strftime(pattern)


def checked_messages(messages: list[dict]) -> list[dict]:
    """Copies of the messages with every content a string; RequestError names what is wrong.

    Content may be a string or a list of text parts, which are joined; an assistant's may be null,
    or absent beside `tool_calls`. Templates print parts and null as they stand, so neither gets
    there. Other keys pass through.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError("the list of messages is empty; give at least one")
    return [_checked_message(message, number) for number, message in enumerate(messages, 1)]


def _checked_message(message: dict, number: int) -> dict:
    if not isinstance(message, dict):
        raise RequestError(
            f"message {number} must be a dict with role and content, got {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"message {number} needs a role such as 'user', got {role!r}")
    where = f"message {number} ({role})"
    is_call = role == "assistant" and message.get("tool_calls")
    if "content" not in message and not is_call:
        raise RequestError(f"{where} has no content")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return message | {"content": _content_text(content, where)}


def _content_text(content: str | list[dict], where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where} needs content that is a string or a list of text parts, "
            f"got {type(content).__name__}"
        )
    return "".join(_part_text(part, where) for part in content)


def _part_text(part: dict, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where} has a content part that is {type(part).__name__}, not a dict")
    if part.get("type") != "text":
        raise RequestError(
            f"{where} has a content part of type {part.get('type')!r}; the model reads only 'text'"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has a text part without a string under 'text'")
    return part["text"]


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML and sorts keys; models were trained on neither.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
