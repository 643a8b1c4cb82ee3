"""OpenAI's Responses API over HTTP, called by the official client."""

from __future__ import annotations

import json

import httpx
import live_server
import openai
import pytest
from fake_core import FakeCore
from server_calls import wait_until
from tool_answers import CALL, END, TOOL, prompt_of

TOOLS = [{"type": "function", **TOOL["function"], "strict": False}]


def client_of(server):
    return openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0, timeout=20)


def test_a_response_has_items_for_reasoning_text_and_calls(saying):
    client = client_of(saying("<think>Hm</think>\n\nI look." + CALL))
    answer = client.responses.create(model="fake", input="Hello", tools=TOOLS, metadata={"a": "b"})
    reasoning, message, call = answer.output
    assert (answer.status, answer.object, answer.metadata) == ("completed", "response", {"a": "b"})
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm")
    assert (message.type, answer.output_text) == ("message", "I look.")
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Rome"},
    )
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_the_events_of_a_stream_build_the_response(saying):
    client = client_of(saying("<think>Hm</think>\n\nI look." + CALL))
    events = list(client.responses.create(model="fake", input="Hello", tools=TOOLS, stream=True))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]

    def joined(kind):
        return "".join(e.delta for e in events if e.type == kind)

    assert joined("response.output_text.delta") == final.output_text == "I look."
    assert joined("response.reasoning_text.delta") == "Hm"
    assert joined("response.function_call_arguments.delta") == final.output[2].arguments
    assert json.loads(final.output[2].arguments) == {"city": "Rome"}
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    done = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert added == done == [item.id for item in final.output]
    assert client.responses.retrieve(final.id).output_text == "I look."


def test_a_conversation_goes_on_from_a_stored_response(saying, tools_folder):
    server = saying("I look." + CALL)
    client = client_of(server)
    first = client.responses.create(model="fake", input="Hello", instructions="Be brief.", tools=TOOLS)
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    second = client.responses.create(model="fake", input=[output], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(server[2], tools_folder)
    for part in ("user\nHello", "assistant\nI look.<tool_call>weather Rome</tool_call>", "tool\nsun"):
        assert part in prompt
    assert "Be brief." not in prompt, "instructions are those of one request"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unstored = client.responses.create(model="fake", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="x", previous_response_id=unstored.id)


def test_allowed_tools_limit_what_is_called(saying):
    client = client_of(saying(CALL))
    tools = [*TOOLS, {"type": "function", "name": "now"}]

    def ask(name):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]}
        return client.responses.create(model="fake", input="Hello", tools=tools, tool_choice=choice)

    assert [item.type for item in ask("weather").output] == ["function_call"]
    other = ask("now")
    assert other.output_text == CALL
    assert other.tool_choice.type == "allowed_tools"


def test_what_is_cut_off_is_incomplete(saying):
    client = client_of(saying("one two three four five six"))
    answer = client.responses.create(model="fake", input="Hello", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="fake", input="Hello", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_response_in_the_background_can_be_waited_for_and_cancelled(tools_folder):
    core = FakeCore(step_seconds=0.01)
    with live_server.serve(core, tokenizer_dir=tools_folder, max_seq_len=2048) as server:
        client = client_of(server)
        short = client.responses.create(model="fake", input="Hello", background=True, max_output_tokens=3)
        assert short.status in ("queued", "in_progress")
        wait_until(lambda: client.responses.retrieve(short.id).status == "incomplete")
        assert client.responses.cancel(short.id).status == "incomplete"
        long = client.responses.create(model="fake", input="Hello", background=True)
        assert client.responses.cancel(long.id).status == "cancelled"
        wait_until(lambda: core.stats()["running"] == 0)
        assert client.responses.retrieve(long.id).status == "cancelled"


BAD = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"content": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        },
        "tool_choice",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "background"),
    ({"reasoning": {"effort": "x" * 99}}, "reasoning_effort"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
]


@pytest.fixture(scope="module")
def idle(tools_folder):
    with live_server.serve(
        FakeCore(), tokenizer_dir=tools_folder, eos_token_ids=(END,), max_seq_len=2048
    ) as server:
        yield server


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_requests_are_refused_by_name(idle, body, param):
    answer = httpx.post(
        idle[0] + "/v1/responses", json={"input": "Hello", "max_output_tokens": 1, **body}, timeout=20
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, "input: Input should be a valid string or a valid array, found 5"),
        ([], "input: List should have at least 1 item"),
        ([{"role": "user", "content": "x"}, 5], "input.1: Input should be an object, found 5"),
        ([{"type": "reasoning"}], "input holds reasoning alone"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "'input_text' that has no text 'text'"),
    ],
)
def test_a_bad_input_is_told_where_it_is_wrong(idle, given, says):
    answer = httpx.post(idle[0] + "/v1/responses", json={"input": given}, timeout=20)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input"), answer.text
    assert says in error["message"]


def test_unknown_responses_are_404(idle):
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert httpx.request(method, f"{idle[0]}/v1/responses/resp_0{path}").status_code == 404
    body = {"input": "x", "previous_response_id": "resp_0"}
    assert httpx.post(idle[0] + "/v1/responses", json=body).json()["error"]["param"] == "previous_response_id"
