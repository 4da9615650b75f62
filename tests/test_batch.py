"""Model.batch and streams side by side, on the built-in model."""

from itertools import count, islice

import pytest

from lfm2.config import Config
from lfm2.engine import Model
from lfm2.errors import LFM2Error, NonFiniteLogits, RequestError
from lfm2.sampling import Sampling, draw
from lfm2.service import Service
from lfm2.tokenizer import Tokenizer
from metal_ops.table import Capacity
from tests.build import DEMO, NUM_TOKENS, build_runner

QUESTION = "What is the capital of France?"
# Forms for the prompts here, and for the rows of all streams.
FORMS = (Capacity(4, 4, 4), Capacity(64, 16, 16))
BE_BRIEF = {"role": "system", "content": "Be brief. " * 20}
REQUESTS = [
    {"prompt": QUESTION},
    {"prompt": "Tell me a story about a fox.", "max_tokens": 40},
    {"messages": [{"role": "user", "content": "What is 27 + 48?"}], "stop": "75"},
    {"prompt": "Tell me a story about a dog.", "max_tokens": 30, "temperature": 1.0, "seed": 7},
    {"prompt": "Once upon a time", "raw": True, "max_tokens": 20, "repetition_penalty": 1.2},
    {"prompt": [1, 5, 9], "max_tokens": 12, "temperature": 0.8, "num_logprobs": 2},
    {"messages": [BE_BRIEF, {"role": "user", "content": QUESTION}], "max_tokens": 5},
    {"messages": [BE_BRIEF, {"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 5},
]


@pytest.fixture(scope="module")
def runner(steps):
    return build_runner(DEMO, steps, capacities=FORMS)


@pytest.fixture(scope="module")
def make(runner):
    """Makes a model of so many streams, over the memory that the one before left behind."""
    config = Config.from_folder(DEMO)
    tokenizer = Tokenizer.from_folder(DEMO, config)

    def make(streams: int = 4, **options) -> Model:
        service = Service(runner, streams, **{"chunk": 48} | options)
        return Model(config, tokenizer, service, Sampling(), NUM_TOKENS)

    return make


@pytest.fixture(scope="module")
def solo(make):
    """What each request gives on its own."""
    return [one.reply for asked in REQUESTS for one in make(1, cache_bytes=0).batch([asked])]


def content(reply):
    return (reply.text, reply.tokens, reply.ended_by, reply.draws, reply.num_prompt_tokens)


@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("ordered", [False, True])
def test_replies_are_those_of_each_request_alone(streams, ordered, make, solo):
    replies = list(make(streams).batch(REQUESTS, ordered=ordered))
    found = {one.index: one.reply for one in replies}
    assert [content(found[index]) for index in range(len(REQUESTS))] == [*map(content, solo)]
    order = [one.index for one in replies]
    assert (order == sorted(order)) == (ordered or streams == 1)
    assert found[0].text == "The capital of France is Paris."
    assert found[2].text == "27 + 48 = " and found[2].ended_by == "stop text"


def test_a_token_is_drawn_for_its_position_from_what_is_before_it(make):
    """By the definition: the logits of the whole text so far, and no loop."""
    model, text = make(3), [5, 9, 300, 40]
    sampling = Sampling(temperature=1.5, repetition_penalty=1.3, seed=11)
    for _ in range(6):
        logits = model.logits(text)[-1]
        text.append(draw(logits, sampling, 11, len(text), text).token)
    options = {"temperature": 1.5, "repetition_penalty": 1.3, "seed": 11, "max_tokens": 6}
    asked = [{"prompt": text[:4], **options}, {"prompt": text[:5], **options}]
    first, second = (one.reply.tokens for one in make(3).batch(asked, ordered=True))
    assert list(first) == text[4:] and list(second)[:5] == text[5:]


def test_generate_gives_the_same(make, solo):
    model = make(2)
    for asked, wanted in zip(REQUESTS, solo):
        given = dict(asked)
        prompt = given.pop("prompt", None) or given.pop("messages")
        assert content(model.generate(prompt, **given)) == content(wanted)


@pytest.mark.parametrize(
    "asked, words",
    [
        (5, "a request is a dict, got int"),
        ({}, "neither prompt nor messages"),
        ({"prompt": None}, "neither prompt nor messages"),
        ({"prompt": "a", "messages": []}, "both prompt and messages"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"messages": []}, "the list of messages is empty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": 5000}, "do not fit a context of 1024"),
        ({"prompt": "a", "id": 3}, "unknown sampling option 'id'"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": [5, 4096]}, "token 4096"),
        ({"prompt": [1], "logit_bias": {4096: 1.0}}, "logit_bias names token 4096"),
    ],
)
def test_a_bad_request_is_an_error_and_the_others_go_on(asked, words, make):
    replies = list(make().batch([REQUESTS[0], asked, REQUESTS[2]], ordered=True))
    assert [one.index for one in replies] == [0, 1, 2]
    assert replies[0].reply.text == "The capital of France is Paris." and replies[2].reply
    assert replies[1].reply is None and isinstance(replies[1].error, RequestError)
    assert words in str(replies[1].error)


def test_a_reply_that_fails_ends_alone(make, solo, runner, monkeypatch):
    """Logits that are not finite, of a prompt and of a row beside others; and a runner that breaks
    at one prompt.
    """
    run = runner.run
    bases = set()

    class Flagged:
        """A round in which a drawn row has no finite logit."""

        def __init__(self, drawn, row):
            self.tokens, self.is_finite = drawn.tokens, drawn.is_finite.copy()
            self.is_finite[row] = False
            self.all = drawn.logits().copy()
            self.all[row] = float("nan")

        def logits(self):
            return self.all

    def spoiled(round):
        if any(99 in segment.tokens for segment in round.segments):
            raise RuntimeError("the device is gone")
        drawn = run(round)
        made = [one for one in round.segments if one.num_drawn]
        for row, one in enumerate(made):
            if one.tokens == (5, 97):
                bases.add(one.base)
            if one.tokens == (5, 98) or (one.start == 3 and one.base in bases):
                return Flagged(drawn, row)
        return drawn

    monkeypatch.setattr(runner, "run", spoiled)
    prompts = ([5, 99], [5, 98], [5, 97])
    asked = [REQUESTS[1], *({"prompt": prompt} for prompt in prompts), REQUESTS[0]]
    found = {one.index: one for one in make().batch(asked)}
    assert content(found[0].reply) == content(solo[1])
    assert content(found[4].reply) == content(solo[0])
    assert isinstance(found[2].error, NonFiniteLogits)
    assert isinstance(found[3].error, NonFiniteLogits) and "position 4" in str(found[3].error)
    assert isinstance(found[1].error, LFM2Error) and "the device is gone" in str(found[1].error)


def test_requests_are_taken_as_they_are_needed(make):
    """At most twice as many as there are streams are under way, of a source that never ends."""
    taken = []

    def source():
        for number in count():
            taken.append(number)
            yield {"prompt": [1, number % 50], "max_tokens": 3}

    replies = make(2).batch(source())
    assert not taken
    for done, _ in enumerate(islice(replies, 10)):
        assert len(taken) <= done + 4
    replies.close()


def test_a_batch_that_is_left_frees_what_it_had(make, solo):
    model = make(2)
    replies = model.batch([REQUESTS[1]] * 6)
    next(replies)
    replies.close()
    model.service.turn()
    assert model.service.scheduler.is_idle and model.service.scheduler.is_whole
    assert content(next(model.batch([REQUESTS[0]])).reply) == content(solo[0])


def test_a_source_that_fails_is_heard(make):
    def source():
        yield REQUESTS[0]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(make().batch(source()))


def test_a_common_prefix_is_computed_once(make):
    """The second of two prompts that begin alike, with a cut where their messages part; text that
    has no messages is cut where it parts from the one before.
    """
    model = make(4)
    found = list(model.batch(REQUESTS[6:], ordered=True))
    start = model.encode([BE_BRIEF]).index(model.tokenizer.bpe.token_to_id("<|im_end|>"))
    assert [one.reply.num_reused_tokens > start for one in found] == [False, True]
    text = [20 + i % 60 for i in range(100)]
    asked = [{"prompt": [*text, *[number] * 30], "max_tokens": 2} for number in (7, 8, 9, 10)]
    reused = [one.reply.num_reused_tokens for one in make(1).batch(asked, ordered=True)]
    assert reused == [0, 96, 100, 100]
    reused = [one.reply.num_reused_tokens for one in make(4).batch(asked, ordered=True)]
    assert reused[0] == 0 and min(reused[1:]) >= 96


def test_streams_side_by_side(make, solo):
    """Two streams are read in turn, and a batch beside them."""
    model = make(3)
    given = [dict(REQUESTS[index]) for index in (1, 3)]
    streams = [model.stream(one.pop("prompt"), **one) for one in given]
    texts = ["", ""]
    for i, stream in enumerate(streams):
        for piece in islice(stream, 3):
            texts[i] += piece
    assert content(next(model.batch([REQUESTS[0]])).reply) == content(solo[0])
    for i in (1, 0):
        texts[i] += "".join(streams[i])
    assert texts == [solo[1].text, solo[3].text]
    assert content(streams[1].reply) == content(solo[3])


def test_a_stream_that_nobody_has_any_more_ends(make):
    model = make(2)
    stream = model.stream("Tell me a story about a fox.")
    next(stream)
    assert model.service.scheduler.counts().decoding == 1
    del stream
    asked = [{"prompt": [5], "max_tokens": 1}]
    list(model.batch(asked))
    assert model.service.scheduler.is_idle and model.service.scheduler.is_whole


def test_a_stream_that_was_stopped_is_gone_on_from(make):
    model = make(1)
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    stream = model.stream(messages)
    said = "".join(islice(stream, 8))
    stream.cancel()
    assert list(stream) == [] and stream.reply is None
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    reply = model.generate(messages, max_tokens=4)
    assert reply.num_reused_tokens > len(stream.prompt)
    assert reply.tokens == make(1, cache_bytes=0).generate(messages, max_tokens=4).tokens


def test_logits_end_what_is_under_way(make):
    model = make(2)
    stream = model.stream("Tell me a story about a fox.")
    next(stream)
    replies = model.batch([{"prompt": [5], "max_tokens": 1}, *[REQUESTS[1]] * 3], ordered=True)
    assert next(replies).reply
    model.logits([1, 2])
    with pytest.raises(RequestError, match="later call"):
        list(stream)
    ends = list(replies)
    assert [one.index for one in ends] == [1, 2, 3]
    assert all("later call" in str(one.error) for one in ends)


def test_an_interrupt_leaves_every_reply_whole(make, solo, runner, monkeypatch):
    """A round that an interrupt ends is run again by the next one that is read."""
    run, calls = runner.run, []

    def interrupted(round):
        drawn = run(round)
        calls.append(round)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return drawn

    monkeypatch.setattr(runner, "run", interrupted)
    model = make(2)
    given = [dict(REQUESTS[index]) for index in (1, 3)]
    streams = [model.stream(one.pop("prompt"), **one) for one in given]
    texts, num_interrupts = ["", ""], 0
    for _ in range(4):
        for i, stream in enumerate(streams):
            try:
                texts[i] += next(stream)
            except KeyboardInterrupt:
                num_interrupts += 1
    texts = [text + "".join(stream) for text, stream in zip(texts, streams)]
    assert num_interrupts == 2 and texts == [solo[1].text, solo[3].text]


def test_replies_in_order_hold_few_back(make):
    """The first one takes long: only so many of those behind it are read, let alone kept."""
    taken = 0

    def requests():
        nonlocal taken
        for index in range(40):
            taken += 1
            yield {"prompt": [1, 5 + index], "max_tokens": 2 if index else 60}

    replies = make(2).batch(requests(), ordered=True)
    assert next(replies).index == 0
    assert taken <= 5
    assert [one.index for one in replies] == list(range(1, 40))
