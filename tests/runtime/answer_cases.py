"""What models write, by style, and by hand what it means."""

from __future__ import annotations

import json

WEATHER = {"city": "Rome", "days": 3}
TIME = {"zone": 'a "quoted" {brace} \\ back'}
#: Names and schemas of those that requests offer.
FUNCTIONS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": None,
    "write": {
        "properties": {
            "text": {"type": "string"},
            "at": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "tags": {"$ref": "#/$defs/tags"},
            "free": {},
            "id": {"type": ["string", "integer"]},
            "on": {"type": "boolean"},
        },
        "$defs": {"tags": {"type": "array"}},
    },
}
DS = "<｜tool▁calls▁begin｜>"


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


QWEN = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def argument(name: str, text: str) -> str:
    return f"<parameter={name}>\n{text}\n</parameter>\n"


QWEN_W = QWEN.format("weather", argument("city", "Rome") + argument("days", "3"))
GLM_W = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_W = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
KIMI_W += '{"city": "Rome", "days": 3}<|tool_call_end|>'
CASES += [
    (("qwen3_coder", None), f"I look.\n{QWEN_W}\n{QWEN_W}\nDone.", "I look.\nDone.", "", [W, W]),
    (("qwen3_coder", "think"), f"<think>\nHm\n</think>\n\n{QWEN_W}", "", "Hm", [W]),
    (("qwen3_coder", None), QWEN.format("time", ""), "", "", [("time", {})]),
    # The outer tag is left out at times, and what ends it.
    (("qwen3_coder", None), f"Yes. {QWEN_W[12:-13]}", "Yes.", "", [W]),
    # Line breaks of the text itself stay; what looks like another tag is text.
    (
        ("qwen3_coder", None),
        QWEN.format("write", argument("text", '\n<b>\n</function> é🙂\t"\\\n') + argument("at", "1.5")),
        "",
        "",
        [("write", {"text": '\n<b>\n</function> é🙂\t"\\\n', "at": 1.5})],
    ),
    (
        ("qwen3_coder", None),
        QWEN.format(
            "write", "<parameter=text></parameter><parameter=id>\n</parameter>" + argument("on", "True")
        ),
        "",
        "",
        [("write", {"text": "", "id": "", "on": True})],
    ),
    # A text that the schema lets be of another type is that, otherwise it stays one.
    (
        ("qwen3_coder", None),
        QWEN.format(
            "write",
            argument("at", "null")
            + argument("tags", '["a", {"b": 1}]')
            + argument("free", '{"c": NaN}')
            + argument("id", "17")
            + argument("on", "maybe")
            + argument("text", "17"),
        ),
        "",
        "",
        [
            (
                "write",
                {
                    "at": None,
                    "tags": ["a", {"b": 1}],
                    "free": '{"c": NaN}',
                    "id": 17,
                    "on": "maybe",
                    "text": "17",
                },
            )
        ],
    ),
    (
        ("qwen3_coder", None),
        QWEN.format("unknown", argument("a", "1") + argument("b", "x")),
        "",
        "",
        [("unknown", {"a": 1, "b": "x"})],
    ),
    # Broken: no end, an argument twice, no name, something between.
    *[
        (("qwen3_coder", None), text, text, "", [])
        for text in (
            QWEN_W[:-24],
            QWEN_W[:40],
            QWEN.format("weather", argument("city", "a") + argument("city", "b")),
            QWEN.format("a b", argument("city", "a")),
            QWEN.format("weather", argument("city", "a") + "and"),
            "<tool_call>\n{}</tool_call>",
        )
    ],
    (("glm45", None), f"I look.\n{GLM_W}\n{GLM_W}\nDone.", "I look.\nDone.", "", [W, W]),
    (("glm45", "think"), "<think>Hm</think>" + GLM_W.replace("\n", ""), "", "Hm", [W]),
    (("glm45", None), "<tool_call>time\n</tool_call><tool_call>time</tool_call>", "", "", [("time", {})] * 2),
    (
        ("glm45", None),
        "<tool_call>write<arg_key>text</arg_key><arg_value>\n a </tool_call>\n</arg_value>"
        "<arg_key>at</arg_key> <arg_value> 2 </arg_value></tool_call>",
        "",
        "",
        [("write", {"text": "\n a </tool_call>\n", "at": 2})],
    ),
    *[
        (("glm45", None), text, text, "", [])
        for text in (
            GLM_W[:-12],
            GLM_W[:60],
            "<tool_call>two words\n</tool_call>",
            "<tool_call>weather<arg_key>city</arg_key>Rome</tool_call>",
            "<tool_call>time",
        )
    ],
    (("kimi_k2", None), f"I look.{KIMI.format(KIMI_W + KIMI_W)}", "I look.", "", [W, W]),
    (("kimi_k2", "think"), f"<think>Hm</think>{KIMI.format(KIMI_W)}Done.", "Done.", "Hm", [W]),
    (
        ("kimi_k2", None),
        KIMI.format(f"\n{KIMI_W}\n".replace("argument_begin|>", "argument_begin|>\n")),
        "",
        "",
        [W],
    ),
    (("kimi_k2", None), KIMI_W.replace("functions.", "").replace(":0", ""), "", "", [W]),
    *[
        (("kimi_k2", None), text, text, "", [])
        for text in (
            KIMI.format("nothing"),
            KIMI_W[:-30],
            KIMI_W.replace(":0", ": 0"),
            KIMI_W.replace("functions.weather", "functions."),
        )
    ],
]
