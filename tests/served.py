"""A scheduler on a fake runner and all that comes of it, for tests."""

from scheduler.cache import PromptCache, StateSize
from scheduler.events import Finished, Prefilled, Tokens
from scheduler.loop import Scheduler
from scheduler.options import Options
from scheduler.request import Request
from tests.fake_runner import FakeRunner, solo

# Bytes of a kept state in tests: 100, and 10 a token.
SIZE = StateSize(100, 10)
SIZES = dict(num_slots=4, num_tokens=400, chunk=8, max_rows=40, round_rows=8, min_gap=1)


class Served:
    """runner, scheduler, cache; submit and step as a user would, replies and endings by number."""

    def __init__(self, *, budget: int = 0, draft=None, fits=None, is_cut_sensitive=False, **sizes):
        self.options = Options(**(SIZES | sizes))
        num_slots, num_tokens = self.options.num_slots, self.options.num_tokens
        self.runner = FakeRunner(num_slots, num_tokens, is_cut_sensitive)
        self.cache = PromptCache(self.runner, budget, SIZE, min_prompt=2, min_gap=1)
        cache = self.cache if budget else None
        self.scheduler = Scheduler(self.runner, self.options, cache, draft, fits)
        self.events = []

    def submit(self, prompt, max_tokens: int = 4, **options) -> int:
        return self.scheduler.submit(Request(tuple(prompt), max_tokens, **options))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.events += self.scheduler.step()

    def finish(self, most: int = 2000) -> None:
        """Steps until nothing is left, at most so many turns."""
        for _ in range(most):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError(f"not idle after {most} turns: {self.scheduler.counts()}")

    def reply(self, number: int) -> list[int]:
        mine = [e for e in self.events if isinstance(e, Tokens) and e.number == number]
        return [drawn.token for event in mine for drawn in event.drawn]

    def ending(self, number: int) -> Finished:
        found = [e for e in self.events if isinstance(e, Finished) and e.number == number]
        assert len(found) == 1, f"request {number} ended {len(found)} times"
        return found[0]

    def num_cached(self, number: int) -> int:
        found = [e for e in self.events if isinstance(e, Prefilled) and e.number == number]
        assert len(found) == 1, f"request {number} was prefilled {len(found)} times"
        return found[0].num_cached

    def rows(self, number: int) -> list[tuple[int, int]]:
        """(first position, number of rows) of every window of a request."""
        every = [window for round in self.runner.rounds for window in round]
        return [(start, count) for who, start, count in every if who == number]

    def chunks(self, number: int, length: int) -> list[tuple[int, int]]:
        """Those of its prompt, of `length` tokens."""
        return [(start, count) for start, count in self.rows(number) if start < length]

    def expected(self, prompt, max_tokens: int = 4, **options) -> list[int]:
        request = Request(tuple(prompt), max_tokens, **options)
        is_sensitive = self.runner.is_cut_sensitive
        return solo(request, self.options.chunk, self.options.min_gap, is_sensitive)

    def check_whole(self) -> None:
        """Nothing is lost once all is idle."""
        assert self.scheduler.is_idle and self.scheduler.is_whole
        kept = self.cache.states
        assert {id(state.copy) for state in kept} == self.runner.copies
        assert sum(state.num_bytes for state in kept) == self.cache.num_bytes
        assert self.cache.num_bytes <= self.cache.budget_bytes
