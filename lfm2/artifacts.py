"""Compiled artifacts: captured steps kept in a folder, so that a later process traces and compiles
nothing.

A wrong, damaged or foreign entry is a miss, never an error. An entry is a pickle, which runs code
when it is loaded: so the folder must belong to this user and be closed to others, and an entry must
carry the checksum of its key and content.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tinygrad import Tensor

from lfm2.environment import codegen_environment
from lfm2.model import LFM2
from lfm2.state import State
from metal_ops.launch import Step, codegen_settings
from metal_ops.rows import parts
from metal_ops.table import Capacity

MAGIC = b"lfm2 step 1\n"
HEAD_BYTES = len(MAGIC) + hashlib.sha256().digest_size
# Beside all of metal_ops.
STEP_SOURCES = (Path("lfm2/model.py"), Path("lfm2/state.py"))


class Artifacts:
    """The artifacts of one model on one device. `folder` none: nothing is kept.

    `model_key` names all but the capacity that shapes a step; `warn` hears, once, why the folder
    cannot be used.
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
        return self._path(capacity, "step")

    def _path(self, what: Capacity | str, kind: str) -> Path:
        return self.folder / f"{hashlib.sha256(self._key(what)).hexdigest()[:32]}.{kind}"

    def _key(self, what: Capacity | str) -> bytes:
        return f"{self.model_key}\n{what}".encode()

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
        if self.folder is not None:
            payload = step.dumps()
            self._write(self.path(capacity), self._head(capacity, payload) + payload)

    def load_note(self, name: str) -> str | None:
        """A kept text about this model on this machine, or none."""
        if self.folder is None:
            return None
        try:
            return self._path(name, "note").read_text()
        except (OSError, ValueError):
            return None

    def save_note(self, name: str, text: str) -> None:
        """Keeps a text, as steps are kept."""
        if self.folder is not None:
            self._write(self._path(name, "note"), text.encode())

    def _write(self, path: Path, content: bytes) -> None:
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                temporary = file.name
                file.write(content)
            os.replace(temporary, path)
        except OSError as error:
            self._give_up(error.strerror or str(error))
        finally:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)


def model_key(model: LFM2, state: State, device: str) -> str:
    """All but the capacity that shapes a step: the model, the state, the device, and the sources
    that make steps.
    """
    weights = [
        [(part.shape, part.dtype) for part in parts(model.weights[name])]
        for name in sorted(model.weights)
    ]
    shapes = [(tensor.shape, tensor.dtype) for tensor in [model.angles, *state.tensors]]
    made_of = [repr(model.config), repr(model.dtype), repr(weights), repr(shapes)]
    made_of.append(repr(model.tapped))
    return "\n".join(
        [*made_of, *codegen_settings(device), *codegen_environment(), sources_digest()]
    )


def sources_digest() -> str:
    """A checksum over the sources that a step is made from."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    ops = root / "metal_ops"
    for path in [*STEP_SOURCES, *sorted([*ops.iterdir(), *(ops / "kernels").iterdir()])]:
        if path.suffix in (".py", ".metal", ".c"):
            digest.update(f"{path.name}\0".encode() + (root / path).read_bytes())
    return digest.hexdigest()
