import json
import random
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from lfm2.errors import RequestError, TokenizerError
from lfm2.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "lfm2" / "demo"
CONFIG = SimpleNamespace(vocab_size=4096, bos_token_id=1, eos_token_ids=(7,))
BOS, END_OF_DOCUMENT, IM_START, IM_END, TOOL_CALL_START = 1, 2, 6, 7, 10
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(DEMO, CONFIG)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The tokenizer files of the built-in model, to be changed by a test."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / name, tmp_path / name)
    shutil.copyfile(DEMO / "chat_template.jinja", tmp_path / "chat_template.jinja")
    return tmp_path


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_plain_text_has_exactly_one_bos(demo):
    ids = demo.encode("Hello there")
    assert ids[0] == BOS
    assert demo.encode("<|startoftext|>Hello there") == ids
    assert demo.encode("<|startoftext|><|startoftext|>Hello there") == ids
    assert demo.encode("Hello there", add_bos=False) == ids[1:]
    assert demo.encode("") == [BOS]
    assert demo.encode("", add_bos=False) == []


def test_a_chat_has_exactly_one_bos_and_its_special_tokens(demo):
    ids = demo.encode_chat(USER)
    assert demo.decode(ids, skip_special=False) == (
        "<|startoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(BOS), ids.count(IM_START), ids.count(IM_END)) == (1, 2, 1)
    assert demo.encode_chat(USER, add_generation_prompt=False) == ids[:-3]


def test_a_template_that_writes_bos_twice_gives_one(folder):
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}Hello")
    tokenizer = Tokenizer.from_folder(folder, CONFIG)
    assert tokenizer.encode_chat(USER) == tokenizer.encode("Hello")


def test_a_template_without_bos_gives_none(folder):
    (folder / "chat_template.jinja").write_text("Hello")
    tokenizer = Tokenizer.from_folder(folder, CONFIG)
    assert tokenizer.encode_chat(USER) == tokenizer.encode("Hello", add_bos=False)


def test_decode_equals_the_librarys_own(demo):
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(300 if draw.random() < 0.5 else 4096) for _ in range(50)]
        assert demo.decode(ids) == demo.bpe.decode(ids)
        assert demo.decode(ids, False) == demo.bpe.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["  two  spaces\n\n", "naïve 東京 😸 \x00", "it's 1234 ¡ÿ¬"])
def test_text_survives_encode_and_decode(demo, text):
    assert demo.decode(demo.encode(text)) == text


def test_special_tokens_are_skipped_unless_asked_for(demo):
    ids = [TOOL_CALL_START, *demo.encode("f()", add_bos=False), IM_END]
    assert demo.decode(ids) == "f()"
    assert demo.decode(ids, skip_special=False) == "<|tool_call_start|>f()<|im_end|>"


def test_an_added_token_that_is_not_special_is_shown_as_spelled(folder):
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added.append({"id": 4096, "content": "<é x>", "special": False} | kind)
    change(folder / "tokenizer.json", added_tokens=added)
    wider = SimpleNamespace(vocab_size=4160, bos_token_id=1, eos_token_ids=(7,))
    assert Tokenizer.from_folder(folder, wider).decode([4096]) == "<é x>"


def test_ids_without_a_token_decode_to_nothing(demo):
    hi = demo.encode("Hi", add_bos=False)
    assert demo.decode([4096, *hi, 65535]) == "Hi"


def test_text_that_is_not_unicode_is_refused(demo):
    with pytest.raises(RequestError, match="not valid Unicode at character 3"):
        demo.encode("ab\udcff")
    with pytest.raises(RequestError, match="not valid Unicode"):
        demo.encode_chat([{"role": "user", "content": "ab\udcff"}])


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "tokenizer_eos", "expected"),
    [
        ((2,), 7, None, {2, 7}),
        ((7,), [7, 9], None, {2, 7, 9}),
        ((3,), None, "<|im_end|>", {2, 3, 7}),
        ((3,), None, {"content": "<|fim_pre|>"}, {2, 3}),
    ],
)
def test_eos_is_the_union_of_all_files(folder, config_eos, generation_eos, tokenizer_eos, expected):
    change(folder / "generation_config.json", eos_token_id=generation_eos)
    change(folder / "tokenizer_config.json", eos_token=tokenizer_eos)
    config = SimpleNamespace(vocab_size=4096, bos_token_id=1, eos_token_ids=config_eos)
    assert Tokenizer.from_folder(folder, config).eos_token_ids == expected


def test_the_built_in_model_stops_at_both_its_ends(demo):
    assert demo.eos_token_ids == {IM_END, END_OF_DOCUMENT}


def test_a_folder_without_generation_config_is_fine(folder):
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_folder(folder, CONFIG).eos_token_ids == {IM_END, END_OF_DOCUMENT}


@pytest.mark.parametrize("name", ["TokenizersBackend", "NoSuchTokenizer", None])
def test_the_class_in_tokenizer_config_does_not_matter(folder, demo, name):
    change(folder / "tokenizer_config.json", tokenizer_class=name)
    assert Tokenizer.from_folder(folder, CONFIG).encode("Hello") == demo.encode("Hello")


def test_bos_may_be_an_object_or_come_from_config(folder):
    change(folder / "tokenizer_config.json", bos_token={"content": "<|fim_pre|>"})
    assert Tokenizer.from_folder(folder, CONFIG).encode("") == [3]
    change(folder / "tokenizer_config.json", bos_token=None)
    tokenizer = Tokenizer.from_folder(folder, CONFIG)
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.render_chat(USER).startswith("<|startoftext|>")


def test_limits_saved_with_the_vocabulary_do_not_cut_or_pad(folder, demo):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    change(folder / "tokenizer.json", truncation=truncation, padding=padding)
    text = "one two three four five six seven"
    assert Tokenizer.from_folder(folder, CONFIG).encode(text) == demo.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(TokenizerError, match=f"/{name} is missing"):
        Tokenizer.from_folder(folder, CONFIG)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"model": {'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"bos_token": '),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("generation_config.json", b""),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"/{name} is damaged"):
        Tokenizer.from_folder(folder, CONFIG)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("tokenizer.json", {"decoder": None}, "not a byte-level vocabulary"),
        ("tokenizer_config.json", {"bos_token": "<s>"}, "'<s>', which tokenizer.json lacks"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "'</s>', which tokenizer.json lacks"),
        ("generation_config.json", {"eos_token_id": ["7"]}, "eos_token_id must be integers"),
    ],
)
def test_files_that_contradict_each_other_are_refused(folder, name, values, words):
    change(folder / name, **values)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_folder(folder, CONFIG)


def test_a_vocabulary_larger_than_the_models_is_refused():
    smaller = SimpleNamespace(vocab_size=4095, bos_token_id=1, eos_token_ids=(7,))
    with pytest.raises(TokenizerError, match="4096 tokens but config.json a vocab_size of 4095"):
        Tokenizer.from_folder(DEMO, smaller)


def test_where_the_chat_template_is_found(folder):
    settings = folder / "tokenizer_config.json"
    change(settings, chat_template="from config")
    assert Tokenizer.from_folder(folder, CONFIG).render_chat(USER).endswith("assistant\n")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder, CONFIG).render_chat(USER) == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    change(settings, chat_template=named)
    tokenizer = Tokenizer.from_folder(folder, CONFIG)
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "tools"
    change(settings, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(TokenizerError, match="no chat template named 'default', only rag"):
        Tokenizer.from_folder(folder, CONFIG).render_chat(USER)
    change(settings, chat_template=[{"name": "default"}])
    with pytest.raises(TokenizerError, match="chat_template must be a string or a list"):
        Tokenizer.from_folder(folder, CONFIG)


def test_a_missing_chat_template_matters_only_to_a_chat(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_folder(folder, CONFIG)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.encode_chat(USER)


def test_what_a_template_is_given(folder):
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ tools }}|{{ add_generation_prompt }}|"
        "{{ mood }}|{{ strftime_now('%d %b %Y') }}"
    )
    tokenizer = Tokenizer.from_folder(folder, CONFIG, now=lambda: datetime(2026, 3, 9))
    assert tokenizer.render_chat(USER, [{"name": "f"}], False, mood="calm") == (
        "<|startoftext|><|im_end|><|pad|>|[{'name': 'f'}]|False|calm|09 Mar 2026"
    )


def test_an_empty_chat_and_unfit_tools_are_refused(demo):
    with pytest.raises(RequestError, match="list of messages is empty"):
        demo.encode_chat([])
    with pytest.raises(RequestError, match="tools must be a list of dicts, got dict"):
        demo.encode_chat(USER, tools={"name": "f"})
