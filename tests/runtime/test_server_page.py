"""/stats, and the page at /: its files, or how to make them."""

from __future__ import annotations

from contextlib import contextmanager

import httpx
import live_server
import pytest
from castiron.runtime.server import page
from server_calls import post


@contextmanager
def page_of(monkeypatch, folder, **config):
    monkeypatch.setattr(page, "_FOLDER", folder)
    with live_server.serve(config=config) as (url, _):
        yield url


def test_without_files_the_page_says_how_to_build_it(monkeypatch, tmp_path):
    with page_of(monkeypatch, tmp_path / "none") as url:
        answer = httpx.get(url)
        assert answer.status_code == 404
        assert "make page" in answer.text
        assert httpx.get(f"{url}/page/app.js").status_code == 404


def test_the_files_are_served_and_nothing_else(monkeypatch, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("index.html", "app.js", "app.css", "icon.svg", "secret.txt"):
        (folder / name).write_text(f"this is {name}")
    with page_of(monkeypatch, folder) as url:
        answer = httpx.get(url)
        assert (answer.status_code, answer.text) == (200, "this is index.html")
        assert answer.headers["content-type"].startswith("text/html")
        # No script of somebody else's, and no request elsewhere: the page shows what a model says.
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        script = httpx.get(f"{url}/page/app.js")
        assert script.headers["content-type"].startswith("text/javascript")
        again = httpx.get(f"{url}/page/app.js", headers={"If-None-Match": script.headers["etag"]})
        assert again.status_code == 304 or again.text == script.text
        for path in ("secret.txt", "index.html", "..%2fapp.py", "%2e%2e/page.py"):
            assert httpx.get(f"{url}/page/{path}").status_code == 404


def test_the_page_can_be_left_out(monkeypatch, tmp_path):
    (tmp_path / "index.html").write_text("x")
    with page_of(monkeypatch, tmp_path, page=False) as url:
        assert httpx.get(url).status_code == 404
        assert "make page" not in httpx.get(url).text


def test_no_page_of_the_server_fetches_anything_from_elsewhere(server):
    """FastAPI's pages of the API's description load their scripts from a CDN."""
    assert httpx.get(f"{server[0]}/openapi.json").status_code == 200
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert httpx.get(server[0] + path).status_code == 404


def test_stats_tell_each_step_once(engine_server):
    url = engine_server[0]
    before = httpx.get(f"{url}/stats").json()
    assert before["recent_steps"] == []
    assert before["kernels"]["embedding f32 plain"] == 1
    assert before["kv_block_tokens"] == 32
    answer = post(engine_server, "/v1/completions", prompt=[3, 4, 5], max_tokens=4, ignore_eos=True)
    assert answer.status_code == 200
    after = httpx.get(f"{url}/stats?recent_steps=1024&after_step={before['steps']}").json()
    assert [step["prefill_tokens"] for step in after["recent_steps"]] == [3, 0, 0, 0]
    assert [step["decode_tokens"] for step in after["recent_steps"]] == [0, 1, 1, 1]
    assert httpx.get(f"{url}/stats?recent_steps=9&after_step={after['steps']}").json()["recent_steps"] == []
    # Of an engine that was started again the caller knows more steps than there are.
    restarted = httpx.get(f"{url}/stats?recent_steps=1024&after_step=1000000").json()
    assert len(restarted["recent_steps"]) == after["steps"]


def test_kernels_add_up_to_the_steps_of_a_pass(engine_server, engine_folder):
    from castiron.engines import open_engine

    kernels = httpx.get(f"{engine_server[0]}/stats").json()["kernels"]
    assert sum(kernels.values()) == len(open_engine(engine_folder).program("host").steps)


@pytest.mark.parametrize(
    "query", ["recent_steps=1025", "recent_steps=-1", "after_step=x", "recent_steps=1e3"]
)
def test_a_bad_query_of_stats_is_refused(server, query):
    answer = httpx.get(f"{server[0]}/stats?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
