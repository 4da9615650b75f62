"""Copies of streams' states on the device: what the scheduler's kept states are made of.

A copy has a stream's keys and values of its first positions and its rings, whole. So the state at
any position that the rings still reach can be had of it, not only at the last.
"""

from dataclasses import dataclass, replace

from tinygrad import Tensor

from lfm2.config import Config
from lfm2.state import State
from metal_ops.memory import Memory
from scheduler.cache import StateSize


@dataclass(frozen=True)
class Part:
    """Bytes of a copy: `num_bytes` from `offset` on are those of a tensor of the state from `first`
    on.
    """

    name: str
    tensor: Tensor
    offset: int
    first: int
    num_bytes: int


@dataclass(eq=False)
class StateCopy:
    """The state after `at` tokens, with keys and values of `num_held`. written: up to which position
    the rings were written; their columns reach back from there. memory: none once it is released.
    """

    at: int
    num_held: int
    written: int
    memory: Memory | None

    def shortened(self, at: int) -> "StateCopy":
        """The state after fewer tokens, which shares this one's memory."""
        return replace(self, at=at)


class Copier:
    """Copies between slots of a state and memory of their own."""

    def __init__(self, state: State, config: Config, device: str) -> None:
        self.state = state
        self.device = device
        self.num_carried = config.conv_kernel - 1

    @property
    def size(self) -> StateSize:
        """What a copy takes."""
        rings = sum(_row_bytes(ring) for ring in self.state.rings.values())
        return StateSize(rings, sum(_row_bytes(pool) for pool in self._pools.values()))

    @property
    def _pools(self) -> dict[str, Tensor]:
        keys = {f"keys.{layer}": pool for layer, pool in self.state.keys.items()}
        return keys | {f"values.{layer}": pool for layer, pool in self.state.values.items()}

    def parts(self, at: int, slot: int = 0, base: int = 0) -> list[Part]:
        """Where the bytes of a copy of `at` tokens lie in it, and in the state."""
        found, offset = [], 0
        places = [(f"rings.{layer}", ring, slot, 1) for layer, ring in self.state.rings.items()]
        places += [(name, pool, base, at) for name, pool in self._pools.items()]
        for name, tensor, first, count in places:
            row = _row_bytes(tensor)
            found.append(Part(name, tensor, offset, first * row, count * row))
            offset += count * row
        return found

    def keep(self, slot: int, base: int, at: int, written: int) -> StateCopy:
        """Copies a slot's state. Raises MemoryError."""
        memory = Memory(self.size.num_bytes(at), self.device)
        for part in self.parts(at, slot, base):
            memory.store(part.offset, part.tensor, part.first, part.num_bytes)
        return StateCopy(at, at, written, memory)

    def restore(self, copy: StateCopy, slot: int, base: int) -> None:
        """Puts a copy into a slot. Raises ValueError if it was released."""
        if copy.memory is None:
            raise ValueError("the kept state was released")
        for part in self.parts(copy.num_held, slot, base):
            num_bytes = part.num_bytes
            if not part.name.startswith("rings"):
                num_bytes = copy.at * _row_bytes(part.tensor)
            copy.memory.load(part.offset, part.tensor, part.first, num_bytes)

    def reaches(self, copy: StateCopy, at: int) -> bool:
        """Whether a copy has the state after fewer tokens than its own too."""
        sizes = [ring.shape[1] for ring in self.state.rings.values()]
        return at <= copy.at and all(at >= copy.written - size + self.num_carried for size in sizes)


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes() // tensor.shape[0]
