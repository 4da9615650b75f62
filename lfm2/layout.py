"""Matches the tensors in a checkpoint's files to those of its architecture, strictly both ways.

Names here are ours plus the part of the module: `.weight`, `.bias`, and `.scales` and `.biases`
where the weight is packed codes.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from lfm2.checkpoint import Piece, StoredTensor, read_piece, stored_tensors
from lfm2.config import Config
from lfm2.errors import WeightsError
from lfm2.names import hf_name, our_name
from lfm2.quantization import Packing
from lfm2.shapes import Shapes, can_quantize, packed_shapes, weight_shapes
from metal_ops.quantized import BITS, GROUP_SIZES, WORD_BITS

FLOATS = ("BF16", "F16", "F32")
CODES = "U32"
EXPERT = re.compile(r"(.*\.feed_forward\.experts)\.(\d+)\.(w[123]\.\w+)")
STACKED = re.compile(r".*\.feed_forward\.experts\.w[123]")
COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """One tensor of the model, and the pieces of the files that fill it.

    `stored` is its type in the files and `dtype` in memory: they differ for an expert_bias alone.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Source:
    """A stored tensor as the whole of a target, one expert of it, or one half of a gate_up_proj."""

    tensor: StoredTensor
    target: str
    expert: int | None = None
    half: int | None = None


def plan(folder: Path, config: Config) -> list[Target]:
    """The tensors of the model with the pieces of the files in `folder` that fill each.

    Raises WeightsError on a tensor that is missing, left over, mis-shaped or of another type.
    Warns of an expert_bias that was rounded and of a redundant lm_head.
    """
    stored = stored_tensors(folder)
    _check_types(stored)
    sources: dict[str, list[Source]] = {}
    for tensor in stored.values():
        for source in _sources(tensor):
            sources.setdefault(source.target, []).append(source)
    _check_forms(sources)
    if config.tie_embedding:
        _drop_head(sources)
    shapes = _expected(config, sources)
    _check_names(folder, config, shapes, sources)
    _check_shapes(config, shapes, sources)
    return [_target(name, shape, sources[name]) for name, shape in shapes.items()]


def _sources(tensor: StoredTensor) -> list[Source]:
    name = our_name(tensor.name)
    if match := EXPERT.fullmatch(name):
        return [Source(tensor, f"{match[1]}.{match[3]}", expert=int(match[2]))]
    if name.endswith(".feed_forward.experts.gate_up_proj"):
        path = name.removesuffix("gate_up_proj")
        return [Source(tensor, f"{path}{w}.weight", half=i) for i, w in enumerate(("w1", "w3"))]
    if STACKED.fullmatch(name):
        name = f"{name}.weight"
    return [Source(tensor, name)]


def _expected(config: Config, sources: dict) -> Shapes:
    """The parts that must be there: a packed weight is told by its scales or by config.json."""
    quantization = config.quantization
    shapes = {}
    for name, shape in weight_shapes(config).items():
        path = name.removesuffix(".weight")
        has_scales = can_quantize(name, shape) and f"{path}.scales" in sources
        packing = None if quantization is None else quantization.packing(path)
        if has_scales and packing is None:
            scales = sources[f"{path}.scales"][0].tensor.name
            raise WeightsError(f"{scales} is there, but by config.json {path} is not quantised")
        is_named = packing is not None and path in quantization.overrides
        if not has_scales and not is_named:
            shapes[name] = shape
        elif shape[-1] % packing.group_size:
            raise WeightsError(f"{path} is {shape[-1]} wide, which {packing} cannot hold")
        else:
            shapes |= packed_shapes(name, shape, packing)
    return shapes


def _target(name: str, shape: tuple[int, ...], sources: list[Source]) -> Target:
    stored = sources[0].tensor.dtype
    pieces = []
    if sources[0].half is not None:
        source, num_experts = sources[0], shape[0]
        num_bytes = source.tensor.num_bytes // (2 * num_experts)
        for j in range(num_experts):
            offset = source.tensor.offset + (2 * j + source.half) * num_bytes
            pieces.append(Piece(source.tensor.file, offset, num_bytes, j * num_bytes))
    else:
        for source in sources:
            tensor = source.tensor
            place = (source.expert or 0) * tensor.num_bytes
            pieces.append(Piece(tensor.file, tensor.offset, tensor.num_bytes, place))
    dtype = stored
    if name.endswith(".expert_bias") and stored != "F32":
        warnings.warn(f"{sources[0].tensor.name} is {stored}, not F32: experts may differ")
        dtype = "F32"
    return Target(name, shape, stored, dtype, tuple(pieces))


def _check_types(stored: dict[str, StoredTensor]) -> None:
    known = (*FLOATS, CODES)
    wrong = [f"{t.name} ({t.dtype})" for t in stored.values() if t.dtype not in known]
    if wrong:
        raise WeightsError(f"tensors of a type other than {', '.join(known)}: {_few(wrong)}")


def _check_forms(sources: dict[str, list[Source]]) -> None:
    """Experts one by one, as gate_up_proj or as switch_mlp, but never a mixture."""
    forms = {}
    for group in sources.values():
        for source in group:
            if ".feed_forward.experts." in source.target:
                is_mlx = ".switch_mlp." in source.tensor.name
                form = "one" if source.expert is not None else "mlx" if is_mlx else "stacked"
                forms.setdefault(form, source.tensor.name)
    if len(forms) > 1:
        raise WeightsError(f"experts are stored in a mixture of forms: {', '.join(forms.values())}")
    for group in sources.values():
        experts = [source.expert for source in group]
        if len(set(experts)) < len(experts):
            names = ", ".join(sorted(source.tensor.name for source in group)[:3])
            raise WeightsError(f"one tensor is there twice: {names}")


def _check_names(folder: Path, config: Config, shapes: Shapes, sources: dict) -> None:
    missing, left_over = [], []
    for name, shape in shapes.items():
        found = {source.expert for source in sources.get(name, ())}
        if not found:
            missing.append(f"{hf_name(name)} {shape}")
        elif found != {None}:
            path, part = name.split(".experts.")
            lost = [j for j in range(config.num_experts) if j not in found]
            missing += [f"{hf_name(path)}.experts.{j}.{part} {shape[1:]}" for j in lost]
    for name, group in sources.items():
        for source in group:
            if name not in shapes or (source.expert or 0) >= max(1, config.num_experts):
                left_over.append(source.tensor.name)
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {_few(missing)}")
    if left_over:
        faults.append(f"{len(left_over)} that the model has no place for: {_few(left_over)}")
    if faults:
        found = "; ".join(faults)
        raise WeightsError(f"the tensors of {folder} do not fit its config.json; {found}")


def _check_shapes(config: Config, shapes: Shapes, sources: dict) -> None:
    wrong = []
    for name, shape in shapes.items():
        path, _, part = name.rpartition(".")
        is_packed = f"{path}.scales" in shapes
        found = {source.tensor.dtype for source in sources[name]}
        wanted = (CODES,) if is_packed and part == "weight" else FLOATS
        if len(found) > 1 or not found <= set(wanted):
            first = sources[name][0].tensor.name
            wrong.append(f"{first} is {' and '.join(sorted(found))}, not {' or '.join(wanted)}")
        for source in sources[name]:
            allowed = _stored_shapes(source, shape)
            if source.tensor.shape not in allowed:
                note = _packing_note(config, path, shapes, sources) if is_packed else ""
                found = f"{source.tensor.name} is {source.tensor.shape}"
                wrong.append(f"{found}, not {allowed[0]}{note}")
    if wrong:
        raise WeightsError(f"tensors do not fit config.json: {_few(wrong)}")


def _packing_note(config: Config, path: str, shapes: Shapes, sources: dict) -> str:
    """What config.json says of the packing of `path`, and what the sizes in the file suggest."""
    packing = config.quantization.packing(path)
    width = shapes[f"{path}.scales"][-1] * packing.group_size
    num_words, num_groups = (
        max((1, *sources[f"{path}.{part}"][0].tensor.shape[-1:])) for part in ("weight", "scales")
    )
    looks = Packing(num_words * WORD_BITS // width, width // num_groups)
    is_packing = looks.bits in BITS and looks.group_size in GROUP_SIZES
    return f" (config.json: {packing}{f'; the file: {looks}' if is_packing else ''})"


def _stored_shapes(source: Source, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a stored tensor may have to fill (its share of) a target of `shape`."""
    if source.expert is not None:
        return [shape[1:]]
    if source.half is not None:
        return [(shape[0], 2 * shape[1], shape[2])]
    if source.target.endswith(".conv.conv.weight"):
        # The same bytes in the same order, with and without an axis of one: files, mlx, GGUF.
        return [(shape[0], 1, shape[1]), (*shape, 1), shape]
    return [shape]


def _drop_head(sources: dict[str, list[Source]]) -> None:
    """Takes out a stored lm_head that repeats the tied embedding; refuses one that differs."""
    for part in ("weight", "scales", "biases"):
        for head in sources.pop(f"lm_head.{part}", ()):
            table = sources.get(f"embed_tokens.{part}")
            if table is None or not _is_equal(head.tensor, table[0].tensor):
                raise WeightsError(
                    f"{head.tensor.name} differs from the embedding, but config.json ties them"
                )
            warnings.warn(f"{head.tensor.name} repeats the embedding: not loaded")


def _is_equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    runs = []
    for tensor in (a, b):
        piece = Piece(tensor.file, tensor.offset, tensor.num_bytes, 0)
        runs.append(read_piece(piece, memoryview(bytearray(COMPARED_BYTES))))
    # Views of bytes are compared one by one, bytes at once.
    return all(bytes(x) == bytes(y) for (_, x), (_, y) in zip(*runs))


def _few(items: list[str], most: int = 3) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
