"""The safetensors files of a folder: which tensors they hold, where, and their bytes.

Knows the file format, not what the tensors mean. Files are read, never mapped: the pages of a
mapped file count as memory of the process, and a large model would be held twice.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from lfm2.errors import WeightsError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file: `num_bytes` from byte `offset` of the file on."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Piece:
    """A run of bytes in a file, and where they belong in the memory of a tensor."""

    file: Path
    offset: int
    num_bytes: int
    target_offset: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the checkpoint of `folder`, by its name there. Raises WeightsError."""
    tensors = {}
    for file in _files(Path(folder)):
        for tensor in read_header(file):
            if tensor.name in tensors:
                first = tensors[tensor.name].file.name
                raise WeightsError(f"{tensor.name} is both in {first} and in {file.name}")
            tensors[tensor.name] = tensor
    return tensors


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(
            f"{folder} holds no weights (looked for {SINGLE_FILE}, {INDEX_FILE} and *.safetensors)"
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = _strict_json(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} is damaged: {error}") from None
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise WeightsError(f"{index} names {name!r}, which is no file of its folder")
        if not (index.parent / name).is_file():
            raise WeightsError(f"{index.parent / name} is missing ({INDEX_FILE} names it)")
    return [index.parent / name for name in names]


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order of their bytes; checks that the file is whole."""
    try:
        with open(file, "rb") as opened:
            file_bytes = opened.seek(0, 2)
            opened.seek(0)
            header_bytes = int.from_bytes(opened.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(file_bytes - 8, MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{file} is truncated or no safetensors file: {file_bytes} bytes, of which the "
                    f"header should take {header_bytes}"
                )
            text = opened.read(header_bytes)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header = _strict_json(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} has a damaged header: {error}") from None
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    tensors = [_stored_tensor(file, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_cover(file, tensors, start, file_bytes)
    return tensors


def _strict_json(text: bytes):
    """The value of a JSON text that names no key twice in an object; ValueError otherwise."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{twice} is named twice")
        return found

    return json.loads(text.decode(), object_pairs_hook=unique)


def _stored_tensor(file: Path, name: str, entry, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        is_right = all(type(size) is int and size >= 0 for size in sizes) and begin <= end
        is_right = is_right and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError):
        is_right = False
    if not is_right:
        raise WeightsError(f"{file} has a damaged header: {name} is {str(entry)[:80]}")
    # A type that is not listed is refused with the tensor's meaning at hand, not here.
    num_bytes = prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - begin
    if end - begin != num_bytes:
        raise WeightsError(
            f"{file}: {name} is {dtype} {tuple(shape)}, which takes {num_bytes} bytes, but the "
            f"header gives it {end - begin}"
        )
    return StoredTensor(name, file, dtype, tuple(shape), start + begin, num_bytes)


def _check_cover(file: Path, tensors: list[StoredTensor], start: int, file_bytes: int) -> None:
    """The tensors must fill the file from `start` to its end, without gaps or overlaps."""
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps the tensor before it" if tensor.offset < end else "follows a gap"
            raise WeightsError(f"{file} has a damaged header: {tensor.name} {fault}")
        end += tensor.num_bytes
    if end > file_bytes:
        raise WeightsError(f"{file} is truncated: it has {file_bytes} of {end} bytes")
    if end < file_bytes:
        raise WeightsError(f"{file} has {file_bytes - end} bytes after its last tensor")


def read_piece(
    piece: Piece, staging: memoryview, unit_bytes: int = 1
) -> Iterator[tuple[int, memoryview]]:
    """Reads a piece in runs that fit into `staging`; yields (target offset, bytes) of each.

    The bytes lie in `staging` and are good until the next run is asked for. A run is a whole number
    of `unit_bytes`, as the piece is. Raises WeightsError.
    """
    most = len(staging) // unit_bytes * unit_bytes
    try:
        with open(piece.file, "rb", buffering=0) as opened:
            opened.seek(piece.offset)
            for done in range(0, piece.num_bytes, most):
                run = staging[: min(most, piece.num_bytes - done)]
                _fill(opened, run)
                yield piece.target_offset + done, run
    except OSError as error:
        raise WeightsError(f"{piece.file} cannot be read: {error.strerror}") from None


def _fill(opened, run: memoryview) -> None:
    filled = 0
    while filled < len(run):
        count = opened.readinto(run[filled:])
        if not count:
            raise WeightsError(f"{opened.name} became shorter while it was read")
        filled += count
