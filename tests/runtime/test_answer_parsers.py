"""Parsers of calls and reasoning: what they read in each style, however the text is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest
from castiron.runtime.server.parsers import AnswerStyle, Message, find_style

from castiron.errors import EngineError

WEATHER = {"city": "Rome", "days": 3}
TIME = {"zone": 'a "quoted" {brace} \\ back'}
DS = "<｜tool▁calls▁begin｜>"


def style(tools: str | None, reasoning: str | None = None) -> AnswerStyle:
    return AnswerStyle(tools, reasoning, "", {})


def read(
    kind: tuple[str | None, str | None],
    pieces: list[str],
    opened: bool = False,
    functions=("weather", "time"),
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = style(*kind).parser(None if kind[0] is None else functions, opened)
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.flush())
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls.values()]


def call(name: str, arguments: dict, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


W, T = ("weather", WEATHER), ("time", TIME)
HERMES = "<tool_call>\n{}\n</tool_call>"
#: Style, text, and by hand: content, reasoning, calls.
CASES = [
    (("hermes", None), HERMES.format(call(*W)), "", "", [W]),
    (
        ("hermes", None),
        f"I look.\n{HERMES.format(call(*W))}\n{HERMES.format(call(*T))}\nDone.",
        "I look.\nDone.",
        "",
        [W, T],
    ),
    (("hermes", None), '<tool_call>{"name": "f", "arguments": {}}', "", "", [("f", {})]),
    (
        ("hermes", None),
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        "",
        [("f", {"a": 1})],
    ),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", {"a": 1})],
    ),
    (
        ("hermes", None),
        '<tool_call>{"type": "function", "name": "f", "arguments": {}}</tool_call>',
        "",
        "",
        [("f", {})],
    ),
    (("hermes", None), "a <b> <tool_ cal", "a <b> <tool_ cal", "", []),
    (("hermes", None), "tail \n", "tail \n", "", []),
    # Broken in one way or the other: content, all of it.
    (("hermes", None), "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", "", []),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>x',
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>x',
        "",
        [],
    ),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
        "",
        [],
    ),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": {"a"',
        '<tool_call>{"name": "f", "arguments": {"a"',
        "",
        [],
    ),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": [1]}',
        '<tool_call>{"name": "f", "arguments": [1]}',
        "",
        [],
    ),
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}',
        "",
        [],
    ),
    # A missing bracket behind whole arguments does no harm.
    (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "",
        "",
        [("f", {"a": 1})],
    ),
    (("llama3_json", None), call(*W, key="parameters"), "", "", [W]),
    (("llama3_json", None), "<|python_tag|>" + call(*W, key="parameters"), "", "", [W]),
    (
        ("llama3_json", None),
        f"\n{call(*W, key='parameters')}; {call(*T, key='parameters')}\n",
        "",
        "",
        [W, T],
    ),
    (("llama3_json", None), '{"type": "function", "name": "time", "parameters": {}}', "", "", [("time", {})]),
    (
        ("llama3_json", None),
        '{"name": "other", "parameters": {}}',
        '{"name": "other", "parameters": {}}',
        "",
        [],
    ),
    (("llama3_json", None), '{"answer": 42}', '{"answer": 42}', "", []),
    (("llama3_json", None), '{"name": "time"} is JSON', '{"name": "time"} is JSON', "", []),
    (("llama3_json", None), "It is 5 {o'clock}.", "It is 5 {o'clock}.", "", []),
    (("pythonic", None), "[weather(city='Rome', days=3)]", "", "", [W]),
    (
        ("pythonic", None),
        '[weather(city="Rome", days=3), time(zone=\'a "quoted" {brace} \\\\ back\')]',
        "",
        "",
        [W, T],
    ),
    (("pythonic", None), "<|python_start|>[time()]<|python_end|>", "", "", [("time", {})]),
    (
        ("pythonic", None),
        "[time(a=[1, -2.5, None], b={'x': True, 'y': null}, c=(')', \"]\"))]",
        "",
        "",
        [("time", {"a": [1, -2.5, None], "b": {"x": True, "y": None}, "c": [")", "]"]})],
    ),
    (("pythonic", None), "[1, 2, 3]", "[1, 2, 3]", "", []),
    (("pythonic", None), "[other(a=1)]", "[other(a=1)]", "", []),
    (("pythonic", None), "[time(a=open('x'))]", "[time(a=open('x'))]", "", []),
    (("pythonic", None), "[time(1)]", "[time(1)]", "", []),
    (("pythonic", None), "[time(a=", "[time(a=", "", []),
    (("mistral", None), f"[TOOL_CALLS][{call(*W)}, {call(*T)}]", "", "", [W, T]),
    (
        ("mistral", None),
        "[TOOL_CALLS] [" + json.dumps({"name": "f", "arguments": {}, "id": "abcdefghi"}) + "]",
        "",
        "",
        [("f", {})],
    ),
    (
        ("mistral", None),
        f"Yes.[TOOL_CALLS]weather[ARGS]{json.dumps(WEATHER)}[TOOL_CALLS]time[CALL_ID]x1[ARGS]{json.dumps(TIME)}",
        "Yes.",
        "",
        [W, T],
    ),
    (("mistral", None), f"[TOOL_CALLS]weather{json.dumps(WEATHER)}", "", "", [W]),
    (("mistral", None), "[TOOL_CALLS]what is this?", "[TOOL_CALLS]what is this?", "", []),
    (("mistral", "mistral"), "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm.", []),
    (
        ("deepseek_v3", None),
        f"Ok.{DS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{json.dumps(WEATHER)}\n```"
        f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{json.dumps(TIME)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok.",
        "",
        [W, T],
    ),
    (
        ("deepseek_v3", None),
        f"{DS}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(WEATHER)}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>time<｜tool▁sep｜>{json.dumps(TIME)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        [W, T],
    ),
    (("deepseek_v3", None), DS + "nothing", DS + "nothing", "", []),
    (
        ("hermes", "think"),
        f"<think>\nHm: <tool_call>?\n</think>\n\n{HERMES.format(call(*W))}",
        "",
        "Hm: <tool_call>?",
        [W],
    ),
    ((None, "think"), "<think>\n\n</think>\n\nHello ", "Hello ", "", []),
    (
        (None, "think"),
        "Hello <think>not at the beginning</think>",
        "Hello <think>not at the beginning</think>",
        "",
        [],
    ),
    ((None, "think"), "\n  Hello", "\n  Hello", "", []),
    ((None, "think"), "<think>unfinished </thi", "", "unfinished </thi", []),
    (("openai", "openai"), "Plain.", "Plain.", "", []),
    (
        ("openai", "openai"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Yes.",
        "Hm.",
        [],
    ),
    (
        ("openai", "openai"),
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        + json.dumps(WEATHER),
        "I look.",
        "Hm.",
        [W],
    ),
    (
        ("openai", "openai"),
        " to=functions.time<|channel|>commentary json<|message|>" + json.dumps(TIME) + "<|call|>",
        "",
        "",
        [T],
    ),
    (("openai", "openai"), "to=functions is what I say", "to=functions is what I say", "", []),
    (
        ("openai", "openai"),
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>"
        + json.dumps(TIME)
        + "<|call|>",
        "",
        "",
        [T],
    ),
]


def shown(arguments: list[tuple[str, str]]) -> list[tuple[str, dict]]:
    return [(name, json.loads(text)) for name, text in arguments]


@pytest.mark.parametrize(("kind", "text", "content", "reasoning", "calls"), CASES)
def test_an_answer_is_read_as_it_was_meant_however_it_is_cut(kind, text, content, reasoning, calls):
    whole = read(kind, [text])
    assert (whole[0], whole[1], shown(whole[2])) == (content, reasoning, calls)
    assert read(kind, list(text)) == whole
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(kind, pieces) == whole


@pytest.mark.parametrize(("kind", "text", "content", "reasoning", "calls"), CASES)
def test_calls_of_functions_that_may_not_be_called_are_content(kind, text, content, reasoning, calls):
    if kind[0] is None:
        return

    def read_limited(pieces):
        parser = style(*kind).parser(["weather"], False, only_known=True)
        message = Message()
        for piece in pieces:
            message.add(parser.push(piece))
        message.add(parser.flush())
        return message

    whole = read_limited([text])
    assert all(call.name == "weather" for call in whole.calls.values())
    assert whole.reasoning == reasoning
    assert read_limited(list(text)) == whole
    assert {name for name, _ in calls} <= {"weather"} or len(whole.content) > len(content)


def test_reasoning_that_the_prompt_has_begun_needs_no_opening():
    assert read((None, "think"), ["Hm.\n", "</think>\n\nYes."], opened=True) == ("Yes.", "Hm.", [])


ATOMS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>", ";"],
    "pythonic": ["[", "weather(", "time(a=", "'", '"', "\\", ")", "]", "<|python_start|>", "<|python_end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "weather"],
    "deepseek_v3": [
        DS,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "\n```json\n",
        "\n```",
        "function",
        "weather",
    ],
    "openai": [
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        " to=functions.time ",
        "analysis",
        "final",
    ],
}
COMMON = [
    *(
        '{"name": "weather", "arguments": ',
        '{"a": 1}',
        "}",
        "{",
        '"',
        "\\",
        "x",
        " ",
        "\n",
        ",",
        ":",
        "1",
        "é🙂",
    ),
    *(
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        call(*W),
        call(*T, key="parameters"),
        "tail",
        "<",
        "[TOOL",
    ),
]


@pytest.mark.parametrize("tools", ATOMS)
def test_nonsense_is_read_the_same_way_in_any_pieces_and_calls_have_json(tools):
    rng = random.Random(tools)
    reasoning = {"openai": "openai", "mistral": "mistral"}.get(tools, "think")
    for round_ in range(250):
        text = "".join(rng.choices(ATOMS[tools] * 2 + COMMON, k=rng.randrange(1, 14)))
        opened = round_ % 3 == 0 and reasoning != "openai"
        kind = (tools, reasoning if round_ % 2 else (None if tools != "openai" else "openai"))
        whole = read(kind, [text], opened)
        assert read(kind, list(text), opened) == whole, text
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[2])


def test_arguments_come_while_they_are_written():
    parser = style("hermes").parser(["f"], False)
    parser.push('<tool_call>\n{"name": "f", "arguments": {"text": "')
    for word in ("one ", "two ", "three"):
        (delta,) = parser.push(word)
        assert delta.text == word


def test_content_is_not_held_longer_than_a_marker_may_begin():
    parser = style("hermes").parser(["f"], False)
    assert [d.text for d in parser.push("a < b <tool")] == ["a < b"]
    assert [d.text for d in parser.push("box>")] == [" <toolbox>"]


TEMPLATES = [
    ("{{ '<tool_call>' }}<think>", "hermes", "think"),
    ("{{ '<tool_call>' }}", "hermes", None),
    ("<tool_call><function=x>", None, None),
    ("{{ '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
    ("<｜tool▁sep｜>{% if '</think>' in content %}", "deepseek_v3", "think"),
    ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai"),
    (
        'Respond with {"name": function name, "parameters": dictionary of argument name and its value}',
        "llama3_json",
        None,
    ),
    ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("{{ message['content'] }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_the_style_is_what_the_template_speaks(template, tools, reasoning):
    found = find_style(template, {}, "auto", "auto")
    assert (found.tools, found.reasoning) == (tools, reasoning)
    assert find_style(template, {}, "none", "none").parser(["f"], False) is None


def test_unknown_styles_and_half_of_harmony_are_refused():
    with pytest.raises(EngineError, match="tool_call_parser is 'xml'; expected auto, none, openai"):
        find_style("", {}, "xml", "auto")
    with pytest.raises(EngineError, match="for both"):
        find_style("", {}, "hermes", "openai")
