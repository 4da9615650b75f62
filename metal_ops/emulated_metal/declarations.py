"""Reads Metal source as far as needed: tokens, and the declarations of the file scope. Knows
nothing of types.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from metal_ops.emulated_metal.errors import MetalCompileError

TOKEN = re.compile(
    r'(?P<marker>^\#[^\n]*)|(?P<newline>\n)|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    r"|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.])*|\[\[|::|->|<<=|<<|>=|<=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[^\s]",
    re.MULTILINE,
)
LINE_MARKER = re.compile(r'# (\d+) "')
OPENING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    line: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def is_name(self) -> bool:
        return self.text[0].isalpha() or self.text[0] == "_"


Tokens = Sequence[Token]


@dataclass(frozen=True)
class Declaration:
    """One of the file scope. `prefix` and `head` come before the parameters: attributes and
    template; the rest.

    kind: "function" (with `parameters` and `body`), "instance" of a template, "type", "variable" or
    "other".
    """

    kind: str
    name: str
    tokens: Tokens
    prefix: Tokens
    head: Tokens
    parameters: Tokens = ()
    body: Tokens = ()

    @property
    def line(self) -> int:
        return self.tokens[0].line

    @property
    def is_kernel(self) -> bool:
        return self.kind == "function" and any(
            t.text == "kernel" for t in (*self.prefix, *self.head)
        )

    @property
    def is_template(self) -> bool:
        return any(t.text == "template" for t in self.prefix)


def tokenize(text: str) -> list[Token]:
    """The tokens of preprocessed source; a line is that of the source before, as the preprocessor's
    markers say.
    """
    tokens: list[Token] = []
    line = 1
    for found in TOKEN.finditer(text):
        if found["newline"]:
            line += 1
        elif found["marker"]:
            marked = LINE_MARKER.match(found["marker"])
            line = int(marked[1]) - 1 if marked else line
        else:
            tokens.append(Token(found[0], found.start(), line))
    return _join_ends(tokens)


def _join_ends(tokens: Tokens) -> list[Token]:
    """The two brackets that end an attribute as one token; those of x[i[0]] stay two."""
    joined: list[Token] = []
    opened: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if token.text in ("[", "[["):
            opened.append(token.text)
        elif token.text == "]" and opened and opened.pop() == "[[":
            token = Token("]]", token.start, token.line)
            i += 1
        joined.append(token)
        i += 1
    return joined


def matching(tokens: Tokens, opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    first, last = tokens[opening].text, OPENING[tokens[opening].text]
    depth = 0
    for i in range(opening, len(tokens)):
        depth += (tokens[i].text == first) - (tokens[i].text == last)
        if depth == 0:
            return i
    raise MetalCompileError(f"line {tokens[opening].line}: {first} is never closed")


def matching_angle(tokens: Tokens, opening: int) -> int:
    """The same for < of a template; a > inside parentheses is a comparison."""
    depth, i = 0, opening
    while i < len(tokens):
        text = tokens[i].text
        if text in OPENING:
            i = matching(tokens, i)
        depth += (text == "<") - (text == ">")
        if depth == 0:
            return i
        i += 1
    raise MetalCompileError(f"line {tokens[opening].line}: < is never closed")


def split_commas(tokens: Tokens) -> list[Tokens]:
    """The parts between the commas that are inside no bracket."""
    parts: list[Tokens] = []
    start = i = 0
    while i < len(tokens):
        if tokens[i].text in OPENING:
            i = matching(tokens, i)
        elif tokens[i].text == "<":
            i = matching_angle(tokens, i)
        elif tokens[i].text == ",":
            parts.append(tokens[start:i])
            start = i + 1
        i += 1
    return [*parts, tokens[start:]] if start < len(tokens) else parts


def declarations(tokens: Tokens) -> list[Declaration]:
    """The declarations of the file scope and of the namespaces in it, in order."""
    found: list[Declaration] = []
    i = num_namespaces = 0
    while i < len(tokens):
        if tokens[i].text == "namespace":
            while tokens[i].text != "{":
                i += 1
            num_namespaces += 1
            i += 1
        elif tokens[i].text == "}" and num_namespaces:
            num_namespaces -= 1
            i += 1
        elif tokens[i].text == ";":
            i += 1
        else:
            end = _end(tokens, i)
            found.append(_read(tokens[i:end]))
            i = end
    return found


def _end(tokens: Tokens, start: int) -> int:
    """One past the declaration that starts there: past its semicolon, or past a function's body."""
    i, has_parameters, has_value = start, False, False
    while i < len(tokens):
        text = tokens[i].text
        if text == ";":
            return i + 1
        has_value |= text == "="
        if text == "<" and tokens[i - 1].text == "template":
            i = matching_angle(tokens, i)
        elif text in OPENING:
            has_parameters |= text == "("
            i = matching(tokens, i)
            if text == "{" and has_parameters and not has_value:
                return i + 1
        i += 1
    raise MetalCompileError(f"line {tokens[start].line}: the declaration never ends")


def _read(tokens: Tokens) -> Declaration:
    i = 0
    while tokens[i].text in ("template", "[["):
        if tokens[i].text == "[[":
            i = matching(tokens, i)
        elif tokens[i + 1].text == "<":
            i = matching_angle(tokens, i + 1)
        i += 1
    prefix, rest = tokens[:i], tokens[i:]
    first = rest[0].text
    if first in ("struct", "class", "enum", "union"):
        return Declaration("type", rest[1].text, tokens, prefix, rest)
    if first in ("typedef", "using", "static_assert"):
        return Declaration("other", "", tokens, prefix, rest)
    if first == "decltype":
        return Declaration("instance", "", tokens, prefix, rest)
    opening = next((j for j, t in enumerate(rest) if t.text in ("(", "=", "{")), len(rest))
    if opening < len(rest) and rest[opening].text == "(" and opening:
        closing = matching(rest, opening)
        body = next((j for j in range(closing, len(rest)) if rest[j].text == "{"), None)
        inside = () if body is None else rest[body + 1 : -1]
        name = rest[opening - 1].text
        return Declaration(
            "function", name, tokens, prefix, rest[:opening], rest[opening + 1 : closing], inside
        )
    end = next((j for j, t in enumerate(rest) if t.text in ("[", "=", ";", "{")), len(rest))
    return Declaration("variable", rest[max(end - 1, 0)].text, tokens, prefix, rest)
