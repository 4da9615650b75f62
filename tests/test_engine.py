"""The Python interface on the built-in model: replies, reuse of a held prompt, refusals, and logits
that are not finite.
"""

import json
from itertools import islice

import numpy as np
import pytest

import lfm2
from lfm2.config import Config
from lfm2.engine import Model
from lfm2.errors import NonFiniteLogits, RequestError, TokenizerError
from lfm2.sampling import Sampling
from lfm2.service import Service
from lfm2.tokenizer import Tokenizer
from metal_ops.launch import copy_in
from metal_ops.table import Capacity
from tests import tiny
from tests.build import DEMO, GOLDENS, NUM_TOKENS, build_runner

REPLIES = json.loads((GOLDENS / "demo_text.json").read_text(encoding="utf-8"))["replies"]
QUESTION = "What is the capital of France?"
STORY = (
    "Once upon a time there was a small red fox called Mia. "
    "She lived by the river with her friend Tom, an old bear."
)


@pytest.fixture(scope="module")
def runner(steps):
    """The built-in model in fp32; all rounds run in one form, to compile no other."""
    return build_runner(DEMO, steps, capacities=(Capacity(64, 1, 64),))


@pytest.fixture(scope="module")
def parts():
    config = Config.from_folder(DEMO)
    return config, Tokenizer.from_folder(DEMO, config)


@pytest.fixture
def fresh(runner, parts):
    """Makes a Model that holds nothing yet, over the memory that the one before left behind."""
    config, tokenizer = parts

    def fresh(context: int = NUM_TOKENS, chunk: int = 64, **options) -> Model:
        service = Service(runner, chunk=chunk, **options)
        return Model(config, tokenizer, service, Sampling(), context)

    return fresh


def asked(model: Model, text: str, **options) -> tuple[int, ...]:
    return model.generate(text, raw=True, **{"max_tokens": 8} | options).tokens


def test_load_and_ask(steps):
    model = lfm2.load(device="CPU", dtype="float32", cache=steps)
    reply = model.generate(QUESTION)
    assert reply.text == "The capital of France is Paris."
    assert (reply.finish_reason, reply.num_prompt_tokens, reply.num_reused_tokens) == (
        "stop",
        17,
        0,
    )


@pytest.mark.parametrize(
    "golden", REPLIES, ids=lambda golden: golden["messages"][-1]["content"][:20]
)
def test_replies_equal_those_of_other_engines(golden, fresh):
    stream = fresh().stream(golden["messages"], max_tokens=120)
    assert "".join(stream) == golden["reply_text"] == stream.reply.text
    assert list(stream.reply.tokens) == golden["reply_ids"]
    assert stream.reply.finish_reason == golden["finish_reason"]
    assert stream.prompt == golden["prompt_ids"]


def test_logits_of_all_rows(fresh):
    goldens = np.load(GOLDENS / "demo.npz")
    model, ids = fresh(), goldens["prompt_200"]
    logits = model.logits(ids)
    assert (logits.shape, logits.dtype) == ((200, 4096), np.float32)
    assert np.abs(logits - goldens["logits_200"]).max() <= 1e-4
    pieces = list(model.logits_by_chunk(ids))
    assert [start for start, _ in pieces] == [0, 64, 128, 192]
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in pieces]), logits)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}])
def test_a_prompt_longer_than_a_chunk_gives_the_same_reply(chunk, options, fresh):
    whole = fresh().generate(STORY, raw=True, max_tokens=12, **options)
    cut = fresh(chunk=chunk).generate(STORY, raw=True, max_tokens=12, **options)
    assert cut.tokens == whole.tokens


def test_the_same_prompt_twice(fresh):
    """All but its last token is held, which is run again; also for a prompt of one token."""
    model = fresh()
    for text, num_tokens in ((STORY, len(model.encode(STORY, raw=True))), ("<|startoftext|>", 1)):
        model = fresh()
        first, second = (
            model.generate(text, raw=True, max_tokens=6, num_logprobs=5) for _ in range(2)
        )
        assert second.draws == first.draws
        assert (first.num_prompt_tokens, first.num_reused_tokens, second.num_reused_tokens) == (
            num_tokens,
            0,
            num_tokens - 1,
        )


def test_prompts_that_part_late_early_and_in_the_middle(fresh):
    """Whatever came before, the reply is that of a model that holds nothing."""
    texts = [
        f"{STORY} One day Mia", f"{STORY} But Tom", f"{STORY} One day Mia",
        STORY.replace("small", "big"),
        STORY, f"{STORY} One day Mia", "Tom", "Mia", STORY[:40],
    ]  # fmt: skip
    cold = {text: asked(fresh(), text) for text in texts}
    model, reused = fresh(), []
    for text in texts:
        reply = model.generate(text, raw=True, max_tokens=8)
        assert reply.tokens == cold[text], text
        reused.append(reply.num_reused_tokens)
    common, whole = (len(model.encode(text, raw=True)) for text in (STORY, texts[0]))
    assert reused[1:3] == [common, whole - 1]


def test_what_the_rings_no_longer_reach_is_run_again(fresh):
    """The state after a prompt serves prompts that part from it up to as far back as its rings
    have columns for: 64, of which a row reads 2.
    """
    ids = fresh().encode(STORY * 4, raw=True)
    for num_dropped, is_reused in ((62, True), (63, False)):
        shared = len(ids) - num_dropped
        other = [*ids[:shared], 99, 98]
        cold = fresh(cache_bytes=0).generate(other, max_tokens=4, num_logprobs=1)
        model = fresh()
        # The end of the reply reaches less far back than the end of its prompt.
        model.generate(ids, max_tokens=3)
        reply = model.generate(other, max_tokens=4, num_logprobs=1)
        assert (reply.num_reused_tokens, reply.draws) == (shared * is_reused, cold.draws)


def test_a_chats_next_turn_runs_only_what_is_new(fresh):
    model, chat = fresh(), [{"role": "user", "content": QUESTION}]
    first = model.generate(chat)
    chat += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "What is 27 + 48?"},
    ]
    second = model.generate(chat)
    assert second.num_reused_tokens == first.num_prompt_tokens + len(first.tokens) - 1
    assert second.tokens == fresh().generate(chat).tokens
    # The last turn is taken back and put otherwise.
    chat[-1] = {"role": "user", "content": "And of Spain?"}
    assert model.generate(chat).tokens == fresh().generate(chat).tokens


def test_another_question_after_the_same_system_prompt_runs_alone(fresh):
    """However long the questions are."""
    model = fresh()
    first, second = (
        [{"role": "system", "content": STORY * 4}, {"role": "user", "content": f"{name} " * 70}]
        for name in ("Mia", "Tom")
    )
    model.generate(first, max_tokens=2)
    reply = model.generate(second, max_tokens=4)
    assert reply.num_reused_tokens == model.tokenizer.message_starts(model.encode(second))[1]
    assert reply.tokens == fresh(cache_bytes=0).generate(second, max_tokens=4).tokens


@pytest.mark.parametrize("num_calls, is_kept", [(1, False), (3, True)])
def test_an_abandoned_or_broken_reply_does_not_show_in_the_next(
    fresh, runner, monkeypatch, num_calls, is_kept
):
    """Broken off in the prompt, the slot holds nothing; in a later token, what it held before."""
    cold = asked(fresh(), QUESTION)
    model = fresh()
    for _ in model.stream(STORY, raw=True):
        break
    assert asked(model, QUESTION) == cold
    model, run, calls = fresh(), runner.run, []

    def interrupted(round):
        run(round)
        calls.append(round)
        if len(calls) == num_calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", lambda round: interrupted(round) or run(round))
    with pytest.raises(KeyboardInterrupt):
        asked(model, QUESTION)
    monkeypatch.setattr(runner, "run", run)
    reply = model.generate(QUESTION, raw=True, max_tokens=8)
    assert reply.tokens == cold
    assert reply.num_reused_tokens == (reply.num_prompt_tokens - 1 if is_kept else 0)


def test_a_stream_that_is_left_goes_on_where_it_was(fresh):
    whole = list(fresh().stream(STORY, raw=True, max_tokens=12))
    stream = fresh().stream(STORY, raw=True, max_tokens=12)
    pieces = list(islice(stream, 3))
    assert pieces == whole[:3]
    assert "".join(pieces + list(stream)) == stream.reply.text == "".join(whole)
    assert list(stream) == []


@pytest.mark.parametrize(
    "later",
    [lambda model: model.generate("b", raw=True, max_tokens=1), lambda model: model.logits([1])],
)
def test_a_later_call_ends_a_stream(later, fresh):
    model = fresh()
    stream = iter(model.stream(STORY, raw=True))
    next(stream)
    later(model)
    with pytest.raises(RequestError, match="later call"):
        list(stream)


def test_a_later_call_ends_the_reading_of_logits(fresh):
    model = fresh()
    pieces = model.logits_by_chunk([1] * 100)
    next(pieces)
    asked(model, QUESTION, max_tokens=1)
    with pytest.raises(RequestError, match="later call"):
        next(pieces)


def test_stops(fresh):
    """At a stop string, which is not part of the text; at max_tokens; at an end token, which is not
    either.
    """
    reply = fresh().generate(QUESTION, stop=[" Par", "nothing"])
    assert (reply.text, reply.finish_reason) == ("The capital of France is", "stop")
    reply = fresh().generate(QUESTION, max_tokens=3)
    assert (len(reply.tokens), reply.finish_reason, reply.text) == (3, "length", "The capital of")
    reply = fresh().generate(QUESTION)
    assert (reply.tokens[-1], reply.finish_reason, reply.text[-6:]) == (7, "stop", "Paris.")


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        ("", {}, "the prompt is empty"),
        (" \n", {"raw": True}, "the prompt is empty"),
        ([], {}, "messages"),
        ("Hi", {"max_tokens": 0}, "max_tokens is 0"),
        ("Hi", {"max_tokens": -3}, "max_tokens is -3"),
        ("Hi", {"max_tokens": 2.5}, "max_tokens is 2.5"),
        ("Hi", {"max_tokens": 10**12}, "ask for at most"),
        ("word " * 100, {}, "the context holds 100"),
        ("Hi", {"temperature": -1}, "temperature is -1"),
        ("Hi", {"temprature": 1}, "unknown sampling option 'temprature'"),
        ("Hi", {"stop": ""}, "stop string"),
        ("Hi", {"raw": True, "system": "Be brief."}, "raw"),
    ],
)
def test_requests_that_cannot_be_served_cost_nothing(
    prompt, options, words, fresh, runner, monkeypatch
):
    monkeypatch.setattr(runner, "run", None)
    with pytest.raises(RequestError, match=words) as error:
        fresh(context=100).generate(prompt, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "ids, words",
    [([], "no tokens"), ([4096], "token 4096"), ([-1], "token -1"), ([1] * 101, "101 tokens")],
)
def test_tokens_that_cannot_be_run_are_named(ids, words, fresh, runner, monkeypatch):
    monkeypatch.setattr(runner, "run", None)
    with pytest.raises(RequestError, match=words):
        fresh(context=100).logits(ids)


def test_a_reply_may_fill_the_context(fresh):
    num_tokens = len(fresh().encode(STORY, raw=True))
    whole = asked(fresh(), STORY)
    model = fresh(context=num_tokens + 8)
    assert asked(model, STORY, max_tokens=None) == whole
    with pytest.raises(RequestError, match="ask for at most 8 tokens"):
        asked(model, STORY, max_tokens=9)


@pytest.fixture
def spoil(runner):
    """Writes bf16 bits over a row of the head, or of another weight, and puts the weights back
    afterwards.
    """
    spoiled = []

    def write(name: str, row: int, value: np.ndarray) -> None:
        weight = runner.model.weights[name]
        bits = (np.asarray(value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        spoiled.append((weight, weight.bitcast("uint16").numpy().copy()))
        copy_in(weight, row * bits.nbytes, memoryview(bits).cast("B"))

    yield write
    for weight, bits in reversed(spoiled):
        copy_in(weight, 0, memoryview(bits).cast("B"))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"num_logprobs": 3}])
@pytest.mark.parametrize(
    "token, value", [(0, np.nan), (2000, np.nan), (4095, np.nan), (2000, np.inf), (None, np.nan)]
)
def test_logits_that_are_not_finite_end_the_reply(token, value, sampling, fresh, spoil):
    """One logit at the start, in the middle, at the end, or all; the model serves on once it is
    sound.
    """
    if token is None:
        spoil("embedding_norm.weight", 0, np.full(256, value))
    else:
        spoil("embed_tokens.weight", token, np.full(256, value))
    with pytest.raises(NonFiniteLogits, match="the reply ends here"):
        fresh().generate(QUESTION, **sampling)


def test_ties_go_to_the_lowest_id_on_every_path(fresh, spoil, runner):
    """Two more rows of the head become that of the winner, 312: one of a lower id and one of a
    higher.
    """
    head = runner.model.weights["embed_tokens.weight"].float().numpy()
    for others, winner in (((4000,), 312), ((100, 4000), 100)):
        for other in others:
            spoil("embed_tokens.weight", other, head[312])
        for sampling in ({}, {"num_logprobs": 2}, {"temperature": 1.0, "top_k": 1}):
            assert fresh().generate(QUESTION, max_tokens=1, **sampling).tokens == (winner,)


def test_a_folder_without_a_tokenizer_serves_token_ids(tmp_path, steps):
    """The end token of generation_config.json ends a reply here too."""
    config = tiny.dense_config()
    folder = tiny.write_checkpoint(tmp_path / "ids", config)
    golden = np.load(GOLDENS / "dense.npz")
    prompt, greedy = golden["prompt_9"].tolist(), golden["greedy_9"].tolist()
    model = lfm2.load(folder, device="CPU", context=256, cache=steps)
    assert list(model.generate(prompt, max_tokens=32).tokens) == upto(
        greedy, config["eos_token_id"]
    )
    np.testing.assert_allclose(model.logits(prompt), golden["logits_9"], rtol=0, atol=1e-4)
    last = next(token for token in greedy if token not in greedy[:4])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [last]}))
    reply = lfm2.load(folder, device="CPU", context=256, cache=steps).generate(prompt)
    assert list(reply.tokens) == upto(greedy, last) and reply.finish_reason == "stop"
    with pytest.raises(TokenizerError, match="list of token ids"):
        model.generate("text")


def upto(tokens, last):
    """The tokens up to `last`, that included."""
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


def test_prompts_that_fall_back_step_by_step_are_those_of_a_fresh_model(fresh):
    """Each is within the ring's reach of the last, and soon out of that of the first."""
    model, ids = fresh(), fresh().encode(STORY * 4, raw=True)
    prompts = [ids[:length] for length in range(len(ids), len(ids) - 120, -15)]
    options = {"max_tokens": 3, "num_logprobs": 1}
    warm = [model.generate(prompt, **options).draws for prompt in prompts]
    # All models here have one state: a cold run between two warm ones would mend it.
    assert warm == [fresh().generate(prompt, **options).draws for prompt in prompts]


def test_a_token_beyond_the_vocabulary_is_refused_before_it_is_looked_up(fresh):
    with pytest.raises(RequestError, match="token 4096 is not in the vocabulary"):
        fresh().generate([1, 4096], max_tokens=1)
    with pytest.raises(RequestError, match="token -1 "):
        fresh().generate([-1], max_tokens=1)


def test_models_that_share_their_steps_share_no_memory(steps):
    """Both load the same artifact, whose buffers another process named."""
    models = [lfm2.load(device="CPU", context=512, cache=steps) for _ in range(2)]
    replies = [model.generate(QUESTION, max_tokens=4).tokens for model in models]
    assert replies[0] == replies[1]
    first, second = (
        {buffer._buf.va_addr for form in model.runner.forms.values() for buffer in buffers_of(form)}
        for model in models
    )
    assert first and not first & second


def buffers_of(form):
    """The device buffers that a form's kernels touch."""
    form.step()
    return [kept for kept in form.step._commands._kept if hasattr(kept, "_buf")]
