"""Kept states: copies of streams' states at positions of their prompts, for prompts that begin
alike. Decides where to keep, what to restore and what to give up for room; the runner copies.

A state is found by its key, which stands for all tokens before its position, and only where the
prompt's own plan begins a chunk: so a prompt is cut as if nothing had been restored, a row is left
to compute, and no state is ever taken for a position it was not kept at.
"""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, replace

from scheduler.chunks import Plan, keys_at
from scheduler.runner import Runner
from scheduler.stream import Stream

# Cuts of queued and recent prompts that are remembered, about 150 bytes each.
MAX_SEEN = 65536


@dataclass(frozen=True)
class StateSize:
    """Bytes of a kept state: `fixed_bytes`, and `token_bytes` for every position."""

    fixed_bytes: int
    token_bytes: int

    def num_bytes(self, at: int) -> int:
        return self.fixed_bytes + self.token_bytes * at


@dataclass(frozen=True)
class CacheCounts:
    """hits, misses: prompts with and without a state to resume. kept, evicted: states. refused:
    marks that the budget could not hold. failed: copies that raised, there or back.
    """

    hits: int = 0
    misses: int = 0
    kept: int = 0
    evicted: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Kept:
    """A kept state. copy: the runner's. prompt: all tokens of the last prompt that kept or resumed
    it, of which the first `at` are in it. is_extended: a later prompt went on from `prompt`.
    is_shared: different prompts go on from here, so that is no reason to give it up.
    """

    key: bytes
    at: int
    copy: object
    num_bytes: int
    prompt: tuple[int, ...]
    is_shared: bool = False
    is_extended: bool = False


class PromptCache:
    """The kept states of one runner, at most `budget_bytes` of them. For the owner thread alone.

    Marks that no request asked for are set only in prompts of at least `min_prompt` tokens, and at
    least `min_gap` tokens from where the pass begins and from one another. ValueError for less than
    one.
    """

    def __init__(
        self,
        runner: Runner,
        budget_bytes: int,
        size: StateSize,
        min_prompt: int = 4096,
        min_gap: int = 256,
    ) -> None:
        if min_gap < 1:
            raise ValueError(f"min_gap is {min_gap}; it must be at least 1")
        self.runner = runner
        self.budget_bytes = budget_bytes
        self.size = size
        self.min_prompt = min_prompt
        self.min_gap = min_gap
        self.num_bytes = 0
        self.counts = CacheCounts()
        # Least recently used first.
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        # Keys of prompts' cuts, and whether several prompts have them; the last seen last.
        self._seen: OrderedDict[bytes, bool] = OrderedDict()

    @property
    def states(self) -> tuple[Kept, ...]:
        """All kept states, the least recently used first."""
        return tuple(self._kept.values())

    def see(self, plan: Plan) -> None:
        """Hears once of every prompt, when it comes, so as to know what several have in common."""
        for cut in plan.cuts[1:] if plan.length >= self.min_prompt else ():
            key = plan.keys[cut]
            self._seen[key] = key in self._seen
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def find(self, plan: Plan) -> Kept | None:
        """The longest kept state that a prompt can resume."""
        for cut in reversed(plan.cuts[1:]):
            if plan.keys[cut] in self._kept:
                return self._kept[plan.keys[cut]]
        return None

    def begin(self, stream: Stream) -> None:
        """Begins a pass: restores what there is, sets the stream's marks and makes room for them.

        A state that cannot be restored is dropped, and the pass begins at 0.
        """
        found = self.find(stream.plan)
        self._note(stream, found)
        if found is None:
            self._count(misses=1)
        elif self._restore(found, stream):
            self._count(hits=1)
        self._set_marks(stream)
        room = sum(self.size.num_bytes(at) for at in stream.marks)
        self._make_room(min(room, self.budget_bytes), stream.spared)

    def keep(self, stream: Stream, is_shared: bool = False) -> bool:
        """Keeps the state of a stream as it stands; whether it is kept now.

        What the pass came from, or kept before, is given up last.
        """
        at = stream.held
        key = stream.plan.keys.get(at) or keys_at(stream.tokens, [at])[at]
        if key in self._kept:
            self._kept.move_to_end(key)
            stream.spared.add(key)
            return True
        num_bytes = self.size.num_bytes(at)
        if not self.admits(at):
            self._count(refused=1)
            return False
        if not self._make_room(num_bytes, stream.spared):
            self._make_room(num_bytes, frozenset())
        try:
            copy = self.runner.keep(stream.slot, stream.extent.base, at)
        except Exception:
            self._count(failed=1)
            return False
        self._add(Kept(key, at, copy, num_bytes, tuple(stream.tokens), is_shared))
        stream.spared.add(key)
        self._count(kept=1)
        return True

    def adopt(self, tokens: tuple[int, ...], copy: object) -> bool:
        """Takes over the state after all of `tokens`, as one from a file. If the budget cannot hold
        it, it is refused and stays the caller's.
        """
        at = len(tokens)
        key = keys_at(tokens, [at])[at]
        num_bytes = self.size.num_bytes(at)
        self._drop(key)
        if not self._make_room(num_bytes, frozenset()):
            self._count(refused=1)
            return False
        self._add(Kept(key, at, copy, num_bytes, tokens))
        return True

    def admits(self, at: int) -> bool:
        """Whether the budget could hold a state of so many tokens."""
        return self.size.num_bytes(at) <= self.budget_bytes

    def is_worth_keeping(self, stream: Stream) -> bool:
        """Whether what a pass has computed so far would spare another prompt enough."""
        num_computed = stream.held - stream.num_cached
        return stream.plan.length >= self.min_prompt and num_computed >= self.min_gap

    def clear(self) -> None:
        """Gives up everything, as when the weights change."""
        for key in list(self._kept):
            self._drop(key)
        self._seen.clear()

    def _restore(self, found: Kept, stream: Stream) -> bool:
        try:
            self.runner.restore(found.copy, stream.slot, stream.extent.base)
        except Exception:
            self._count(failed=1)
            self._drop(found.key)
            stream.has_reuse_failed = True
            return False
        stream.held = stream.num_cached = found.at
        stream.spared.add(found.key)
        return True

    def _note(self, stream: Stream, resumed: Kept | None) -> None:
        """Learns from a prompt which kept states it extends, shares with others, or resumes."""
        prompt = stream.request.prompt
        for key in stream.plan.keys.values():
            kept = self._kept.get(key)
            if kept is None or prompt == kept.prompt:
                continue
            if prompt[: len(kept.prompt)] == kept.prompt:
                self._kept[key] = replace(kept, is_extended=True)
            elif kept.prompt[: len(prompt)] != prompt:
                self._kept[key] = replace(kept, is_shared=True)
        if resumed is not None:
            self._kept[resumed.key] = replace(self._kept[resumed.key], prompt=prompt)
            self._kept.move_to_end(resumed.key)

    def _set_marks(self, stream: Stream) -> None:
        """The request's own marks, those set by others, the last cut that another prompt has too,
        and the last cut of all.
        """
        plan, start = stream.plan, stream.held
        wanted = dict.fromkeys(stream.request.marks, False) | stream.marks
        cuts = plan.cuts[1:] if plan.length >= self.min_prompt else ()
        shared = [cut for cut in cuts if self._seen.get(plan.keys[cut])]
        if shared:
            self._add_mark(wanted, start, shared[-1], is_shared=True)
        if cuts:
            self._add_mark(wanted, start, cuts[-1], is_shared=False)
        ahead = {at: wanted[at] for at in wanted if start < at <= plan.length}
        stream.marks = {at: ahead[at] for at in ahead if self.admits(at)}
        self._count(refused=len(ahead) - len(stream.marks))

    def _add_mark(self, wanted: dict[int, bool], start: int, at: int, is_shared: bool) -> None:
        if all(abs(at - other) >= self.min_gap for other in (start, *wanted)):
            wanted[at] = is_shared

    def _make_room(self, num_bytes: int, spared: Set[bytes]) -> bool:
        """Gives up states until so many bytes are free; whether they are."""
        while self.num_bytes + num_bytes > self.budget_bytes:
            free = [kept for kept in self._kept.values() if kept.key not in spared]
            if not free:
                return False
            is_superseded = (kept for kept in free if kept.is_extended and not kept.is_shared)
            self._drop(next(is_superseded, free[0]).key)
            self._count(evicted=1)
        return True

    def _add(self, kept: Kept) -> None:
        self._kept[kept.key] = kept
        self.num_bytes += kept.num_bytes

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
            self.runner.release(kept.copy)

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self.counts, name) + count for name, count in more.items()}
        self.counts = replace(self.counts, **changed)
