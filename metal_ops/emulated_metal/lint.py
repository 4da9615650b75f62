"""Refuses source that clang takes and Apple's compiler refuses, or is likely to: nobody here has a
Mac to try it on.

Where the rules are not from the language's specification (its list of C++ features that Metal
restricts), they keep kernels plain on purpose. What needs types is left to the strict compile:
address spaces, bfloat functions, ambiguous overloads, whole structs out of device memory.
"""

from collections.abc import Iterator

from metal_ops.emulated_metal.declarations import Declaration, Token, Tokens, split_commas
from metal_ops.emulated_metal.errors import MetalCompileError

REFUSED = {
    "double": "Metal has no double",
    "std": "Metal has no std::",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no dynamic_cast",
    "typeid": "Metal has no type identification",
    "goto": "Metal has no goto",
    "thread_local": "Metal has no thread_local",
    "register": "Metal has no register",
    "noexcept": "Metal has no noexcept",
    "asm": "Metal has no inline assembly",
    "__asm__": "Metal has no inline assembly",
    "printf": "Metal 3.1 has no printf",
    "vertex": "a keyword of Metal",
    "fragment": "a keyword of Metal",
}
ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")
# After one of these a [ starts a lambda; anywhere else it is an index or the size of an array.
BEFORE_LAMBDA = (
    "=",
    "(",
    ",",
    "{",
    ";",
    "}",
    "return",
    "?",
    ":",
    "&&",
    "||",
    "!",
    "+",
    "-",
    "*",
    "/",
    "<",
    ">",
)


def check(name: str, declared: list[Declaration]) -> None:
    """Raises MetalCompileError with a line for each thing refused."""
    functions = {d.name: d for d in declared if d.kind == "function"}
    found: list[tuple[int, str]] = []
    for declaration in declared:
        found += _refused_words(declaration.tokens)
        found += _lambdas(declaration.tokens)
        found += _function_pointers(declaration, functions)
        found += _storage(declaration)
    found += _overloads(declared)
    found += _recursion(declared, functions)
    if found:
        lines = [f"{name}:{line}: {message}" for line, message in sorted(set(found))]
        raise MetalCompileError("\n".join(lines))


Findings = Iterator[tuple[int, str]]


def _refused_words(tokens: Tokens) -> Findings:
    for before, token in zip([Token("", 0, 0), *tokens], tokens):
        if token.text in REFUSED:
            yield token.line, f"{token.text}: {REFUSED[token.text]}"
        if token.text == before.text == "long":
            yield token.line, "long long: Metal has no such type"


def _lambdas(tokens: Tokens) -> Findings:
    for before, token in zip(tokens, tokens[1:]):
        if token.text == "[" and before.text in BEFORE_LAMBDA:
            yield token.line, "lambdas: write a function"


def _function_pointers(declaration: Declaration, functions: dict[str, Declaration]) -> Findings:
    tokens = declaration.tokens
    for i, token in enumerate(tokens[:-3]):
        is_pointer = token.text == "(" and tokens[i + 1].text == "*"
        if (
            is_pointer
            and tokens[i + 2].is_name
            and [t.text for t in tokens[i + 3 : i + 5]] == [")", "("]
        ):
            yield token.line, f"function pointer {tokens[i + 2].text}"
        if is_pointer and [t.text for t in tokens[i + 2 : i + 4]] == [")", "("]:
            yield token.line, "the type of a function pointer"
    body = declaration.body
    local = {after.text for token, after in zip(body, body[1:]) if token.is_name and after.is_name}
    for before, token, after in zip(body, body[1:], body[2:]):
        is_function = (
            token.text in functions and token.text not in local and before.text not in (".", "->")
        )
        if is_function and after.text not in ("(", "<", "::"):
            yield token.line, f"function {token.text} used as a value"


def _storage(declaration: Declaration) -> Findings:
    """Variables of the file scope are constant, locals are not static, threadgroup variables are
    the kernel's own.
    """
    words = [token.text for token in declaration.head]
    if declaration.kind == "variable" and "constant" not in words:
        yield (
            declaration.line,
            f"variable {declaration.name} of the file scope is not in the constant address space",
        )
    if declaration.kind == "type":
        for statement in _statements(declaration.head):
            texts = [token.text for token in statement]
            if "static" in texts and "constant" not in texts and "(" not in texts:
                yield statement[0].line, "a static member that is not in the constant address space"
    depth = 0
    for before, token in zip([Token(";", 0, 0), *declaration.body], declaration.body):
        depth += (token.text == "{") - (token.text == "}")
        if token.text == "static":
            yield token.line, "a static local variable"
        is_statement = before.text in (";", "{", "}", ")")
        if token.text == "threadgroup" and is_statement and _is_variable(declaration.body, token):
            if not declaration.is_kernel:
                yield token.line, "a threadgroup variable in a function that is no kernel"
            elif depth:
                yield (
                    token.line,
                    "a threadgroup variable in an inner block: declare it at the top of the kernel",
                )


def _is_variable(body: Tokens, first: Token) -> bool:
    """Whether the statement declares an object in an address space, not a pointer into it."""
    for token in body[body.index(first) :]:
        if token.text in ("*", "&"):
            return False
        if token.text in (";", "[", "=", ","):
            return True
    return False


def _statements(tokens: Tokens) -> Iterator[Tokens]:
    start = 0
    for i, token in enumerate(tokens):
        if token.text in (";", "{", "}"):
            if tokens[start:i]:
                yield tokens[start:i]
            start = i + 1


def _overloads(declared: list[Declaration]) -> Findings:
    """Two functions whose parameters differ in address spaces only."""
    seen: dict[tuple, list[str]] = {}
    for declaration in declared:
        if declaration.kind != "function" or not declaration.body:
            continue
        full = []
        for parameter in split_commas(declaration.parameters):
            full += [*(token.text for token in parameter[:-1]), ","]
        plain = tuple(text for text in full if text not in ADDRESS_SPACES)
        prefix = tuple(t.text for t in declaration.prefix)
        earlier = seen.setdefault((declaration.name, prefix, plain), full)
        if earlier != full:
            yield (
                declaration.line,
                f"{declaration.name} is overloaded by address space alone: give each its own name",
            )


def _recursion(declared: list[Declaration], functions: dict[str, Declaration]) -> Findings:
    calls: dict[str, set[str]] = {name: set() for name in functions}
    for declaration in declared:
        body = declaration.body
        called = {
            t.text
            for t, after in zip(body, body[1:])
            if t.text in functions and after.text in ("(", "<")
        }
        if declaration.kind == "function":
            calls[declaration.name] |= called
    for name, declaration in functions.items():
        path = _path_back(name, name, calls, ())
        if path:
            yield declaration.line, f"recursion: {' calls '.join((name, *path))}"


def _path_back(
    name: str, target: str, calls: dict[str, set[str]], path: tuple[str, ...]
) -> tuple[str, ...]:
    for called in sorted(calls[name]):
        if called == target:
            return (*path, called)
        if called not in path and (found := _path_back(called, target, calls, (*path, called))):
            return found
    return ()
