"""Random schedules: whatever comes and goes beside a request, its reply is that of the request
alone, and nothing is lost or starved. A failure prints the seed and the smallest trace that fails.
"""

import random
from dataclasses import dataclass, replace

import pytest

from scheduler.chunks import Plan
from scheduler.events import Finished, Prefilled, Tokens
from scheduler.request import Request
from tests.fake_runner import BAD_CHUNK, BAD_LOGIT, VOCABULARY, RoundFailed
from tests.served import SIZE, Served

NUM_SEEDS = 2000
# Turns within which a schedule of this size is through, whatever is in it.
MOST_TURNS = 3000


@dataclass(frozen=True)
class Arrival:
    """A request, the turn before which it comes and the turn before which it is cancelled."""

    turn: int
    request: Request
    cancel_turn: int | None


@dataclass(frozen=True)
class Trace:
    """All that decides what happens. hit_rate: how many drafted tokens are right, None for none."""

    seed: int
    sizes: dict
    budget: int
    hit_rate: float | None
    is_cut_sensitive: bool
    interrupted: frozenset[int]
    is_restore_failing: bool
    arrivals: tuple[Arrival, ...]


def random_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    is_cut_sensitive = rng.random() < 0.3
    sizes = dict(
        num_slots=rng.choice([1, 3, 5, 8]),
        num_tokens=rng.choice([60, 200, 500]),
        chunk=rng.choice([1, 2, 3, 8, 16]),
        max_rows=rng.choice([16, 24, 40]),
        round_rows=rng.choice([1, 3, 8, 12]),
        round_streams=rng.choice([1, 3, 8, 8]),
        max_window=rng.choice([1, 2, 4]),
        is_mixing=rng.random() < 0.7,
        patience=rng.choice([1, 2, 8]),
    )
    trunks = [random_tokens(rng, rng.randint(1, 30)) for _ in range(2)]
    arrivals = tuple(
        random_arrival(rng, trunks, is_cut_sensitive) for _ in range(rng.randint(1, 10))
    )
    return Trace(
        seed=seed,
        sizes=sizes,
        budget=rng.choice([0, SIZE.num_bytes(20), 5 * SIZE.num_bytes(20), 10**6]),
        hit_rate=rng.choice([None, 0, 1 / 3, 1]),
        is_cut_sensitive=is_cut_sensitive,
        interrupted=frozenset(rng.sample(range(1, 60), rng.choice([0, 0, 0, 3]))),
        is_restore_failing=rng.random() < 0.1,
        arrivals=arrivals,
    )


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def random_arrival(rng: random.Random, trunks, is_cut_sensitive: bool) -> Arrival:
    prompt = random_tokens(rng, rng.randint(1, 12))
    if rng.random() < 0.6:
        prompt = rng.choice(trunks) + prompt
    if rng.random() < 0.08:
        at = rng.randrange(len(prompt))
        prompt = (*prompt[:at], rng.choice([BAD_CHUNK, BAD_LOGIT]), *prompt[at + 1 :])
    # With cuts of its own a prompt has other values, where values depend on cuts.
    num_points = 0 if is_cut_sensitive else rng.choice([0, 0, 1, 3])
    turn = rng.choice([0, 0, rng.randint(0, 20)])
    request = Request(
        prompt,
        max_tokens=rng.randint(1, 20),
        sampling=rng.choice([None, rng.randrange(5)]),
        stop_tokens=frozenset(random_tokens(rng, rng.choice([0, 5]))),
        is_background=rng.random() < 0.3,
        starts=tuple(rng.randint(1, 40) for _ in range(num_points)),
        marks=tuple(rng.randint(1, 40) for _ in range(num_points)),
        keeps_reply=not is_cut_sensitive and rng.random() < 0.3,
    )
    cancel_turn = turn + rng.randint(0, 25) if rng.random() < 0.25 else None
    return Arrival(turn, request, cancel_turn)


def expected(served: Served, request: Request) -> list[int]:
    """The reply of the request alone, if its prompt can be run at all."""
    if {BAD_CHUNK, BAD_LOGIT} & set(request.prompt):
        return []
    options = {name: value for name, value in vars(request).items() if name != "prompt"}
    return served.expected(request.prompt, **options)


def drafter(trace: Trace, replies: dict[int, list[int]]):
    """Drafts what will be drawn, some of it spoiled."""
    if trace.hit_rate is None:
        return None
    rng = random.Random(trace.seed)

    def draft(stream, limit: int) -> list[int]:
        ahead = replies[stream.number][stream.num_made :][: rng.randint(0, limit)]
        return [token if rng.random() < trace.hit_rate else token + 1 for token in ahead]

    return draft


def play(trace: Trace) -> Served:
    """Runs a trace to its end, checking every turn."""
    replies: dict[int, list[int]] = {}
    served = Served(
        budget=trace.budget,
        draft=drafter(trace, replies),
        is_cut_sensitive=trace.is_cut_sensitive,
        **trace.sizes,
    )
    served.runner.interrupted = trace.interrupted
    served.runner.fails_restore = trace.is_restore_failing
    numbers: dict[int, Arrival] = {}
    num_waited: dict[int, int] = {}
    for turn in range(MOST_TURNS):
        for arrival in trace.arrivals:
            if arrival.turn == turn and arrival.request.num_tokens <= served.options.num_tokens:
                number = served.scheduler.submit(arrival.request)
                numbers[number] = arrival
                replies[number] = expected(served, arrival.request)
        for number, arrival in numbers.items():
            if arrival.cancel_turn == turn:
                served.scheduler.cancel(number)
        num_rounds = len(served.runner.rounds)
        waiting = served.scheduler._core.decoding
        try:
            served.step()
        except KeyboardInterrupt:
            pass
        check_turn(served, num_rounds)
        check_starving(served, num_rounds, waiting, num_waited)
        if turn > 66 and served.scheduler.is_idle:
            break
    served.check_whole()
    for number, arrival in numbers.items():
        check_request(served, number, arrival, replies[number])
    return served


def check_turn(served: Served, num_rounds: int) -> None:
    options, core = served.options, served.scheduler._core
    for windows in served.runner.rounds[num_rounds:]:
        assert sum(count for _, _, count in windows) <= options.max_rows
    taken = sorted((s.extent.base, s.extent.end) for s in core.streams.values())
    assert all(end <= base for (_, end), (base, _) in zip(taken, taken[1:]))
    assert len({stream.slot for stream in core.streams.values()}) == len(taken)
    assert served.cache.num_bytes <= served.cache.budget_bytes
    for stream in core.filling:
        assert stream.passed_over <= options.patience + options.num_slots, "starved of chunks"


def check_starving(served: Served, num_rounds: int, decoding, num_waited: dict[int, int]) -> None:
    """Whoever decodes is served within as many turns as there are slots."""
    run = {number for windows in served.runner.rounds[num_rounds:] for number, _, _ in windows}
    for stream in [stream for stream in decoding if not stream.has_left]:
        number = stream.number
        num_waited[number] = 0 if number in run else num_waited.get(number, 0) + 1
        assert num_waited[number] < served.options.num_slots + len(served.runner.interrupted)


def check_request(served: Served, number: int, arrival: Arrival, reply: list[int]) -> None:
    request, ending = arrival.request, served.ending(number)
    mine = [type(event) for event in served.events if event.number == number]
    is_prefilled = Prefilled in mine
    assert mine == [Prefilled] * is_prefilled + [Tokens] * mine.count(Tokens) + [Finished]
    plan = Plan.of(request, served.options.chunk, served.options.min_gap)
    chunks = served.chunks(number, len(request.prompt))
    assert all(plan.end(start) == start + count for start, count in chunks)
    made = served.reply(number)
    assert ending.stats.num_tokens == len(made)
    if ending.reason == "cancelled":
        assert arrival.cancel_turn is not None and made == reply[: len(made)]
    elif ending.reason == "error":
        kind = RoundFailed if BAD_CHUNK in request.prompt else ArithmeticError
        assert not reply and isinstance(ending.error, kind)
    else:
        assert made == reply
        assert ending.reason == ("stop" if made[-1] in request.stop_tokens else "length")
        assert chunks[-1] == (plan.cuts[-1], plan.length - plan.cuts[-1])
        check_pass(chunks, served.num_cached(number), served, plan)


def check_pass(chunks, num_cached: int, served: Served, plan: Plan) -> None:
    """The last pass went from what was restored to the end, without a hole."""
    last = max(i for i, (start, _) in enumerate(chunks) if start == num_cached)
    cuts = [cut for cut in plan.cuts if cut >= num_cached]
    assert [start for start, _ in chunks[last:]] == cuts


def fails(trace: Trace) -> Exception | None:
    try:
        play(trace)
    except Exception as error:
        return error
    return None


def smallest(trace: Trace) -> Trace:
    """The trace without all arrivals that it fails without."""
    for arrival in trace.arrivals:
        rest = tuple(other for other in trace.arrivals if other is not arrival)
        shorter = replace(trace, arrivals=rest)
        if fails(shorter):
            trace = shorter
    return trace


@pytest.mark.parametrize("part", range(4))
def test_replies_of_random_schedules_are_those_of_each_request_alone(part):
    for seed in range(part, NUM_SEEDS, 4):
        trace = random_trace(seed)
        if fails(trace):
            trace = smallest(trace)
            pytest.fail(f"seed {seed}: {fails(trace)!r}\nsmallest trace: {trace}")


def test_the_random_schedules_have_in_them_what_they_are_to_test():
    served = [play(random_trace(seed)) for seed in range(300)]
    endings = [e for s in served for e in s.events if isinstance(e, Finished)]
    counts = [s.cache.counts for s in served]
    rounds = [round for s in served for round in s.runner.rounds]
    assert {ending.reason for ending in endings} == {"stop", "length", "cancelled", "error"}
    for name in ("hits", "misses", "kept", "evicted", "refused", "failed"):
        assert sum(getattr(count, name) for count in counts) > 20, name
    assert sum(ending.stats.num_accepted for ending in endings) > 100
    assert sum(e.stats.num_drafted - e.stats.num_accepted for e in endings) > 100
    assert sum(len(round) > 2 for round in rounds) > 100
    assert sum(ending.stats.has_reuse_failed for ending in endings) > 5


def test_two_thousand_requests_through_16_slots_leave_nothing_behind():
    rng = random.Random(7)
    sizes = dict(num_slots=16, num_tokens=800, chunk=16, round_rows=16, max_rows=40)
    served = Served(budget=40 * SIZE.num_bytes(20), **sizes)
    trunks = [random_tokens(rng, 20) for _ in range(5)]
    numbers = {}
    while len(numbers) < 2000:
        for _ in range(rng.randint(0, 3)):
            request = random_arrival(rng, trunks, is_cut_sensitive=False).request
            numbers[served.scheduler.submit(request)] = request
        if rng.random() < 0.4:
            served.scheduler.cancel(rng.choice(list(numbers)))
        served.step()
    served.finish(most=10_000)
    served.check_whole()
    by_reason = {}
    for number, request in numbers.items():
        ending = served.ending(number)
        by_reason[ending.reason] = by_reason.get(ending.reason, 0) + 1
        reply, made = expected(served, request), served.reply(number)
        assert made == reply[: len(made)]
        assert ending.reason in ("cancelled", "error") or made == reply
    assert by_reason["cancelled"] > 100 and by_reason["length"] > 1000
