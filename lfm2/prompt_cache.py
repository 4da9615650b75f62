"""Kept states in a file, for later processes with the same model.

The file, all numbers little-endian:

    MAGIC       a line that names the format and its version
    checksum    SHA-256 of all that follows, 32 bytes
    length      of the header, 8 bytes
    header      JSON: model (what `identity` says), dtype, arithmetic (what `arithmetic` says), and
                the states, the least recently used first: tokens, written (up to which position the rings were written), parts (name
                and bytes of each, in order)
    states      the bytes of all parts of all states, one after the other

A part is the ring of a convolution ("rings.LAYER"), or the keys or values of an attention layer
("keys.LAYER", "values.LAYER") at all positions of the tokens, as they are on the device.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tinygrad import dtypes

from lfm2.artifacts import sources_digest
from lfm2.errors import PromptCacheError
from lfm2.kept import Copier, StateCopy
from lfm2.model import LFM2
from lfm2.service import Service
from metal_ops.memory import Memory, read_tensor
from metal_ops.rows import parts
from scheduler.cache import Kept

FORMAT = b"lfm2 prompt cache "
MAGIC = FORMAT + b"1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
LENGTH_BYTES = 8
BLOCK_BYTES = 1 << 20
# Of every weight so many bytes at so many places are looked at to tell models apart.
SAMPLE_BYTES = 4096
NUM_SAMPLES = 8
# As users spell them.
DTYPE_NAMES = {
    dtypes.bfloat16: "bfloat16",
    dtypes.float16: "float16",
    dtypes.float32: "float32",
}


def identity(model: LFM2) -> str:
    """What tells a model from others: a checksum of its config and of samples of its weights."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name in sorted(model.weights):
        for tensor in parts(model.weights[name]):
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            last = max(tensor.nbytes() - SAMPLE_BYTES, 0)
            for place in sorted({last * i // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)}):
                digest.update(read_tensor(tensor, place, min(SAMPLE_BYTES, tensor.nbytes())))
    return digest.hexdigest()


def arithmetic(copier: Copier) -> str:
    """What else decides the bits of a state: the device, and the program's own sources."""
    return f"{copier.device} {sources_digest()}"


def save(path: Path, service: Service, model: LFM2) -> int:
    """Writes all kept states of a service, whole or not at all; how many. Raises
    PromptCacheError.
    """
    states = distinct(service.cache.states if service.cache is not None else ())
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            write(file, states, service.runner.copier, model)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise PromptCacheError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return len(states)


def distinct(states: tuple[Kept, ...]) -> list[Kept]:
    """The states without those that a longer one has in it."""
    longest: dict[int, int] = {}
    for kept in states:
        memory = id(kept.copy.memory)
        longest[memory] = max(longest.get(memory, 0), kept.at)
    return [kept for kept in states if kept.at == longest[id(kept.copy.memory)]]


def write(file: BinaryIO, states: list[Kept], copier: Copier, model: LFM2) -> None:
    digest = hashlib.sha256()
    file.write(MAGIC + bytes(DIGEST_BYTES))
    for block in content(states, copier, model):
        digest.update(block)
        file.write(block)
    file.seek(len(MAGIC))
    file.write(digest.digest())


def content(states: list[Kept], copier: Copier, model: LFM2) -> Iterator[bytes]:
    """All that the checksum is over."""
    entries = [
        {
            "tokens": kept.prompt[: kept.at],
            "written": kept.copy.written,
            "parts": layout(copier, kept.at),
        }
        for kept in states
    ]
    about = {"model": identity(model), "dtype": DTYPE_NAMES[model.dtype]}
    header = about | {"arithmetic": arithmetic(copier), "states": entries}
    encoded = json.dumps(header).encode()
    yield len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded
    for kept in states:
        # What a shortened copy shares has room for more tokens than its own.
        places = zip(copier.parts(kept.copy.num_held), copier.parts(kept.at), strict=True)
        for place, part in places:
            yield bytes(kept.copy.memory.read(place.offset, part.num_bytes))


def layout(copier: Copier, at: int) -> list[list]:
    """Name and bytes of each part of a state of `at` tokens."""
    return [[part.name, part.num_bytes] for part in copier.parts(at)]


def load(path: Path, service: Service, model: LFM2) -> int:
    """Takes over the states of a file, those that were used last if there is no room for all; how
    many it had. Raises PromptCacheError for a file that is damaged, or of another version, model or
    compute type: then nothing is taken.
    """
    try:
        with open(path, "rb") as file:
            copier = service.runner.copier
            header = check(path, file, model, copier)
            for entry in header["states"]:
                if entry["parts"] != layout(copier, len(entry["tokens"])):
                    raise PromptCacheError(f"{path} has states of another layout than this model's")
            for entry in header["states"] if service.cache is not None else ():
                adopt(file, entry, service)
    except OSError as error:
        raise PromptCacheError(f"{path} cannot be read: {error.strerror or error}") from error
    return len(header["states"])


def check(path: Path, file: BinaryIO, model: LFM2, copier: Copier) -> dict:
    """The header of a file that is whole and fits the model; the file stands at the states."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if magic.startswith(FORMAT):
            raise PromptCacheError(f"{path} is of another version of the format: delete it")
        raise PromptCacheError(f"{path} is no file of kept states")
    stored, digest = file.read(DIGEST_BYTES), hashlib.sha256()
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    if stored != digest.digest():
        raise PromptCacheError(f"{path} is damaged: its checksum is wrong; delete it")
    file.seek(len(MAGIC) + DIGEST_BYTES)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    header = json.loads(file.read(length))
    if header["model"] != identity(model):
        raise PromptCacheError(f"{path} is of another model")
    if header["dtype"] != DTYPE_NAMES[model.dtype]:
        raise PromptCacheError(
            f"{path} is of compute type {header['dtype']}, and this is {DTYPE_NAMES[model.dtype]}"
        )
    if header["arithmetic"] != arithmetic(copier):
        raise PromptCacheError(
            f"{path} is of another device or version of lfm2, which computes other bits: delete it"
        )
    return header


def adopt(file: BinaryIO, entry: dict, service: Service) -> None:
    """Takes over the next state of a file."""
    tokens = tuple(entry["tokens"])
    num_bytes = service.runner.copier.size.num_bytes(len(tokens))
    content = file.read(num_bytes)
    if not service.cache.admits(len(tokens)):
        return
    try:
        memory = Memory(num_bytes, service.runner.runner.device)
    except MemoryError:
        # A state less is only slower.
        return
    memory.write(0, bytearray(content))
    copy = StateCopy(len(tokens), len(tokens), entry["written"], memory)
    service.cache.adopt(tokens, copy)
