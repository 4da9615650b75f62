"""Compiled artifacts: captured steps kept in a folder, so that a later process traces and compiles nothing.

A wrong, damaged or foreign entry is a miss, never an error. An entry is a pickle, which runs code when it is loaded: so the
folder must belong to this user and be closed to others, and an entry must carry the checksum of its key and content.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tinygrad import Tensor

from metal_ops.launch import Step, codegen_settings
from metal_ops.table import Capacity

MAGIC = b"lfm2 step 1\n"
HEAD_BYTES = len(MAGIC) + hashlib.sha256().digest_size
SOURCE_FOLDERS = ("lfm2", "metal_ops", "scheduler")


class Artifacts:
    """The artifacts of one model on one device. `folder` none: nothing is kept.

    `model_key` names all but the capacity that shapes a step; `warn` hears, once, why the folder cannot be used.
    """

    def __init__(self, folder: Path | None, model_key: str, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.model_key = model_key
        self.warn = warn
        if folder is not None:
            self._prepare(folder)

    def _prepare(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
            if status.st_uid != os.getuid():
                self._give_up("it belongs to another user")
            elif status.st_mode & 0o022:
                self._give_up("others may write to it; run chmod go-w on it")
            elif not os.access(folder, os.W_OK | os.X_OK):
                self._give_up("it is not writable")
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _give_up(self, reason: str) -> None:
        self.warn(f"not keeping compiled steps in {self.folder}: {reason}")
        self.folder = None

    def path(self, capacity: Capacity) -> Path:
        """Where the step of a capacity is kept."""
        return self.folder / f"{hashlib.sha256(self._key(capacity)).hexdigest()[:32]}.step"

    def _key(self, capacity: Capacity) -> bytes:
        return f"{self.model_key}\n{capacity}".encode()

    def _head(self, capacity: Capacity, payload: bytes) -> bytes:
        """What stands before the payload: a checksum over it and over what it was made for."""
        return MAGIC + hashlib.sha256(self._key(capacity) + payload).digest()

    def load(self, capacity: Capacity, inputs: list[Tensor]) -> Step | None:
        """The kept step of a capacity on these inputs, or none."""
        if self.folder is None:
            return None
        try:
            content = self.path(capacity).read_bytes()
            payload = content[HEAD_BYTES:]
            if content[:HEAD_BYTES] != self._head(capacity, payload):
                return None
            return Step.loads(payload, inputs)
        except Exception:
            # A pickle that is not ours may raise anything.
            return None

    def save(self, capacity: Capacity, step: Step) -> None:
        """Keeps a step. Whole or not at all; failing to keep it is told once and harms nothing."""
        if self.folder is None:
            return
        payload = step.dumps()
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                temporary = file.name
                file.write(self._head(capacity, payload) + payload)
            os.replace(temporary, self.path(capacity))
        except OSError as error:
            self._give_up(error.strerror or str(error))
        finally:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)


def model_key(parts: list[object], device: str) -> str:
    """What shapes every step of a model beside its capacity: the given parts, the device, and our own sources."""
    return "\n".join([*map(repr, parts), *codegen_settings(device), sources_digest()])


def sources_digest() -> str:
    """A checksum over the sources of this project that trace or make kernels."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".metal", ".h", ".c"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
