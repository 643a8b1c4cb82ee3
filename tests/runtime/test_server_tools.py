"""Tools and reasoning over HTTP: what clients send about them and what they get."""

from __future__ import annotations

import json

import live_server
import make_tokenizer
import pytest
from castiron.runtime.tokenizer import Tokenizer
from server_calls import USER, events, post
from tool_answers import ASK, CALL, END, OTHER, TOOL, prompt_of


def test_a_call_is_in_the_message_and_ends_it(saying):
    server = saying("<think>\nHm\n</think>\n\nI look." + CALL + "\n" + CALL)
    answer = post(server, "/v1/chat/completions", **ASK)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["role"], message["content"]) == ("assistant", "I look.")
    assert message["reasoning"] == message["reasoning_content"] == "Hm"
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert first["function"]["name"] == "weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Rome"}
    one = post(server, "/v1/chat/completions", **ASK, parallel_tool_calls=False, include_reasoning=False)
    message = one.json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert "reasoning" not in message


def test_a_streamed_call_begins_with_its_name_and_goes_on_with_arguments(saying):
    server = saying("<think>Hm</think>Yes." + CALL)
    chunks = events(server, "/v1/chat/completions", **ASK)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    entries = [entry for d in deltas for entry in d.get("tool_calls", [])]
    assert set(entries[0]) == {"index", "id", "type", "function"}
    assert entries[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(entries) > 5
    assert all(set(e) == {"index", "function"} and set(e["function"]) == {"arguments"} for e in entries[1:])
    assert json.loads("".join(e["function"]["arguments"] for e in entries)) == {"city": "Rome"}
    assert all(len(d.get("tool_calls", [])) <= 1 for d in deltas)
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm"
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(saying, stream):
    text = '<tool_call>{"name": "weather", "arguments": {"city": </tool_call> sorry'
    server = saying(text)
    if stream:
        chunks = events(server, "/v1/chat/completions", **ASK)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        return
    (choice,) = post(server, "/v1/chat/completions", **ASK).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_by_the_length_is_none(saying):
    server = saying(CALL)
    (choice,) = post(server, "/v1/chat/completions", **{**ASK, "max_tokens": 20}).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert CALL.startswith(choice["message"]["content"])


def test_calls_and_results_go_through_the_template(saying, tools_folder):
    server = saying("It is sunny.")
    messages = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer = post(server, "/v1/chat/completions", **{**ASK, "messages": messages}, reasoning_effort="high")
    assert answer.json()["choices"][0]["message"]["content"] == "It is sunny."
    prompt = prompt_of(server[2], tools_folder)
    assert json.dumps(TOOL) in prompt
    assert "<|im_start|>system\nBe brief." in prompt
    assert "<think>Hm</think><tool_call>weather Rome</tool_call><|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt
    assert prompt.endswith("assistant\nhigh")


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}", "assistant: ;"),
        (
            "{% for m in messages %}{{ m.role }}{{ ' calls;' if m.content is none else m.content }}"
            "{% endfor %}",
            "assistant calls;",
        ),
        (
            "{% for m in messages %}{{ m.role if m.content is none or 1 }}{{ m.content + ';' }}{% endfor %}",
            "assistant;",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ 'say ' + c.function.arguments }}{% endfor %}{% endfor %}",
            "say {}",
        ),
    ],
)
def test_a_call_suits_templates_of_every_opinion(tmp_path, template, written):
    folder = make_tokenizer.byte_level(tmp_path, chat_template=template)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with live_server.serve(tokenizer_dir=folder) as server:
        ids = post(server, "/tokenize", messages=messages).json()["tokens"]
    assert written in Tokenizer(folder).decode(ids)


def test_stop_strings_are_not_looked_for_in_reasoning(saying):
    server = saying("<think>one two three</think>\n\nyes two no")
    for stream in (False, True):
        body = {"messages": USER, "max_tokens": 100, "stop": ["two"]}
        if stream:
            chunks = [c["choices"][0] for c in events(server, "/v1/chat/completions", **body)]
            content = "".join(c["delta"].get("content", "") for c in chunks)
            thought = "".join(c["delta"].get("reasoning", "") for c in chunks)
            end = chunks[-1]
        else:
            end = post(server, "/v1/chat/completions", **body).json()["choices"][0]
            content, thought = end["message"]["content"], end["message"]["reasoning"]
        assert (content, thought) == ("yes ", "one two three")
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", "two")


def test_without_calls_the_model_is_told_of_no_tools(saying, tools_folder):
    server = saying(CALL)
    (choice,) = post(server, "/v1/chat/completions", **ASK, tool_choice="none").json()["choices"]
    assert choice["message"]["content"] == CALL
    assert "weather" not in prompt_of(server[2], tools_folder)


def allowed(mode, *names):
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def test_an_id_that_the_model_gives_a_call_is_the_calls_id(saying):
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    server = saying(text, config={"tool_call_parser": "kimi_k2"})
    chat = post(server, "/v1/chat/completions", **ASK).json()
    chunks = events(server, "/v1/chat/completions", **ASK)
    functions = [{"type": "function", **TOOL["function"]}]
    response = post(server, "/v1/responses", input="Hello", tools=functions).json()
    tools = [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]
    message = post(server, "/v1/messages", messages=USER, tools=tools, max_tokens=200).json()
    streamed = [e for c in chunks for e in c["choices"][0]["delta"].get("tool_calls", [])]
    assert (
        chat["choices"][0]["message"]["tool_calls"][0]["id"]
        == streamed[0]["id"]
        == response["output"][0]["call_id"]
        == message["content"][0]["id"]
        == "functions.weather:3"
    )


def test_only_allowed_tools_are_called_and_the_model_is_told_of_all(saying, tools_folder):
    server = saying(CALL)
    ask = {**ASK, "tools": [TOOL, OTHER]}
    free = post(server, "/v1/chat/completions", **ask, tool_choice=allowed("auto", "weather", "now"))
    assert free.json()["choices"][0]["finish_reason"] == "tool_calls"
    limited = post(server, "/v1/chat/completions", **ask, tool_choice=allowed("auto", "now"))
    (choice,) = limited.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = prompt_of(server[2], tools_folder)
    assert json.dumps(TOOL) in prompt
    assert json.dumps(OTHER) in prompt


BAD = [
    ({"tools": [TOOL], "tool_choice": allowed("none", "weather")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", "other")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["weather"]}},
        },
        "tool_choice",
    ),
    ({"tool_choice": allowed("auto", "weather")}, "tool_choice"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"function": "weather"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"a": {"type": 5}}}},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 300_000]}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
            ]
        },
        "messages",
    ),
    ({"reasoning_effort": "x" * 100}, "reasoning_effort"),
]


@pytest.fixture(scope="module")
def tools_server(tools_folder):
    with live_server.serve(tokenizer_dir=tools_folder, eos_token_ids=(END,), max_seq_len=2048) as server:
        yield server


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_tools_are_refused_by_name(tools_server, body, param):
    answer = post(tools_server, "/v1/chat/completions", **{"messages": USER, "max_tokens": 1, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
