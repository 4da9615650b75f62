"""The allocators: slots of state, and extents of the pool that holds keys and values."""

from dataclasses import dataclass


class Slots:
    """The numbers 0 to `count` - 1; the lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = set(range(count))

    @property
    def is_whole(self) -> bool:
        """Whether all are free."""
        return len(self._free) == self.count

    def take(self) -> int | None:
        """A free slot, or None."""
        if not self._free:
            return None
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a slot. Raises ValueError for one that is not taken."""
        if slot in self._free or not 0 <= slot < self.count:
            raise ValueError(f"slot {slot} of {self.count} is not taken")
        self._free.add(slot)


@dataclass(frozen=True)
class Extent:
    """Tokens [base, base + size) of the pool."""

    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class Extents:
    """Parts of a pool of `size` tokens, the first that is large enough taken first."""

    def __init__(self, size: int) -> None:
        self.size = size
        # By base, never touching one another.
        self._free = [Extent(0, size)]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is taken and nothing was lost."""
        return self._free == [Extent(0, self.size)]

    def take(self, size: int) -> Extent | None:
        """An extent of `size` tokens, or None if no free part is as large."""
        for index, free in enumerate(self._free):
            if free.size >= size:
                rest = Extent(free.base + size, free.size - size)
                self._free[index : index + 1] = [rest] if rest.size else []
                return Extent(free.base, size)
        return None

    def give_back(self, extent: Extent) -> None:
        """Frees an extent. Raises ValueError if part of it is free already."""
        index = sum(free.base < extent.base for free in self._free)
        before, after = self._free[:index], self._free[index:]
        is_clear = not before or before[-1].end <= extent.base
        if not is_clear or (after and extent.end > after[0].base):
            raise ValueError(f"part of {extent} is not taken")
        if before and before[-1].end == extent.base:
            extent = Extent(before[-1].base, before[-1].size + extent.size)
            before.pop()
        if after and extent.end == after[0].base:
            extent = Extent(extent.base, extent.size + after[0].size)
            after.pop(0)
        self._free = [*before, extent, *after]
