"""Requests that are right but for one place: whatever stands there, the answer is no 5xx."""

from __future__ import annotations

import copy
import json
import random

import httpx
import live_server
import pytest
from fake_core import FakeCore
from tool_answers import END, TOOL

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": None, "reasoning": "Hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]
#: Each endpoint with a request that has most of its fields.
WHOLE = {
    "/v1/chat/completions": {
        "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
        "max_tokens": 2, "stream": False, "logprobs": True, "top_logprobs": 1, "n": 2, "stop": ["x"],
        "response_format": {"type": "text"}, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {
        "prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1, "stop": "x", "seed": 1,
        "logit_bias": {"5": 1}, "stream_options": None, "temperature": 0.5, "top_p": 0.5,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "tool_use",
             "id": "t", "name": "weather", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sun"}]},
        ],
        "max_tokens": 2, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "stream": False,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": "sun"},
        ],
        "max_output_tokens": 2, "instructions": "Be brief.",
        "tools": [{"type": "function", **TOOL["function"]}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "metadata": {"a": "b"}, "truncation": "auto", "store": True, "stream": False,
    },
    "/tokenize": {"messages": MESSAGES, "tools": [TOOL], "return_token_strs": True},
}  # fmt: skip
STRANGE = [
    None, True, False, 0, -1, 1 << 31, 1 << 70, 1.5, 1e308, "", "x", "\x00", "🙂" * 50, "{{ 1/0 }}", [], [[]],
    [None], [0], {}, {"type": None}, {"type": "text", "text": {"a": 1}}, {"$ref": "#/nowhere"}, "required",
    {"type": "function", "function": {"name": "weather"}}, [{"type": "function", "function": None}],
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tools_folder):
    limits = {"eos_token_ids": (END,), "max_seq_len": 1024}
    with live_server.serve(FakeCore(), tokenizer_dir=tools_folder, **limits) as found:
        yield found


def places(value, path=()):
    """Paths of all that is in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def with_strange(rng, body):
    """A copy with one or two places replaced or, half of the time, left out where an object allows it."""
    made = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice(list(places(made)))
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(rng.choice(STRANGE))
    return made


@pytest.mark.parametrize("path", WHOLE)
def test_one_strange_value_never_makes_a_server_error(server, path):
    rng = random.Random(path)
    with httpx.Client(base_url=server[0], timeout=30) as client:
        assert client.post(path, json=WHOLE[path]).status_code == 200
        for _ in range(60):
            body = with_strange(rng, WHOLE[path])
            answer = client.post(path, json=body)
            assert answer.status_code < 500, (answer.text, json.dumps(body))
        assert client.post(path, json=WHOLE[path]).status_code == 200
