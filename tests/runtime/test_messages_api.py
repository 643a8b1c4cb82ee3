"""Anthropic's Messages API over HTTP, called by the official client."""

from __future__ import annotations

import json

import anthropic
import httpx
import live_server
import pytest
from castiron.runtime.tokenizer import Tokenizer
from fake_core import FOR_EVER, FakeCore
from server_calls import USER
from tool_answers import CALL, END, TOOL, prompt_of

TOOLS = [{"name": "weather", "description": "Weather", "input_schema": TOOL["function"]["parameters"]}]
ASK = {"model": "fake", "max_tokens": 300, "messages": USER}


def client_of(server):
    return anthropic.Anthropic(base_url=server[0], api_key="none", max_retries=0, timeout=20)


def test_a_message_has_its_blocks_and_why_it_ended(saying):
    client = client_of(saying("<think>Hm</think>\n\nI look." + CALL))
    message = client.messages.create(**ASK, tools=TOOLS)
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "tool_use")
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm")
    assert (text.type, text.text) == ("text", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 10


def test_a_stream_adds_up_to_the_message(saying):
    server = saying("<think>Hm</think>\n\nI look." + CALL)
    client = client_of(server)
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    body = {**ASK, "tools": TOOLS, "stream": True}
    raw = httpx.post(server[0] + "/v1/messages", json=body, timeout=20).text
    assert "[DONE]" not in raw
    for event in raw.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_why_a_message_ended(saying):
    client = client_of(saying("one two three"))
    assert client.messages.create(**ASK).stop_reason == "end_turn"
    assert client.messages.create(**{**ASK, "max_tokens": 2}).stop_reason == "max_tokens"
    stopped = client.messages.create(**ASK, stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
        "stop_sequence",
        "two",
        "one ",
    )


def test_a_conversation_becomes_messages_of_the_template(saying, tools_folder):
    server = saying("Sunny.")
    client = client_of(server)
    client.messages.create(
        **{
            **ASK,
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": TOOLS,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Well?"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [{"type": "text", "text": "sun"}],
                        },
                    ],
                },
            ],
        }
    )
    prompt = prompt_of(server[2], tools_folder)
    parts = (
        "system\nBe brief.",
        "user\nHello",
        "<think>Hm</think><tool_call>weather Rome</tool_call>",
        "tool\nsun",
        "user\nWell?",
    )
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


def test_words_put_into_the_models_mouth_are_gone_on_with(saying, tools_folder):
    server = saying(" two")
    messages = [*USER, {"role": "assistant", "content": "one"}]
    client_of(server).messages.create(**{**ASK, "messages": messages})
    assert prompt_of(server[2], tools_folder).endswith("<|im_start|>assistant\none")


def test_tokens_are_counted_as_they_will_be_used(saying):
    server = saying("x")
    client = client_of(server)
    counted = client.messages.count_tokens(model="fake", messages=USER, system="Be brief.", tools=TOOLS)
    used = client.messages.create(**ASK, system="Be brief.", tools=TOOLS).usage
    assert counted.input_tokens == used.input_tokens
    assert counted.input_tokens == len(server[2].submitted[-1][0])


BAD = [
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": None}, 400, "max_tokens"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "tool_use_id"),
    ({"temperature": 1.5}, 400, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search"),
    ({"tools": [{"name": "a b"}]}, 400, "a b"),
    ({"tool_choice": {"type": "any"}}, 400, "tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, 400, "other"),
    ({"output_config": {"effort": "x" * 99}}, 400, "reasoning_effort"),
    ({"model": "other"}, 404, "other"),
    ({"stop_sequences": [""]}, 400, "stop_sequences.0"),
    ({"stop_sequences": ["a"] * 65}, 400, "stop_sequences"),
    ({"max_tokens": 100_000}, 400, "maximum context length is 2048 tokens"),
]


@pytest.fixture(scope="module")
def idle(tools_folder):
    with live_server.serve(
        FakeCore(), tokenizer_dir=tools_folder, eos_token_ids=(END,), max_seq_len=2048
    ) as server:
        yield server


@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_errors_have_anthropics_envelope(idle, body, status, words):
    answer = httpx.post(idle[0] + "/v1/messages", json={**ASK, **body}, timeout=20)
    assert answer.status_code == status, answer.text
    data = answer.json()
    assert data["type"] == "error"
    assert data["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert words in data["error"]["message"]


def test_the_client_gets_its_own_exceptions(idle):
    client = client_of(idle)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x " * 5000}]})


def test_an_error_in_a_stream_is_an_event(tools_folder):
    core = FakeCore(
        script=Tokenizer(tools_folder).encode("word", add_special_tokens=False), step_seconds=0.01
    )
    with live_server.serve(core, tokenizer_dir=tools_folder, max_seq_len=2 * FOR_EVER) as server:
        body = {**ASK, "max_tokens": FOR_EVER, "stream": True}
        with httpx.stream("POST", server[0] + "/v1/messages", json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            while "content_block_delta" not in next(lines):
                pass
            core.fail_with = RuntimeError("broken")
            rest = "\n".join(lines)
    last = rest.strip().split("\n\n")[-1].split("\n")
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "overloaded_error"
