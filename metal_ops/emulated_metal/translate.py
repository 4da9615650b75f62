"""Metal source to C++ for clang: reads the kernels' signatures, and rewrites the few things that
C++ lacks.

Attributes are blanked, variables in threadgroup memory become references into the memory of the
running threadgroup, and every kernel gets an entry point that passes buffers and positions on.
Lines stay what they were.
"""

import re
from dataclasses import dataclass

from metal_ops.emulated_metal.declarations import Declaration, Token, Tokens, matching, split_commas
from metal_ops.emulated_metal.errors import MetalCompileError

MAX_BUFFERS = 31
MAX_THREADS = 1024
# Attributes of a kernel's parameters, and the fields of emu_ids they stand for.
POSITIONS = {
    "thread_position_in_grid": "ids->thread_in_grid",
    "threadgroup_position_in_grid": "ids->group_in_grid",
    "thread_position_in_threadgroup": "ids->thread_in_group",
    "threads_per_threadgroup": "ids->threads_per_group",
    "dispatch_threads_per_threadgroup": "ids->threads_per_group",
    "threads_per_grid": "ids->threads_per_grid",
    "threadgroups_per_grid": "ids->groups_per_grid",
    "thread_index_in_threadgroup": "&ids->thread_index",
    "thread_index_in_simdgroup": "&ids->lane",
    "simdgroup_index_in_threadgroup": "&ids->simdgroup",
    "simdgroups_per_threadgroup": "&ids->num_simdgroups",
    "dispatch_simdgroups_per_threadgroup": "&ids->num_simdgroups",
    "threads_per_simdgroup": "emu_simd_width",
    "thread_execution_width": "emu_simd_width",
}
NOT_HERE = {
    "threadgroup": "declare threadgroup memory inside the kernel: tinygrad sets no length",
    "function_constant": "tinygrad sets no function constants: define sizes in the source",
    "stage_in": "kernels have no stage_in",
    "texture": "textures are not emulated",
}
QUALIFIERS = ("device", "constant", "const", "*", "&")
ENTRY = "emu_kernel_"
# What a kernel that is no template declares in threadgroup memory, in bytes.
THREADGROUP_BYTES = "emu_threadgroup_bytes_"


@dataclass(frozen=True)
class Buffer:
    """A kernel's parameter in device or constant memory, and the type of its elements."""

    name: str
    type: str
    index: int
    is_written: bool


@dataclass(frozen=True)
class Kernel:
    """What a launch has to know of a kernel; `buffers` are in the order of their indexes."""

    name: str
    buffers: tuple[Buffer, ...]
    max_threads: int


@dataclass(frozen=True)
class Parameter:
    """One of a kernel's: the expression its entry point passes, and the buffer it is, if it is
    one.
    """

    passed: str
    buffer: Buffer | None


def translate(name: str, text: str, declared: list[Declaration]) -> tuple[str, list[Kernel]]:
    """The C++ source, and the kernels in it. `name` is the file's, for messages."""
    edits: list[tuple[int, int, str]] = []
    templates: dict[str, tuple[list[Parameter], int]] = {}
    kernels: list[Kernel] = []
    entries = ["static const uint emu_simd_width[3] = {32, 1, 1};"]
    for declaration in declared:
        where = f"{name}:{declaration.line}"
        if declaration.is_kernel:
            parameters = _parameters(where, declaration)
            max_threads = _max_threads(where, declaration)
            edits += _blank_attributes(text, declaration)
            variables, sizes = _threadgroup_variables(where, text, declaration)
            edits += variables
            if declaration.is_template:
                templates[declaration.name] = parameters, max_threads
                continue
            launched = called = declaration.name
            entries.append(_exported(f"const uint {THREADGROUP_BYTES}{launched}", sizes))
        elif declaration.kind == "instance":
            launched, called, template = _instance(where, text, declaration)
            if template not in templates:
                reason = f"{launched} is an instance of {template}, which is no kernel template"
                raise MetalCompileError(f"{where}: {reason}")
            parameters, max_threads = templates[template]
            edits.append((declaration.tokens[0].start, declaration.tokens[-1].end, ""))
        else:
            continue
        buffers = sorted(
            (p.buffer for p in parameters if p.buffer), key=lambda buffer: buffer.index
        )
        kernels.append(Kernel(launched, tuple(buffers), max_threads))
        entries.append(_entry(launched, called, parameters))
    return "\n".join([_apply(text, edits), '# 1 "<entry points>"', *entries, ""]), kernels


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        lines = "\n" * (text.count("\n", start, end) - new.count("\n"))
        text = text[:start] + new + lines + text[end:]
    return text


def _exported(declared: str, sizes: list[str]) -> str:
    value = " + ".join(["0", *sizes])
    return f'extern "C" __attribute__((visibility("default"))) {declared} = {value};'


def _entry(launched: str, called: str, parameters: list[Parameter]) -> str:
    passed = ", ".join(parameter.passed for parameter in parameters)
    head = f'extern "C" __attribute__((visibility("default"))) MSL_UNCHECKED void {ENTRY}{launched}'
    return f"{head}(void* const* buffers, const emu_ids* ids) {{ {called}({passed}); }}"


# ---------------------------------------------------------------- signatures
def _attributes(tokens: Tokens) -> list[Tokens]:
    """What stands in the [[ ]] of these tokens, comma by comma."""
    found: list[Tokens] = []
    for i, token in enumerate(tokens):
        if token.text == "[[":
            found += split_commas(tokens[i + 1 : matching(tokens, i)])
    return found


def _without_attributes(tokens: Tokens) -> list[Token]:
    kept, i = [], 0
    while i < len(tokens):
        if tokens[i].text == "[[":
            i = matching(tokens, i)
        else:
            kept.append(tokens[i])
        i += 1
    return kept


def _argument(where: str, attribute: Tokens) -> int:
    """The number of an attribute such as buffer(3)."""
    texts = [token.text for token in attribute]
    if len(texts) == 4 and texts[1] == "(" and texts[2].isdigit():
        return int(texts[2])
    raise MetalCompileError(f"{where}: [[{''.join(texts)}]] needs a number in parentheses")


def _max_threads(where: str, declaration: Declaration) -> int:
    for attribute in _attributes((*declaration.prefix, *declaration.head)):
        if attribute[0].text == "max_total_threads_per_threadgroup":
            return min(_argument(where, attribute), MAX_THREADS)
    return MAX_THREADS


def _parameters(where: str, declaration: Declaration) -> list[Parameter]:
    where = f"{where}: kernel {declaration.name}"
    parts = split_commas(declaration.parameters)
    taken = [index for part in parts if (index := _stated_index(where, part)) is not None]
    if len(set(taken)) < len(taken):
        raise MetalCompileError(f"{where}: two parameters have the same buffer index")
    # A buffer without an index gets the lowest that is left.
    free = iter(sorted(set(range(len(parts) + MAX_BUFFERS)) - set(taken)))
    parameters = [_parameter(where, part, free) for part in parts]
    if any(p.buffer and p.buffer.index >= MAX_BUFFERS for p in parameters):
        raise MetalCompileError(f"{where}: more than {MAX_BUFFERS} buffers")
    return parameters


def _stated_index(where: str, part: Tokens) -> int | None:
    for attribute in _attributes(part):
        if attribute[0].text == "buffer":
            return _argument(where, attribute)
    return None


def _parameter(where: str, part: Tokens, free) -> Parameter:
    tokens = _without_attributes(part)
    if tokens and tokens[-1].text == "]":
        tokens = tokens[: next(i for i, token in enumerate(tokens) if token.text == "[")]
    if not tokens or not tokens[-1].is_name:
        raise MetalCompileError(f"{where}: a parameter has no name")
    name, words = tokens[-1].text, [token.text for token in tokens[:-1]]
    for attribute in _attributes(part):
        word = attribute[0].text
        if word in POSITIONS:
            return Parameter(f"emu_position{{{POSITIONS[word]}}}", None)
        if word in NOT_HERE:
            raise MetalCompileError(f"{where}: parameter {name}: {NOT_HERE[word]}")
        if word != "buffer":
            raise MetalCompileError(
                f"{where}: parameter {name}: attribute [[{word}]] is not supported"
            )
    if "threadgroup" in words:
        raise MetalCompileError(f"{where}: parameter {name}: {NOT_HERE['threadgroup']}")
    if "*" not in words and "&" not in words:
        raise MetalCompileError(
            f"{where}: parameter {name} is neither a pointer, a reference nor a position"
        )
    if "device" not in words and "constant" not in words:
        raise MetalCompileError(
            f"{where}: parameter {name} needs an address space: device or constant"
        )
    index = _stated_index(where, part)
    index = next(free) if index is None else index
    is_written = "constant" not in words and "const" not in words
    kind = "emu_pointer" if "*" in words else "emu_reference"
    spelled = " ".join(word for word in words if word not in QUALIFIERS)
    buffer = Buffer(name, spelled, index, is_written)
    return Parameter(f"{kind}{{(uintptr_t)buffers[{index}]}}", buffer)


def _instance(where: str, text: str, declaration: Declaration) -> tuple[str, str, str]:
    """Of `template [[host_name("x")]] [[kernel]] decltype(f<half>) f<half>;`: x, f<half> and f."""
    for attribute in _attributes(declaration.prefix):
        if attribute[0].text == "host_name" and len(attribute) == 4:
            head = declaration.head
            closing = matching(head, 1)
            launched = attribute[2].text.strip('"')
            if re.fullmatch(r"[A-Za-z_]\w*", launched):
                return launched, text[head[1].end : head[closing].start], head[2].text
    raise MetalCompileError(
        f'{where}: an instance of a kernel needs [[host_name("...")]], a plain name'
    )


# ---------------------------------------------------------------- rewriting
def _blank_attributes(text: str, declaration: Declaration) -> list[tuple[int, int, str]]:
    edits = []
    for tokens in (declaration.prefix, declaration.head, declaration.parameters):
        for i, token in enumerate(tokens):
            if token.text == "[[":
                edits.append((token.start, tokens[matching(tokens, i)].end, ""))
    return edits


def _threadgroup_variables(
    where: str, text: str, declaration: Declaration
) -> tuple[list[tuple[int, int, str]], list[str]]:
    """Edits of the statements that declare them, which the lint has seen to stand at the top level
    of the body, and their sizes as expressions.
    """
    edits, sizes, body = [], [], declaration.body
    for i, token in enumerate(body):
        if token.text != "threadgroup" or (i and body[i - 1].text not in (";", "}")):
            continue
        end = next(j for j in range(i, len(body)) if body[j].text == ";")
        statement = _without_alignment(body[i + 1 : end])
        first, *others = split_commas(statement)
        name_at = next((j for j, t in enumerate(first) if t.text in ("[", "=")), len(first)) - 1
        if any(t.text in ("*", "&") for t in first[:name_at]):
            continue
        kind = " ".join(t.text for t in first[:name_at])
        made = []
        for variable in (first[name_at:], *others):
            name, size = variable[0].text, "".join(t.text for t in variable[1:])
            if size and not size.startswith("["):
                raise MetalCompileError(
                    f"{where}: threadgroup variable {name} cannot have a value at first"
                )
            num_bytes = f"sizeof({kind}{size})"
            memory = f'emu_threadgroup_variable({len(sizes)}, {num_bytes}, "{name}")'
            made.append(
                f"threadgroup {kind} (&{name}){size} = *(threadgroup {kind} (*){size})(uintptr_t){memory};"
            )
            sizes.append(num_bytes)
        edits.append((token.start, body[end].end, " ".join(made)))
    return edits, sizes


def _without_alignment(tokens: Tokens) -> Tokens:
    """All threadgroup memory is aligned to 64 bytes."""
    if tokens[0].text in ("__attribute__", "alignas"):
        return tokens[matching(tokens, 1) + 1 :]
    return tokens
