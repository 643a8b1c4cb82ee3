"""Grammars of tool calls: whatever is drawn from their masks is read as calls that follow the schemas."""

from __future__ import annotations

import json

import make_tokenizer
import pytest
from castiron.runtime.grammar import Grammars
from castiron.runtime.server.answer_form import answer_form
from castiron.runtime.server.parsers import TOOL_STYLES, AnswerStyle, Message
from castiron.runtime.server.tools import Function, ToolUse
from castiron.runtime.structured_output import StructuredOutput
from castiron.runtime.tokenizer import Tokenizer
from test_structured_output import END, allowed, drawn

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", 'a "b" \\ c']},
        "days": {"$ref": "#/$defs/count"},
        "sure": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 5}},
}
FUNCTIONS = (Function("weather", PARAMETERS), Function("now"))
VARIANTS = [(name, "") for name in TOOL_STYLES]
VARIANTS += [("mistral", "[ARGS]"), ("deepseek_v3", "```json"), ("glm45", "</arg_key>\n")]


@pytest.fixture(scope="module", params=["special", "plain"])
def tokenizer(request, tmp_path_factory):
    """Markers are special tokens, as in most checkpoints that write them, or text like any other."""
    folder = make_tokenizer.byte_level(tmp_path_factory.mktemp(request.param))
    if request.param == "special":
        backend = Tokenizer(folder).backend
        markers = {m for style in TOOL_STYLES.values() for m in style.markers}
        backend.add_special_tokens(sorted(markers | {"[THINK]", "[/THINK]"}))
        backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer.backend.to_str, tokenizer.backend.get_vocab_size(), [END])


def read(style, text, opened=False):
    parser = style.parser({f.name: f.parameters for f in FUNCTIONS}, opened)
    message = Message()
    message.add(parser.push(text) + parser.flush())
    return message


def follows_schema(call):
    arguments = json.loads(call.arguments)
    if call.name == "now":
        return arguments == {}
    return (
        call.name == "weather"
        and arguments.pop("city") in PARAMETERS["properties"]["city"]["enum"]
        and 1 <= arguments.pop("days", 1) <= 5
        and arguments.pop("sure", True) in (True, False)
        and not arguments
    )


@pytest.mark.parametrize(("name", "template"), VARIANTS)
def test_what_is_drawn_is_calls_that_follow_their_schemas(grammars, tokenizer, name, template):
    # Reasoning is free, so that at random it goes on for ever: not here.
    style = AnswerStyle(name, None, template, tokenizer.special_ids_by_text)
    form = answer_form(None, ToolUse([], FUNCTIONS, True, True), style, False)
    texts = [drawn(grammars.matcher(form), tokenizer, seed) for seed in range(4)]
    for text in texts:
        message = read(style, text)
        assert message.calls, text
        assert not message.content
        assert all(follows_schema(call) for call in message.calls.values()), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=write>\n<parameter=text>\na <b>\n\n</parameter>\n"
            "<parameter=at>\nnull\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>write<arg_key>text</arg_key><arg_value>a <b>\n</arg_value>"
            "<arg_key>at</arg_key><arg_value>null</arg_value></tool_call>",
        ),
    ],
)
def test_a_text_between_tags_is_free_up_to_the_closing_one(grammars, tokenizer, name, text):
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"properties": {"at": optional, "text": {"type": "string"}}, "required": ["text"]}
    function = Function("write", schema)
    style = AnswerStyle(name, None, "", tokenizer.special_ids_by_text)
    matcher = grammars.matcher(answer_form(None, ToolUse([], (function,), True, False), style, False))
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(matcher.mask())
        matcher.advance([token])
    assert allowed(matcher.mask()) == [END]
    parser = style.parser({"write": schema}, False)
    message = Message()
    message.add(parser.push(text) + parser.flush())
    assert json.loads(message.calls[0].arguments) == {"text": "a <b>\n", "at": None}


def test_a_named_function_is_the_only_one_called_and_once(grammars, tokenizer):
    style = AnswerStyle("hermes", None, "", tokenizer.special_ids_by_text)
    form = answer_form(None, ToolUse([], FUNCTIONS[:1], True, False), style, False)
    for seed in range(4):
        (call,) = read(style, drawn(grammars.matcher(form), tokenizer, seed)).calls.values()
        assert call.name == "weather"


def test_reasoning_may_come_before_what_is_required(grammars, tokenizer):
    for reasoning, opened, text in (
        ("think", False, "<think>\nHm\n</think>\n\n"),
        ("think", True, "Hm\n</think>\n\n"),
        ("mistral", False, "[THINK]Hm[/THINK]"),
    ):
        style = AnswerStyle("hermes", reasoning, "", tokenizer.special_ids_by_text)
        forms = (
            answer_form(None, ToolUse([], FUNCTIONS, True, False), style, opened),
            answer_form(StructuredOutput(json={"const": 1}), None, style, opened),
            answer_form(StructuredOutput(choice=("1",)), None, style, opened),
            answer_form(StructuredOutput(regex="1"), None, style, opened),
        )
        answers = ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "1", "1", "1")
        for form, answer in zip(forms, answers, strict=True):
            matcher = grammars.matcher(form)
            for token in tokenizer.encode(text + answer, add_special_tokens=False):
                assert token in allowed(matcher.mask())
                matcher.advance([token])
            assert END in allowed(matcher.mask())
            assert read(style, text + answer, opened).reasoning == "Hm"


def test_where_calls_are_free_an_answer_of_the_wanted_form_may_take_their_place(grammars, tokenizer):
    style = AnswerStyle("hermes", None, "", tokenizer.special_ids_by_text)
    wanted = StructuredOutput(json={"enum": ["yes/no"]})
    form = answer_form(wanted, ToolUse([], FUNCTIONS, False, True), style, False)
    texts = [drawn(grammars.matcher(form), tokenizer, seed) for seed in range(8)]
    assert '"yes/no"' in texts
    assert any(read(style, text).calls for text in texts if text)


@pytest.mark.parametrize(
    ("regex", "text"), [("a/b", "a/b"), (r"a\/b\\/c[/]", "a/b\\/c/"), ("a\nb\\\nc", "a\nb\nc")]
)
def test_a_regular_expression_keeps_its_slashes_and_line_breaks(grammars, tokenizer, regex, text):
    form = answer_form(StructuredOutput(regex=regex), None, AnswerStyle(None, "think", "", {}), False)
    matcher = grammars.matcher(form)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(matcher.mask())
        matcher.advance([token])
    assert allowed(matcher.mask()) == [END]
