"""Who is let in: API keys and their limits, pages of other origins, prefixes of paths, ids, the log."""

from __future__ import annotations

import json
import logging
import threading

import httpx
import live_server
import pytest
from castiron.runtime.server.api_keys import ApiKey, ApiKeys, read_key_file
from castiron.runtime.server.app import make_app
from castiron.runtime.server.front import PUBLIC_PATHS, CrossOrigin, FrontConfig
from castiron.runtime.server.logs import configure_logging
from fake_core import FakeCore
from server_calls import post, wait_until

from castiron.errors import EngineError

KEY = "sk-test-0123456789"
BEARER = {"Authorization": f"Bearer {KEY}"}


def keyed(*limits, **front):
    return FrontConfig(ApiKeys([ApiKey("team", KEY, *limits)]), **front)


def complete(server, headers, **body):
    body = {"prompt": [5, 6], "max_tokens": 2, **body}
    return httpx.post(server[0] + "/v1/completions", json=body, headers=headers, timeout=20)


@pytest.fixture(scope="module")
def locked(folder):
    with live_server.serve(tokenizer_dir=folder, front=keyed()) as server:
        yield server


def test_with_a_key_set_every_route_but_health_needs_one(locked):
    routes = {route.split()[1] for route in make_app(locked[1]).routes} - {"/page/{name}"}
    assert {"/metrics", "/trace", "/v1/models", "/openapi.json"} <= routes
    with httpx.Client() as client:
        for path in sorted(
            routes
            | {
                "/nothing",
                "/page",
                "/page/x",
                "/page/app.js/x",
                "/health/x",
                "/healthy",
                "/v1",
                "//v1//models",
            }
        ):
            for method in ("GET", "POST", "OPTIONS"):
                status = client.request(method, locked[0] + path).status_code
                assert (status != 401) == (path in PUBLIC_PATHS), (method, path, status)


@pytest.mark.parametrize("headers", [BEARER, {"x-api-key": KEY}, {"authorization": f"bearer  {KEY}"}])
def test_a_key_opens_the_server_as_bearer_token_or_as_x_api_key(locked, headers):
    assert complete(locked, headers).status_code == 200
    assert httpx.get(locked[0] + "/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Bearer {KEY.upper()}"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_the_right_key_the_answer_is_401_in_openais_envelope(locked, headers):
    answer = complete(locked, headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", "invalid_api_key", None)
    assert KEY[:8] not in answer.text


def test_anthropics_clients_get_401_in_their_own_envelope(locked):
    answer = httpx.post(locked[0] + "/v1/messages", json={}, headers={"x-api-key": "no"})
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_a_key_has_no_more_requests_at_once_than_it_may(folder):
    core = FakeCore()
    with live_server.serve(core, tokenizer_dir=folder, front=keyed(1)) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(complete(server, BEARER, max_tokens=60)))
        with core.held():
            thread.start()
            wait_until(lambda: server[1].engine.session.unfinished == 1)
            refused = complete(server, BEARER)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "RateLimitError")
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(server[0] + "/v1/models", headers=BEARER).status_code == 200
        thread.join()
        assert answers[0].status_code == 200
        assert complete(server, BEARER).status_code == 200


def test_a_keys_tokens_in_flight_are_prompts_and_max_tokens_of_all_outputs(folder):
    core = FakeCore(step_seconds=0.01)
    with live_server.serve(core, tokenizer_dir=folder, front=keyed(None, 100)) as server:
        never = complete(server, BEARER, max_tokens=49, n=2)  # 2 * (2 + 49) tokens
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
        answers = []

        def answer(max_tokens):
            answers.append(complete(server, BEARER, max_tokens=max_tokens).status_code)

        first, beside = (threading.Thread(target=answer, args=(n,)) for n in (60, 36))
        with core.held():
            first.start()
            wait_until(lambda: server[1].engine.session.unfinished == 1)
            refused = complete(server, BEARER, max_tokens=37)  # 62 + 39 tokens
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
            beside.start()
            wait_until(lambda: server[1].engine.session.unfinished == 2)
        for thread in (first, beside):
            thread.join()
        assert answers == [200, 200]
        assert complete(server, BEARER, max_tokens=98).status_code == 200
        # a client that goes gives its tokens back
        with httpx.stream(
            "POST",
            server[0] + "/v1/completions",
            json={"prompt": [5], "max_tokens": 99, "stream": True},
            headers=BEARER,
        ) as stream:
            next(stream.iter_raw())
        wait_until(lambda: complete(server, BEARER, max_tokens=98).status_code == 200)


def test_a_key_file_gives_names_and_limits(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n- {name: a, key: sk-aaaaaaaa, max_tokens_in_flight: 5}\n")
    assert read_key_file(path) == [ApiKey("a", "sk-aaaaaaaa", None, 5)]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "b", "key": "sk-bbbbbbbb", "max_concurrent_requests": 2}]}))
    assert read_key_file(path) == [ApiKey("b", "sk-bbbbbbbb", 2, None)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no keys"),
        ("[1]", "expected names with values"),
        ("keys: [", "cannot be read"),
        ("kees: []", "did you mean keys"),
        ("keys: [a]", "entry 1"),
        ("keys: [{name: a, key: sk-aaaaaaaa, max_token: 1}]", "did you mean max_tokens_in_flight"),
        ("keys: [{name: a}]", "no key"),
        ("keys: [{name: a, key: sk-aaaaaaaa, max_concurrent_requests: 0}]", "at least 1"),
        ("keys: [{name: a, key: sk-aaaaaaaa, max_concurrent_requests: yes}]", "True"),
    ],
)
def test_a_wrong_key_file_is_refused_with_the_reason(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(EngineError, match=says):
        read_key_file(path)


@pytest.mark.parametrize(
    "keys",
    [
        [ApiKey("a", "short")],
        [ApiKey("a", "with\nnewline")],
        [ApiKey("a", KEY), ApiKey("b", KEY)],
        [ApiKey("a", KEY), ApiKey("a", KEY + "1")],
    ],
)
def test_keys_that_are_weak_or_doubled_are_refused(keys):
    with pytest.raises(EngineError, match="API key"):
        ApiKeys(keys)


def test_pages_of_allowed_origins_may_call_and_read_even_errors(folder):
    front = keyed(cross_origin=CrossOrigin(["https://page.example"]))
    with live_server.serve(tokenizer_dir=folder, front=front) as server:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("https://page.example", True), ("https://other.example", False)):
            preflight = httpx.options(server[0] + "/v1/completions", headers={"Origin": origin, **asks})
            assert (preflight.status_code == 200) == allowed
            for headers in ({}, BEARER):
                answer = complete(server, {"Origin": origin, **headers})
                assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
    with pytest.raises(EngineError, match="--allow-credentials"):
        CrossOrigin(["*"], credentials=True).check()
    with pytest.raises(EngineError, match="needs --allowed-origins"):
        CrossOrigin(credentials=True).check()
    for option, rules in (
        ("--allowed-methods", CrossOrigin(methods=["GET"])),
        ("--allowed-headers", CrossOrigin(headers=["x-mine"])),
    ):
        with pytest.raises(EngineError, match=f"{option} needs --allowed-origins"):
            rules.check()


def test_without_allowed_origins_no_page_may_read_an_answer(server):
    answer = httpx.get(server[0] + "/v1/models", headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("root", ["/llm", "llm/", "/v1"])
def test_a_root_path_works_behind_proxies_that_strip_it_and_that_do_not(folder, root):
    front = FrontConfig(root_path=root)
    with live_server.serve(tokenizer_dir=folder, front=front) as (url, _):
        prefix = "/" + root.strip("/")
        assert httpx.get(f"{url}{prefix}/v1/models").status_code == 200
        assert httpx.get(f"{url}//{prefix}//v1/models").status_code == 200
        assert httpx.get(f"{url}{prefix}/openapi.json").json()["servers"] == [{"url": prefix}]
        if prefix != "/v1":
            assert httpx.get(f"{url}/v1/models").status_code == 200
        assert httpx.get(f"{url}{prefix}/health").status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"), [("trace-1:a/b", True), (None, False), ("a b", False), ("x" * 129, False)]
)
def test_the_request_id_of_the_client_comes_back_and_others_get_one(server, given, kept):
    for path in ("/v1/models", "/nothing"):
        headers = {} if given is None else {"X-Request-Id": given}
        got = httpx.get(server[0] + path, headers=headers).headers["x-request-id"]
        assert got == given if kept else got not in ("", given)


@pytest.fixture
def own_logging():
    """A test may configure the log; afterwards it is what it was."""
    root, castiron = logging.getLogger(), logging.getLogger("castiron")
    before = root.handlers, root.level, castiron.level
    yield
    root.handlers, root.level = before[:2]
    castiron.setLevel(before[2])


@pytest.mark.usefixtures("own_logging")
def test_json_log_lines_hold_ids_and_counts_but_no_prompt(folder, capsys):
    with live_server.serve(tokenizer_dir=folder, front=keyed(access_log=True)) as server:
        configure_logging("info", "json")
        headers = {**BEARER, "X-Request-Id": "mine"}
        complete(server, headers, prompt="hello secret", max_tokens=3)
        complete(server, {"X-Request-Id": "other"})
        httpx.get(server[0] + "/health")
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(x["request_id"], x["status"], x.get("api_key")) for x in lines] == [
        ("mine", 200, "team"),
        ("other", 401, None),
    ]
    assert (lines[0]["completion_tokens"], lines[0]["path"]) == (3, "/v1/completions")
    assert lines[0]["prompt_tokens"] > 2
    assert 0 < lines[0]["ttft_seconds"] <= lines[0]["seconds"]
    assert "secret" not in text
    assert KEY not in text


@pytest.mark.usefixtures("own_logging")
def test_text_log_lines_cannot_be_forged_by_clients(capsys):
    configure_logging("info", "text")
    fields = {"path": "/a\nERROR forged\x1b[2J"}
    logging.getLogger("castiron.access").info("request", extra={"fields": fields})
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_post_without_keys_needs_none(server):
    assert post(server, "/v1/completions", prompt=[5], max_tokens=1).status_code == 200


def test_a_stored_response_is_there_for_the_key_alone_that_it_was_made_with(tools_folder):
    other = {"x-api-key": "sk-other-0123456789"}
    front = FrontConfig(ApiKeys([ApiKey("team", KEY), ApiKey("other", other["x-api-key"])]))
    with live_server.serve(tokenizer_dir=tools_folder, front=front, max_seq_len=2048) as server:
        url = server[0] + "/v1/responses"
        ask = {"input": "secret", "max_output_tokens": 1}
        made = httpx.post(url, json=ask, headers=BEARER, timeout=20).json()["id"]
        goes_on = {**ask, "previous_response_id": made}
        for method, path, body in (
            *(("GET", "", None), ("POST", "/cancel", None), ("DELETE", "", None)),
            ("POST", None, goes_on),
        ):
            where = url if path is None else f"{url}/{made}{path}"
            answer = httpx.request(method, where, json=body, headers=other, timeout=20)
            assert answer.status_code == 404, (method, path, answer.text)
        assert httpx.post(url, json=goes_on, headers=BEARER, timeout=20).status_code == 200
        assert httpx.get(f"{url}/{made}", headers=BEARER).status_code == 200
