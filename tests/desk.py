"""A scheduler on a real runner, for tests: requests of token ids in, draws out, each compared with
the same request run alone.
"""

from dataclasses import dataclass, field

from lfm2.runner import Runner
from lfm2.sampling import Draw, Sampling
from lfm2.serving import Drawing, DrawingRunner
from scheduler.cache import PromptCache
from scheduler.events import Finished, Prefilled, Tokens
from scheduler.loop import Scheduler
from scheduler.options import Options
from scheduler.request import Request


@dataclass(frozen=True)
class Asked:
    """A request to make anew as often as it is wanted: a `Request` holds what its reply needs."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    # Every log-probability is compared too.
    sampling: Sampling = Sampling(num_logprobs=3)
    options: dict = field(default_factory=dict, hash=False)

    def request(self) -> Request:
        drawing = Drawing(self.sampling, self.prompt, self.max_tokens)
        return Request(self.prompt, self.max_tokens, drawing, **self.options)


class Desk:
    """Submits and turns as a user would; draws and endings by number."""

    def __init__(
        self,
        runner: Runner,
        num_slots: int = 4,
        chunk: int = 8,
        budget: int = 1 << 30,
        draft=None,
        max_window: int = 1,
        **options,
    ) -> None:
        self.runner = DrawingRunner(runner)
        self.options = Options(
            num_slots=num_slots,
            num_tokens=runner.state.num_tokens,
            chunk=chunk,
            max_rows=runner.state.max_rows,
            round_rows=num_slots * max_window,
            max_window=max_window,
            min_gap=1,
            **options,
        )
        size = self.runner.copier.size
        cache = PromptCache(self.runner, budget, size, min_prompt=2, min_gap=1) if budget else None
        self.cache = cache
        self.scheduler = Scheduler(self.runner, self.options, cache, draft)
        self.draws: dict[int, list[Draw]] = {}
        self.num_cached: dict[int, int] = {}
        self.endings: dict[int, Finished] = {}

    def submit(self, asked: Asked) -> int:
        number = self.scheduler.submit(asked.request())
        self.draws[number] = []
        return number

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            for event in self.scheduler.step():
                if isinstance(event, Prefilled):
                    self.num_cached[event.number] = event.num_cached
                elif isinstance(event, Tokens):
                    self.draws[event.number] += [drawn.details for drawn in event.drawn]
                else:
                    self.endings[event.number] = event

    def finish(self) -> None:
        while not self.scheduler.is_idle:
            self.turn()
        assert self.scheduler.is_whole

    def reply(self, asked: Asked) -> list[Draw]:
        """The draws of a request that comes now, once all is finished."""
        number = self.submit(asked)
        self.finish()
        return self.draws[number]


def alone(runner: Runner, asked: Asked) -> list[Draw]:
    """The draws of a request in an engine that serves nothing else, has no kept states and does
    not cut the prompt.
    """
    return Desk(runner, num_slots=1, chunk=runner.state.max_rows, budget=0).reply(
        Asked(asked.prompt, asked.max_tokens, asked.sampling)
    )
