"""What may be asked of a model, told without one; and the text of ids, told with one."""

import pytest

import lfm2
from lfm2.errors import RequestError
from lfm2.request import check_request

TURN = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        (" \n", {}, "the prompt is empty"),
        (7, {}, "text, messages or token ids, got int"),
        (None, {}, "got NoneType"),
        (b"Hi", {}, "got bytes"),
        (["Hi"], {}, "message 1 must be a dict with role and content, got str"),
        ([TURN, 5], {"system": "be"}, "message 2 must be a dict .* got int"),
        ([TURN], {"raw": True}, "a raw prompt is text, got list"),
        ("Hi", {"raw": True, "system": "be"}, "a raw prompt is text, without system prompt"),
        ("Hi", {"system": 5}, "a system prompt is text, got int"),
        ("Hi", {"stop": ["a", ""]}, "at least one character"),
        ("Hi", {"stop": 5}, "stop is a text or a list of texts, got int"),
        ("Hi", {"max_tokens": True}, "max_tokens is True"),
        ("Hi", {"top_p": 0}, "top_p is 0"),
        ("Hi", {"stops": "a"}, "'stops'; all options: max_tokens, stop, .*temperature.*seed"),
    ],
)
def test_a_request_that_no_model_can_serve_is_refused(prompt, options, words):
    with pytest.raises(RequestError, match=words):
        check_request(prompt, **options)


def test_a_request_that_some_model_may_serve_passes():
    check_request("Hi", stop="a", max_tokens=3, temperature=0.5, logit_bias={1: 2.0})
    check_request([TURN], stop=("a", "b"), system="be", tools=[{"name": "add"}], seed=None)
    check_request("Hi", raw=True)


def test_the_text_of_ids(steps):
    model = lfm2.load(cache=steps)
    ids = model.encode("Once upon a time", raw=True)
    assert model.decode(ids) == "Once upon a time"
    assert model.decode(ids, skip_special=False) == "<|startoftext|>Once upon a time"
    with pytest.raises(RequestError, match="token 4096"):
        model.decode([4096])
