"""Faults that other engines had when streams share a state, as tests: batching, chunks, slots let
again, kept states, drafts. What comes out is compared with the request alone, draw for draw.
"""

from itertools import product

import numpy as np
import pytest

from lfm2.runner import Runner
from lfm2.serving import DrawingRunner
from metal_ops.table import Capacity
from scheduler.rounds import Round
from tests.build import build_runner, chunked, poison
from tests.desk import Asked, Desk, alone
from tests.test_launches import of_layers
from tests.test_serving import SAMPLINGS, tokens
from tests.tiny import dense_config, moe_config, write_checkpoint

# All rounds run in one form: that others give the same is tested elsewhere.
FORM = (Capacity(64, 16, 64),)
# Layers before and after one another in every way, and a convolution of four taps.
MODELS = {
    "moe": moe_config(),
    "attention first": of_layers(dense_config(), "acac"),
    "conv first": of_layers(dense_config(), "cac"),
    "attention only": of_layers(dense_config(), "aa"),
    "conv only": of_layers(dense_config(), "cc"),
    "four taps": dense_config() | {"conv_L_cache": 4},
}


@pytest.fixture(scope="module")
def runners(steps, tmp_path_factory):
    made = {}

    def runner(name: str = "moe") -> Runner:
        if name not in made:
            folder = write_checkpoint(tmp_path_factory.mktemp("model"), MODELS[name])
            made[name] = build_runner(folder, steps, capacities=FORM)
        poison(made[name].state)
        return made[name]

    return runner


def check(desk: Desk, runner: Runner, served: dict[int, Asked]) -> None:
    """Everything that was served is what it is alone."""
    desk.finish()
    for number, asked in served.items():
        assert desk.draws[number] == alone(runner, asked), f"request {number}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(5, 2), (1, 2, 3, 7), (4, 1, 1)])
def test_streams_that_advance_together(name, lengths, runners):
    """A1 to A5, A8, A13, A14: prompts shorter and longer than the convolution looks back, nothing
    padded; layers in any order.
    """
    runner = runners(name)
    desk = Desk(runner)
    served = {}
    for number, length in enumerate(lengths):
        asked = Asked(tokens(number, length), 4)
        served[desk.submit(asked)] = asked
    check(desk, runner, served)


@pytest.mark.parametrize("name", ["moe", "four taps"])
@pytest.mark.parametrize("cuts", [(1, 2), (2,), (1,), (3,), (1, 2, 3, 4, 5), (4, 5)])
def test_chunks_shorter_than_the_convolution(name, cuts, runners):
    """A6, A7, A20, A26, alone and beside another that has the same first tokens."""
    runner = runners(name)
    asked = Asked(tokens(0, 6), 4, options={"starts": cuts})
    assert Desk(runner).reply(asked) == alone(runner, asked)
    desk = Desk(runner)
    other = Asked((*tokens(0, 4), 3, 4), 4)
    check(desk, runner, {desk.submit(asked): asked, desk.submit(other): other})


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_slot_let_again(length, runners):
    """A7, A10, A11: after a tenant that finished, and after one that was cancelled in its prompt or
    in its reply; slots and requests drift apart.
    """
    runner = runners()
    for num_turns in (0, 1, 2, 3, 30):
        desk = Desk(runner, num_slots=3, chunk=5, budget=0)
        first = [desk.submit(Asked(tokens(number, 12), 8)) for number in range(3)]
        desk.turn(num_turns)
        desk.scheduler.cancel(first[0])
        asked = Asked(tokens(7, length), 5)
        check(desk, runner, {desk.submit(asked): asked})
        for number, request in enumerate(first[1:], start=1):
            assert desk.draws[request] == alone(runner, Asked(tokens(number, 12), 8))


def test_states_are_resumed_only_where_they_were_kept(runners):
    """A9: states at 4 and 8; a prompt that shares 7 tokens goes on from 4."""
    runner = runners()
    desk = Desk(runner, chunk=16)
    prompt = tokens(1, 10)
    desk.reply(Asked(prompt, 2, options={"marks": (4, 8)}))
    other = Asked((*prompt[:7], 90, 91, 92), 4, options={"starts": (4, 7, 8)})
    number = desk.submit(other)
    check(desk, runner, {number: other})
    assert desk.num_cached[number] == 4


@pytest.mark.parametrize("length", [1, 2, 6, 20])
def test_the_same_prompt_again(length, runners):
    """A15, A16: one token at least is run, and both replies are the same."""
    runner = runners()
    desk = Desk(runner)
    asked = Asked(tokens(3, length), 4, options={"marks": (length - 1,)})
    replies = [desk.reply(asked) for _ in range(3)]
    assert replies == [alone(runner, asked)] * 3
    assert desk.num_cached[3] == length - 1


def test_prompts_with_another_end_middle_or_turn(runners):
    """A17, A21, after one prefix: another suffix, an edited middle, the last turn taken back; each
    resumes as far as it is the same, and no further.
    """
    runner = runners()
    desk = Desk(runner, chunk=16)
    start = tokens(2, 5)
    edited = (*start[:2], 96, *start[3:])
    cases = [
        ((*start, 1, 2), 0), ((*start, 3, 4), 5), ((*start, 1, 2), 5), ((*edited, 1, 2), 0),
        ((*start, 1), 5), (start, 0),
    ]  # fmt: skip
    for prompt, num_cached in cases:
        asked = Asked(prompt, 3, options={"marks": (5,)})
        number = desk.submit(asked)
        check(desk, runner, {number: asked})
        assert desk.num_cached[number] == num_cached, prompt


def test_each_turn_of_a_chat_computes_only_what_is_new(runners):
    """A21: the number of tokens, and replies as from nothing."""
    runner = runners()
    desk = Desk(runner, chunk=16)
    prompt, held = tokens(4, 5), 0
    for turn in range(4):
        asked = Asked(prompt, 3, options={"keeps_reply": True, "starts": (held,)})
        number = desk.submit(asked)
        check(desk, runner, {number: asked})
        assert desk.num_cached[number] == held
        reply = tuple(draw.token for draw in desk.draws[number])
        held = len(prompt) + len(reply) - 1
        prompt += (*reply, *tokens(turn + 5, 4))


def wrong(stream, limit: int) -> list[int]:
    return [(stream.tokens[-1] + 1) % 97] * limit


def drafter(runner: Runner, asked: list[Asked], num_right: int):
    """Proposes the first `num_right` tokens of the reply right, and then wrong ones."""
    replies = {one.prompt: [draw.token for draw in alone(runner, one)] for one in asked}

    def draft(stream, limit: int) -> list[int]:
        reply = replies[stream.request.prompt]
        right = reply[stream.num_made :][: min(num_right, limit)]
        return [*right, *wrong(stream, limit - len(right))]

    return draft


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("is_warm, num_streams", [*product((False, True), (1, 2))])
def test_drafts_are_never_seen(num_right, is_warm, num_streams, runners):
    """A23, A24: always wrong, right for 1 of 3, always right; after nothing or after a kept state;
    alone or beside another; greedy and sampled.
    """
    runner = runners()
    prefix = tokens(6, 9)
    asked = [
        Asked((*prefix, number), 9, SAMPLINGS[4 * number], {"marks": (9,)})
        for number in range(num_streams)
    ]
    draft = drafter(runner, asked, num_right)
    desk = Desk(runner, draft=draft, max_window=4)
    if is_warm:
        desk.reply(Asked(prefix + (50,), 1, options={"marks": (9,)}))
    served = {desk.submit(one): one for one in asked}
    check(desk, runner, served)
    # The second waits for what the first keeps.
    assert [desk.num_cached[number] == 9 for number in served] == [is_warm, True][:num_streams]
    stats = [desk.endings[number].stats for number in served]
    assert all(one.num_drafted > 0 for one in stats)
    assert all((one.num_accepted > 0) == (num_right > 0) for one in stats)


def test_a_pass_that_was_cancelled_is_taken_up_again(runners):
    """A26: cancelled after the second of four chunks; then resumed, with another stream's rounds
    between the chunks.
    """
    runner = runners()
    desk = Desk(runner, chunk=4, is_mixing=False)
    asked, other = Asked(tokens(8, 16), 4), Asked(tokens(9, 3), 12)
    first = desk.submit(asked)
    desk.turn(2)
    desk.scheduler.cancel(first)
    desk.finish()
    assert desk.endings[first].reason == "cancelled"
    beside = desk.submit(other)
    desk.turn()
    second = desk.submit(asked)
    check(desk, runner, {second: asked, beside: other})
    assert desk.num_cached[second] == 8


@pytest.mark.parametrize(
    "plant",
    [
        lambda segment, first: {"slot": first.slot},
        lambda segment, first: {"base": first.base},
        lambda segment, first: {"start": max(segment.start - 1, 0)},
    ],
    ids=["the first stream's convolution", "the first stream's keys", "a position too low"],
)
def test_planted_faults_show(plant, runners, monkeypatch):
    """A28: what would go unseen here would go unseen in all tests above."""
    runner = runners()
    asked = [Asked(tokens(number, 5), 6) for number in range(2)]
    wanted = [alone(runner, one) for one in asked]
    run = runner.run

    def faulty(round: Round):
        first = round.segments[0]
        planted = [type(one)(**(vars(one) | plant(one, first))) for one in round.segments]
        return run(Round(tuple(planted)))

    monkeypatch.setattr(runner, "run", faulty)
    desk = Desk(runner)
    numbers = [desk.submit(one) for one in asked]
    desk.finish()
    assert [desk.draws[number] for number in numbers] != wanted


def test_what_a_shortened_copy_reaches(runners):
    """The rings of a state hold the last 64 columns written, of which a row reads 2: so far back a
    state can be shortened, and the shortened one no further.
    """
    runner = runners()
    serving = DrawingRunner(runner)
    copier = serving.copier
    copy = copier.keep(0, 0, 100, written=104)
    assert [copier.reaches(copy, at) for at in (101, 100, 42, 41)] == [False, True, True, False]
    assert not copier.reaches(copy.shortened(60), 61)
    assert copier.reaches(copy.shortened(60), 42) and not copier.reaches(copy.shortened(60), 41)
    chunked(runner, 0, 0, tokens(0, 40), (40,))
    copy = copier.keep(0, 0, 100, written=104)
    pool = next(iter(runner.state.keys.values()))
    before = pool.numpy()
    serving.restore(copy.shortened(30), 3, 500)
    is_new = np.isfinite(pool.numpy()) & ~np.isfinite(before)
    changed = np.flatnonzero(is_new.any(axis=(1, 2)))
    assert changed.tolist() == [*range(500, 530)]
    assert serving.keep(3, 500, 30).written == 104
    serving.release(copy)
    with pytest.raises(ValueError, match="released"):
        serving.restore(copy, 3, 500)
