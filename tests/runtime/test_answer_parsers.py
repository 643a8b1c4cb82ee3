"""Parsers of calls and reasoning: what they read in each style, however the text is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest
from answer_cases import CASES, DS, FUNCTIONS, KIMI, KIMI_W, T, W, call
from castiron.runtime.server.parsers import AnswerStyle, CallStart, Message, find_style

from castiron.errors import EngineError


def style(tools: str | None, reasoning: str | None = None) -> AnswerStyle:
    return AnswerStyle(tools, reasoning, "", {})


def read(
    kind: tuple[str | None, str | None],
    pieces: list[str],
    opened: bool = False,
    functions=FUNCTIONS,
) -> tuple[str, str, list[tuple[str, str]]]:
    parser = style(*kind).parser(None if kind[0] is None else functions, opened)
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.flush())
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls.values()]


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
        parser = style(*kind).parser({"weather": FUNCTIONS["weather"]}, False, only_known=True)
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
ATOMS |= {
    "qwen3_coder": [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=weather>",
            "<function=write>",
            "<function=f",
            "</function>",
        ),
        *("<parameter=city>", "<parameter=days>", "<parameter=text>", "<parameter=free>", "</parameter>"),
        *(
            "<tool_call>\n<function=write>\n<parameter=text>\n",
            "\n</parameter>\n",
            "\n</function>\n</tool_call>",
        ),
    ],
    "glm45": [
        *("<tool_call>", "</tool_call>", "weather", "write\n", "<arg_key>", "</arg_key>", "<arg_value>"),
        *("</arg_value>", "<arg_key>text</arg_key>\n<arg_value>", "<arg_key>days</arg_key><arg_value>"),
        *("<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.weather:0", "functions.f:12"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "time"),
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


@pytest.mark.parametrize(
    ("tools", "before"),
    [
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n"),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>"),
    ],
)
def test_a_text_between_tags_comes_while_it_is_written(tools, before):
    parser = style(tools).parser(FUNCTIONS, False)
    parser.push(before)
    for word, expected in (("one ", "one "), ('"two"\t', '\\"two\\"\\t'), ("three", "three")):
        (delta,) = parser.push(word)
        assert delta.text == expected


def test_a_call_keeps_the_models_own_id_where_it_is_one_of_a_kind():
    parser = style("kimi_k2").parser(FUNCTIONS, False)
    deltas = parser.push(KIMI.format(KIMI_W + KIMI_W + KIMI_W.replace(":0", ":1")))
    ids = [delta.id for delta in deltas if isinstance(delta, CallStart)]
    assert ids == ["functions.weather:0", None, "functions.weather:1"]


def test_arguments_come_while_they_are_written():
    parser = style("hermes").parser({"f": None}, False)
    parser.push('<tool_call>\n{"name": "f", "arguments": {"text": "')
    for word in ("one ", "two ", "three"):
        (delta,) = parser.push(word)
        assert delta.text == word


def test_content_is_not_held_longer_than_a_marker_may_begin():
    parser = style("hermes").parser({"f": None}, False)
    assert [d.text for d in parser.push("a < b <tool")] == ["a < b"]
    assert [d.text for d in parser.push("box>")] == [" <toolbox>"]


TEMPLATES = [
    ("{{ '<tool_call>' }}<think>", "hermes", "think"),
    ("{{ '<tool_call>' }}", "hermes", None),
    ("<tool_call><function=x>", None, None),
    ("<tool_call>\n<function=x>\n<parameter=a>", "qwen3_coder", None),
    ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key><think>", "glm45", "think"),
    ("<tool_call><invoke name=x>", None, None),
    ("<seed:tool_call>\n<function=x>\n<parameter=a>", None, None),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
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
    assert find_style(template, {}, "none", "none").parser({"f": None}, False) is None


def test_unknown_styles_and_half_of_harmony_are_refused():
    with pytest.raises(EngineError, match="tool_call_parser is 'xml'; expected auto, none, openai"):
        find_style("", {}, "xml", "auto")
    with pytest.raises(EngineError, match="for both"):
        find_style("", {}, "hermes", "openai")
