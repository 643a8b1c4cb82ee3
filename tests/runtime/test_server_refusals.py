"""What the HTTP server refuses, with which status, and what it says."""

from __future__ import annotations

import json

import httpx
import live_server
import pytest
from server_calls import USER, post

BAD = [
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "top_p": 2}, 400, "top_p"),
    ({"prompt": "x", "logprobs": True}, 400, "logprobs"),
    ({"prompt": "x", "logprobs": "1"}, 400, "logprobs"),
    ({"prompt": "x", "logprobs": 1000}, 400, "logprobs"),
    ({"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": "x", "n": 1000000}, 400, "n"),
    ({"prompt": "x", "stop": [""]}, 400, "stop"),
    ({"prompt": "x", "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ({"prompt": "x", "best_of": 3, "temperature": 0}, 400, "best_of"),
    ({"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of"),
    ({"prompt": "x", "best_of": 2, "stream": True}, 400, "best_of"),
    ({"prompt": "x", "best_of": 129}, 400, "best_of"),
    ({"prompt": "x", "n": 2, "use_beam_search": True, "stream": True}, 400, "use_beam_search"),
    ({"prompt": "x", "n": 2, "use_beam_search": True, "temperature": 0.5}, 400, "temperature"),
    ({"prompt": "x", "n": 2, "use_beam_search": True, "stop": "y"}, 400, "stop"),
    ({"prompt": "x", "n": 2, "use_beam_search": True, "logprobs": 2}, 400, "logprobs"),
    ({"prompt": "x", "n": 2, "use_beam_search": True, "early_stopping": "soon"}, 400, "early_stopping"),
    ({"prompt": "x", "length_penalty": 0.5}, 400, "length_penalty"),
    ({"prompt": "x", "typical_p": 0}, 400, "typical_p"),
    ({"prompt": "x", "top_p_decay": 1.5}, 400, "top_p_decay"),
    ({"prompt": "x", "top_p_min": 0}, 400, "top_p_min"),
    ({"prompt": "x", "top_p_reset_ids": [1 << 30]}, 400, "top_p_reset_ids"),
    ({"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"prompt": "x", "num_speculative_tokens": 65}, 400, "num_speculative_tokens"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"prompt": "x", "truncate_prompt_tokens": 5, "echo": True}, 400, "truncate_prompt_tokens"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "x", "seed": 1 << 70}, 400, "seed"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [10**6]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [-1], "echo": True}, 400, "prompt"),
    ({"prompt": [[5], [1 << 70]], "echo": True, "max_tokens": 0, "logprobs": 1}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": "x", "model": "other"}, 404, "model"),
    ({"prompt": "x", "logit_bias": {"five": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": "much"}}, 400, "logit_bias"),
    ({"prompt": "x", "allowed_token_ids": [1 << 30]}, 400, "allowed_token_ids"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_completions_get_their_status_and_name_the_field(server, body, status, param):
    answer = post(server, "/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(error["message"]) < 1000


BAD_CHAT = [
    ({"messages": []}, 400),
    ({"messages": "Hello"}, 400),
    ({"messages": [{"content": "no role"}]}, 400),
    ({"messages": [{"role": "user", "content": 5}]}, 400),
    ({"messages": USER, "top_logprobs": 2}, 400),
    ({"messages": USER, "tools": []}, 400),
    ({"messages": USER, "tool_choice": "auto"}, 400),
    ({"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, 400),
    ({"messages": USER, "max_completion_tokens": 0}, 400),
    ({"messages": USER, "response_format": {"type": "xml"}}, 400),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, 400),
    ({"messages": USER, "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400),
    ({"messages": USER, "structured_outputs": {"regex": "a(b"}}, 400),
    ({"messages": USER, "structured_outputs": {"json": {"type": 5}}}, 400),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, 501),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, 400),
    ({"messages": USER, "chat_template_kwargs": {"add_generation_prompt": False}}, 400),
]


@pytest.mark.parametrize(("body", "status"), BAD_CHAT)
def test_bad_chats_get_their_status(server, body, status):
    answer = post(server, "/v1/chat/completions", **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "prompt: Input should be a valid string or a valid array, found 5"),
        ([1, "a"], "prompt.1: Input should be a valid integer, found 'a'"),
        ([[1], [2, None]], "prompt.1.1: Input should be a valid integer, found None"),
    ],
)
def test_of_several_types_that_a_field_may_have_the_nearest_is_told(server, prompt, says):
    assert post(server, "/v1/completions", prompt=prompt).json()["error"]["message"] == says


def test_a_text_part_without_a_text_is_not_called_a_part_of_another_type(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": 5}]}]
    message = post(server, "/v1/chat/completions", messages=messages).json()["error"]["message"]
    assert "type 'text' that has no text 'text'" in message


@pytest.mark.parametrize("count", [-1, 101])
def test_alternatives_of_a_chat_out_of_range_are_refused_by_their_own_name(server, count):
    answer = post(server, "/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=count)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_template_variables_may_have_any_other_name(server):
    names = {"self": 1, "variables": 2, "": 3, "options": 4, "args": 5}
    answer = post(
        server, "/v1/chat/completions", messages=USER, max_completion_tokens=1, chat_template_kwargs=names
    )
    assert answer.status_code == 200, answer.text


def test_over_context_says_the_sentence_that_clients_look_for(server):
    answer = post(server, "/v1/completions", prompt=[5] * 200, max_tokens=100)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "maximum context length is 256 tokens" in error["message"]
    assert "300" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "raw",
    [b"{", b"", b"null", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": NaN}',
     b'{"prompt": "x", "temperature": NaN}',
     b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_json_are_400(server, raw):
    answer = httpx.post(server[0] + "/v1/completions", content=raw, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_any_content_type_is_read_as_json(server):
    body = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
    answer = httpx.post(server[0] + "/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 200


def test_a_body_over_the_limit_is_413(folder):
    with live_server.serve(tokenizer_dir=folder, config={"max_body_bytes": 2000}) as server:
        assert post(server, "/v1/completions", prompt="x" * 3000).status_code == 413
        assert post(server, "/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_double_slashes_and_unknown_paths(server):
    assert httpx.get(server[0] + "//v1//models").status_code == 200
    missing = httpx.get(server[0] + "/v2/models")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "NotFoundError"
    assert httpx.get(server[0] + "/v1/completions").status_code == 405
