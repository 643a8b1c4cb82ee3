"""The table of bad input that clients of such servers know, row by row: status, envelope, words."""

from __future__ import annotations

import json

import httpx
import live_server
import pytest
from castiron.runtime.server.api_keys import ApiKey, ApiKeys
from castiron.runtime.server.front import FrontConfig
from fake_core import FOR_EVER, FakeCore
from server_calls import USER, post, wait_until
from tool_answers import TOOL

KEY = "sk-0123456789abcdef0123456789"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
#: The least that each endpoint needs.
LEAST = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": USER}, RESPONSES: {"input": "x"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

#: Row, endpoints, fields, status, type, param; param None where no single field is at fault.
ROWS = [
    ("type", [COMPLETIONS, CHAT, RESPONSES], {"temperature": "hot"}, 400, "BadRequestError", "temperature"),
    ("type", [COMPLETIONS, CHAT], {"max_tokens": 1.5}, 400, "BadRequestError", "max_tokens"),
    ("type", [RESPONSES], {"max_output_tokens": "9"}, 400, "BadRequestError", "max_output_tokens"),
    ("range", [COMPLETIONS, CHAT, RESPONSES], {"top_p": 1.5}, 400, "BadRequestError", "top_p"),
    ("range", [COMPLETIONS, CHAT], {"n": 0}, 400, "BadRequestError", "n"),
    ("unknown model", list(LEAST), {"model": "gpt-4"}, 404, "NotFoundError", "model"),
    ("suffix", [COMPLETIONS], {"suffix": "y"}, 400, "BadRequestError", "suffix"),
    ("not implemented", [CHAT, RESPONSES], {"tools": [TOOL]}, 501, "NotImplementedError", "tools"),
    (
        "stream_options without stream",
        [COMPLETIONS, CHAT],
        {"stream_options": {"include_usage": True}},
        *(400, "BadRequestError", "stream_options"),
    ),
    (
        "prompt_logprobs with stream",
        [COMPLETIONS, CHAT],
        {"prompt_logprobs": 1, "stream": True},
        *(400, "BadRequestError", "prompt_logprobs"),
    ),
    ("top_logprobs without logprobs", [CHAT], {"top_logprobs": 2}, 400, "BadRequestError", "top_logprobs"),
    ("tool_choice without tools", [CHAT], {"tool_choice": "auto"}, 400, "BadRequestError", "tool_choice"),
    ("no tools", [CHAT], {"tools": []}, 400, "BadRequestError", "tools"),
    (
        "both ways to end the prompt",
        [CHAT],
        {"continue_final_message": True, "add_generation_prompt": True},
        *(400, "BadRequestError", None),
    ),
    (
        "two constraints",
        [COMPLETIONS, CHAT],
        {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}},
        *(400, "BadRequestError", "structured_outputs"),
    ),
    (
        "two constraints in one field",
        [COMPLETIONS, CHAT],
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        *(400, "BadRequestError", "structured_outputs"),
    ),
    ("logprobs that are no integer", [COMPLETIONS], {"logprobs": 1.5}, 400, "BadRequestError", "logprobs"),
    ("logprobs that are no boolean", [CHAT], {"logprobs": 3}, 400, "BadRequestError", "logprobs"),
]
CASES = [pytest.param(path, *row[2:], id=f"{row[0]} {path}") for row in ROWS for path in row[1]]


def envelope(answer: httpx.Response, kind: str, code: object = None) -> dict:
    """The error, after a look at its form."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind, error
    assert error["code"] == (answer.status_code if code is None else code)
    assert 5 < len(error["message"]) < 1000
    return error


@pytest.mark.parametrize(("path", "fields", "status", "kind", "param"), CASES)
def test_a_bad_field_has_its_row(server, path, fields, status, kind, param):
    if path == RESPONSES and "tools" in fields:  # whose functions are not wrapped
        fields = {"tools": [{"type": "function", **TOOL["function"]}]}
    answer = post(server, path, **{**LEAST[path], **fields})
    assert answer.status_code == status, answer.text
    error = envelope(answer, kind, "model_not_found" if status == 404 else None)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (
            CHAT,
            {"max_completion_tokens": -1},
            "max_completion_tokens",
            "max_completion_tokens is -1; expected",
        ),
        (CHAT, {"max_tokens": -1}, "max_tokens", "max_tokens is -1; expected"),
        (
            CHAT,
            {"max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
            "min_tokens is 4; expected at most max_completion_tokens (3)",
        ),
        (
            CHAT,
            {"logprobs": True, "top_logprobs": 2, "use_beam_search": True},
            "top_logprobs",
            "top_logprobs is 2; expected 0 with use_beam_search",
        ),
        (CHAT, {"max_completion_tokens": 250}, "max_completion_tokens", "lower max_completion_tokens"),
        (RESPONSES, {"max_output_tokens": 250}, "max_output_tokens", "lower max_output_tokens"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(server, path, fields, param, message):
    fields = {"temperature": 0, **LEAST[path], **fields}
    if path == RESPONSES:
        del fields["temperature"]
    answer = post(server, path, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_what_a_template_cannot_read_is_refused_by_the_place_of_the_message(server):
    for message in ({"role": "user", "content": None}, {"role": "user"}):
        answer = post(server, CHAT, messages=[*USER, message])
        assert answer.status_code == 400
        error = envelope(answer, "BadRequestError")
        assert (error["param"], "messages[1]" in error["message"]) == ("messages", True)


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"a=1&b=2", b'{"model": "\xff"}', b"\x00\x01"])
def test_a_body_that_is_no_json_object_is_400_whatever_its_content_type(server, path, raw):
    for content_type in ("application/json", "application/x-www-form-urlencoded", "application/octet-stream"):
        answer = httpx.post(server[0] + path, content=raw, headers={"content-type": content_type}, timeout=20)
        assert answer.status_code == 400
        envelope(answer, "BadRequestError")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 100}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}),
        (RESPONSES, {"input": "x" * 3000}),
    ],
)
def test_over_the_context_names_the_limit_the_sum_and_the_prompts_part(server, path, fields):
    answer = post(server, path, **fields)
    assert answer.status_code == 400
    error = envelope(answer, "BadRequestError", "context_length_exceeded")
    assert "maximum context length is 256 tokens" in error["message"]
    if path == COMPLETIONS:
        assert "300 were requested" in error["message"]
        assert "200 in the prompt" in error["message"]


@pytest.mark.parametrize("digits", [100, 4000, 5000, 100_000])
@pytest.mark.parametrize(
    ("field", "text"), [("max_tokens", "9"), ("temperature", "9"), ("stop_token_ids", "[1, 9]")]
)
def test_a_number_of_very_many_digits_is_refused_by_the_name_of_its_field(server, field, text, digits):
    raw = f'{{"prompt": [5], "{field}": {text.replace("9", "9" * digits)}}}'
    answer = httpx.post(server[0] + COMPLETIONS, content=raw, timeout=20)
    assert answer.status_code == 400, answer.text
    error = envelope(answer, "BadRequestError")
    assert error["param"] == field
    assert field in error["message"]
    assert "set_int_max_str_digits" not in error["message"]


def test_no_key_or_a_bad_one_is_401(folder):
    with live_server.serve(tokenizer_dir=folder, front=FrontConfig(ApiKeys([ApiKey("team", KEY)]))) as server:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": f"Basic {KEY}"}):
            answer = httpx.post(server[0] + COMPLETIONS, json=LEAST[COMPLETIONS], headers=headers)
            assert answer.status_code == 401
            envelope(answer, "AuthenticationError", "invalid_api_key")


def test_a_full_server_is_429_with_retry_after_and_n_counts_n(folder):
    core = FakeCore(step_seconds=0.02, max_batch_size=1)
    with live_server.serve(core, tokenizer_dir=folder, max_queue_size=2, max_seq_len=2 * FOR_EVER) as server:
        body = {"prompt": [5], "max_tokens": FOR_EVER, "stream": True}
        with httpx.stream("POST", server[0] + COMPLETIONS, json=body, timeout=20) as running:
            lines = running.iter_lines()
            next(lines)
            answer = post(server, COMPLETIONS, prompt=[5], n=3, temperature=1)
            assert answer.status_code == 429
            envelope(answer, "RateLimitError")
            assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: core.stats()["running"] == 0)  # the client has gone: nothing of it is left


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_503_or_an_event_and_the_end_of_the_stream(folder, stream):
    core = FakeCore(step_seconds=0.01)
    with live_server.serve(core, tokenizer_dir=folder) as server:
        core.fail_with = RuntimeError("broken")
        answer = post(server, COMPLETIONS, prompt=[5], max_tokens=50, stream=stream)
        if stream:
            parts = answer.text.split("\n\n")
            assert parts[-2:] == ["data: [DONE]", ""]
            error = json.loads(parts[-3].removeprefix("data: "))["error"]
            assert (answer.status_code, error["code"], error["type"]) == (200, 503, "ServiceUnavailableError")
        else:
            assert answer.status_code == 503
            envelope(answer, "ServiceUnavailableError")
        assert post(server, COMPLETIONS, prompt=[5]).status_code == 503


def test_a_path_that_is_none_is_404_and_a_wrong_method_405(server):
    assert httpx.post(server[0] + "/v1/nothing").status_code == 404
    envelope(httpx.post(server[0] + "/v1/nothing"), "NotFoundError")
    assert httpx.get(server[0] + CHAT).status_code == 405
