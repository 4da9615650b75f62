from datetime import datetime
from pathlib import Path

import pytest

from lfm2.errors import RequestError, TokenizerError
from lfm2.template import ChatTemplate, checked_messages

WEATHER = {"name": "weather", "parameters": {"city": "Zürich & <co>", "b": 1, "a": 2}}
WEATHER_JSON = '{"name": "weather", "parameters": {"city": "Zürich & <co>", "b": 1, "a": 2}}'

# In the manner of LFM2: the tool list stands in the system message, between tokens of its own.
LFM2_STYLE = """{{- bos_token -}}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system = ns.system + ("\n" if ns.system else "") -%}
    {%- set ns.system = ns.system + "List of tools: <|tool_list_start|>[" -%}
    {%- for tool in tools -%}
        {%- set ns.system = ns.system + (tool | tojson) + ("" if loop.last else ", ") -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system -%}
    {{- "<|im_start|>system\n" + ns.system + "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\n" -}}
    {%- set content = message["content"] -%}
    {%- if content is not string -%}
        {%- set content = content | tojson -%}
    {%- endif -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- endif -%}
    {{- content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""

# In the manner of LFM2.5: bare tool list, the date, calls in Python's spelling, generation blocks.
LFM25_STYLE = """{{- bos_token -}}
{%- if tools -%}
    {{- "<|im_start|>system\nToday's date: " + strftime_now("%Y-%m-%d") + "\nList of tools: [" -}}
    {%- for tool in tools -%}
        {{- tool | tojson -}}{{- "" if loop.last else ", " -}}
    {%- endfor -%}
    {{- "]<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\n" -}}
    {%- if message.role == "assistant" -%}
        {% generation %}
        {%- set content = message.content -%}
        {%- if "</think>" in content and not preserve_thinking -%}
            {%- set content = content.split("</think>")[-1].lstrip() -%}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls -%}
            {{- "<|tool_call_start|>[" + call.function.name + "(" -}}
            {%- for name, value in call.function.arguments.items() -%}
                {{- name + "=" + (value | tojson) -}}{{- "" if loop.last else ", " -}}
            {%- endfor -%}
            {{- ")]<|tool_call_end|>" -}}
        {%- endfor -%}
        {{- "<|im_end|>\n" -}}
        {% endgeneration %}
    {%- else -%}
        {{- message.content + "<|im_end|>\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n<think>" -}}
{%- endif -%}
"""

CALL = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}}}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "user", "content": "Thanks"},
]


def render(source: str, messages: list[dict] = (), **variables: object) -> str:
    template = ChatTemplate(source, Path("model/x.jinja"), now=lambda: datetime(2026, 3, 9, 23, 5))
    checked = checked_messages(messages) if messages else []
    return template.render({"bos_token": "<s>", "messages": checked, "tools": None} | variables)


def test_lfm2_style_tools_and_tool_results():
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TOOL_CHAT]
    assert render(LFM2_STYLE, messages, tools=[WEATHER, {"name": "b"}]) == (
        "<s><|im_start|>system\nBe brief.\nList of tools: <|tool_list_start|>["
        + WEATHER_JSON
        + ', {"name": "b"}]<|tool_list_end|><|im_end|>\n'
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n<|tool_response_start|>sunny<|tool_response_end|><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
    )


def test_lfm25_style_generation_blocks_calls_and_date():
    thought = {"role": "assistant", "content": "<think>hm</think>\nYes"}
    text = render(LFM25_STYLE, [*TOOL_CHAT, thought], tools=[WEATHER], add_generation_prompt=True)
    assert text == (
        "<s><|im_start|>system\nToday's date: 2026-03-09\nList of tools: ["
        + WEATHER_JSON
        + "]<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<|tool_call_start|>[weather(city="Bern", days=2)]'
        "<|tool_call_end|><|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    assert "<think>hm</think>\nYes" in render(LFM25_STYLE, [thought], preserve_thinking=True)


def test_block_tags_leave_no_newline_or_indent():
    source = "A\n  {% if true %}\n  B\n  {% endif %}\n{% generation %}\nC\n{% endgeneration %}\nD\n"
    assert render(source) == "A\n  B\nC\nD"


def test_a_variable_set_in_a_generation_block_stays_there():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "21"


def test_loops_may_break_and_continue():
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "023"


def test_tojson_indents_on_request():
    assert render("{{ {'b': '<é>', 'a': [1]} | tojson(indent=1) }}") == (
        '{\n "b": "<é>",\n "a": [\n  1\n ]\n}'
    )


def test_raise_exception_gives_the_templates_own_words():
    words = r"^the chat template in model/x\.jinja refuses these messages: no go$"
    with pytest.raises(TokenizerError, match=words):
        render("{{ raise_exception('no\ngo') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.here }}",
        "{{ 1 + 'a' }}",
        "{{ {}['a']['b'] }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'other' %}",
        "text\n{% if %}",
        "{% generation %}never closed",
    ],
)
def test_a_failing_template_is_one_line_naming_its_file(source):
    with pytest.raises(TokenizerError, match=r"^the chat template in model/x\.jinja .+$") as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_a_template_that_cannot_be_read_names_the_line():
    with pytest.raises(TokenizerError, match="is damaged at line 2: "):
        render("text\n{% if %}")


def test_text_parts_are_joined_and_the_callers_messages_left_alone():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "Ann"}]
    assert checked_messages(messages) == [{"role": "user", "content": "ab", "name": "Ann"}]
    assert messages == [{"role": "user", "content": parts, "name": "Ann"}]


def test_an_assistant_message_may_lack_content():
    call = {"role": "assistant", "tool_calls": [CALL]}
    assert checked_messages([call]) == [call | {"content": ""}]
    assert checked_messages([{"role": "assistant", "content": None}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("Hello", "must be a list of dicts, got str"),
        (["Hello"], "message 1 must be a dict"),
        ([{"content": "a"}], "message 1 needs a role"),
        ([{"role": 3, "content": "a"}], "got 3"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"2 \(user\) has no content"),
        ([{"role": "assistant"}], "has no content"),
        ([{"role": "user", "content": None}], "got NoneType"),
        ([{"role": "user", "content": {"text": "a"}}], "got dict"),
        ([{"role": "user", "content": ["a"]}], "part that is str"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without a string"),
    ],
)
def test_messages_that_cannot_be_served_are_named(messages, words):
    with pytest.raises(RequestError, match=words):
        checked_messages(messages)
