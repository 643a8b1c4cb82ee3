"""The page in headless Chromium: make page-test."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

import live_server
import make_tokenizer
import pytest
from castiron.runtime.server import page
from castiron.runtime.server.api_keys import ApiKey, ApiKeys
from castiron.runtime.server.front import FrontConfig
from fake_core import FakeCore

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make page-test")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).resolve().parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make page-test"),
    pytest.mark.skipif(
        not ((page._FOLDER / "index.html").is_file() and AXE.is_file()),
        reason="the page is not built: make page",
    ),
]
#: Where to leave screenshots, if anywhere.
SHOTS = os.environ.get("CASTIRON_SCREENSHOTS")
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


class LiveCore(FakeCore):
    """A core whose counters go up, as the live view wants to see."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.02, max_batch_size=8)
        self.made = 0
        self.records: list[dict[str, float]] = []
        self._records_lock = threading.Lock()

    def poll(self, timeout):
        events = super().poll(timeout)
        tokens = sum(len(e.token_ids) for e in events)
        if events:
            with self._records_lock:
                self.made += tokens
                self.records.append(self._record(len(events), tokens))
        return events

    def _record(self, running, tokens):
        n = len(self.records) + 1
        counts = dict.fromkeys(
            ("draft_tokens", "accepted_tokens", "queried_tokens", "preemptions", "waiting"), 0
        )
        times = {"intake_s": 2e-5, "schedule_s": 3e-5, "draft_s": 0.0, "queued_s": 0.0, "sample_s": 2e-4}
        chunk = 24 if n % 9 == 1 else 0
        counts |= {
            "running": running,
            "decode_tokens": tokens,
            "prefill_tokens": chunk,
            "cached_tokens": chunk // 2,
        }
        return {"step": n, "start_s": n * 0.02, "forward_s": 0.018 + chunk / 4000, **times, **counts}

    def stats(self, recent_steps=0):
        with self._records_lock:
            steps, made = list(self.records), self.made
        base = super().stats()
        base["kv_blocks_used"] = 6 * base["running"]
        base |= {"steps": len(steps), "generated_tokens": made, "kv_blocks_cached": min(60, len(steps) // 4)}
        base["kv_blocks_free"] = 100 - base["kv_blocks_used"] - base["kv_blocks_cached"]
        base |= {"max_batch_size": 8, "max_num_tokens": 256, "max_seq_len": 4096, "waiting_tokens": 0}
        looked = sum(s["prefill_tokens"] for s in steps)
        base |= {"prefix_query_tokens": looked, "prefix_cached_tokens": looked // 2, "requests_submitted": 5}
        zero = ("kv_blocks_evicted", "preemptions", "graph_steps", "device_sampled_steps", "ahead_steps")
        base |= dict.fromkeys((*zero, "draft_tokens", "accepted_tokens"), 0)
        base |= {"requests_finished": {"length": 3}, "isa": "avx512", "num_threads": 2, "kv_bytes": 1 << 26}
        return {**base, "recent_steps": steps[-recent_steps:]} if recent_steps else base


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_tokenizer.byte_level(tmp_path_factory.mktemp("tok"))
    kernels = {"linear bf16 panel16x2": 121, "paged_attention": 30, "rms_norm": 61}
    with live_server.serve(LiveCore(), tokenizer_dir=folder, max_seq_len=4096, kernels=kernels) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(browser, server):
    """A page on the server; the test fails on any error in the console and on any request elsewhere."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    made = context.new_page()
    errors: list[str] = []
    made.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    made.on("pageerror", lambda e: errors.append(str(e)))
    made.on("request", lambda r: None if r.url.startswith((server[0], "data:")) else errors.append(r.url))
    made.goto(server[0])
    yield made
    context.close()
    assert errors == []


def shot(tab, name):
    if SHOTS:
        tab.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def ask(tab, text):
    tab.fill("#prompt", text)
    tab.press("#prompt", "Enter")


def script(tab, *texts, field="content"):
    """Have the next answers consist of these texts, whatever the engine would say."""
    events = [{"choices": [{"delta": {field: text}, "finish_reason": None}]} for text in texts]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )


def chats_of(tab):
    """The bodies of the chat requests that it sends from now on."""
    sent = []
    tab.on(
        "request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/chat/completions") else None
    )
    return sent


def set_length(tab, tokens):
    tab.fill("#max_completion_tokens", str(tokens))


def test_an_answer_streams_and_tells_what_it_took(tab):
    sync_api.expect(tab.locator("#status")).to_contain_text("ready")
    set_length(tab, 40)
    ask(tab, "Hello")
    foot = tab.locator(".turn.assistant footer")
    sync_api.expect(foot).to_contain_text("40 tokens", timeout=15_000)
    sync_api.expect(foot).to_contain_text("first token after")
    sync_api.expect(foot).to_contain_text("cut at the longest answer")
    assert tab.locator(".turn.user").inner_text() == "Hello"
    shot(tab, "chat")


def test_a_long_answer_is_stopped_by_the_button_and_by_escape(tab, server):
    for stop in (lambda: tab.click("#stop"), lambda: tab.keyboard.press("Escape")):
        set_length(tab, 3000)
        ask(tab, "Tell me everything")
        sync_api.expect(tab.locator(".caret").last).to_be_visible()
        sync_api.expect(tab.locator(".turn.assistant .prose").last).to_contain_text(re.compile(".{20}", re.S))
        shot(tab, "streaming")
        stop()
        sync_api.expect(tab.locator(".turn.assistant footer").last).to_contain_text("stopped")
        sync_api.expect(tab.locator("#send")).to_be_visible()
        core = server[1].engine.session.core
        tab.wait_for_timeout(300)
        assert core.stats()["running"] == 0, "the engine goes on"


def test_settings_travel_with_the_request(tab):
    sent = chats_of(tab)
    tab.fill("#system", "Be brief")
    tab.fill("#temperature", "0")
    tab.fill("#seed", "7")
    tab.fill("#stop-strings", "END,\\n\\n")
    set_length(tab, 5)
    tab.select_option("#model", "alias")
    ask(tab, "Hi")
    sync_api.expect(tab.locator(".turn.assistant footer")).to_contain_text("tokens")
    (body,) = sent
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert (body["temperature"], body["seed"], body["max_completion_tokens"]) == (0, 7, 5)
    assert body["stop"] == ["END", "\n\n"]
    assert body["model"] == "alias"
    ask(tab, "More")
    sync_api.expect(tab.locator(".turn.assistant footer")).to_have_count(2)
    assert [m["role"] for m in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    tab.reload()
    assert tab.input_value("#seed") == "7"
    tab.click("#reset")
    assert tab.input_value("#seed") == ""


def test_a_schema_is_sent_and_a_bad_one_is_told_before(tab):
    sent = chats_of(tab)
    tab.select_option("#format", "json_schema")
    tab.fill("#schema", "{")
    sync_api.expect(tab.locator("#schema-error")).to_contain_text("No JSON")
    ask(tab, "Hi")
    sync_api.expect(tab.locator(".failure")).to_contain_text("schema")
    assert sent == []
    tab.fill("#schema", json.dumps(SCHEMA))
    script(tab, '{"a": ', "true}")
    tab.press("#prompt", "Enter")
    sync_api.expect(tab.locator(".turn.assistant pre")).to_have_text('{\n  "a": true\n}')
    shot(tab, "schema")
    assert sent[0]["response_format"]["json_schema"]["schema"] == SCHEMA


def test_what_a_model_says_is_never_html(tab):
    script(
        tab,
        "Here is **bold** and `code`: <img src=x onerror=alert(1)>\n\n",
        "```python\nprint('<b>')\n```\nand so on",
    )
    ask(tab, "Hi")
    answer = tab.locator(".turn.assistant .answer")
    sync_api.expect(answer.locator("pre code")).to_have_text("print('<b>')")
    sync_api.expect(answer.locator("strong")).to_have_text("bold")
    assert answer.locator("img").count() == 0
    assert "<img src=x" in answer.inner_text()


def test_reasoning_is_folded_away_from_the_answer(tab):
    script(tab, "I think ", "so", field="reasoning_content")
    ask(tab, "Hi")
    thought = tab.locator(".turn.assistant details")
    sync_api.expect(thought.locator("summary")).to_have_text("Reasoning")
    assert thought.locator(".prose").text_content() == "I think so"
    assert not thought.locator(".prose").is_visible()


def test_the_live_view_shows_what_runs(tab, server):
    set_length(tab, 400)
    ask(tab, "Go on")
    tab.click("#tab-live")
    sync_api.expect(tab.locator(".tile").first).to_contain_text("of 8")
    tab.wait_for_timeout(4000)
    assert tab.locator(".tile").first.locator("b").inner_text() == "1"
    generated = tab.locator(".tile").nth(2).locator("b").inner_text()
    # A step of 20 ms gives a token: at most 50 a second, and not far less.
    assert 10 < float(generated.removesuffix("/s")) <= 60
    assert tab.locator(".plot canvas").count() == 6
    sync_api.expect(tab.locator("#facts")).to_contain_text("linear bf16 panel16x2")
    shot(tab, "live")
    tab.click("#theme")
    tab.click("#theme")
    assert tab.locator("html").get_attribute("data-theme") == "dark"
    tab.wait_for_timeout(700)
    shot(tab, "live-dark")
    tab.click("#tab-chat")
    shot(tab, "chat-dark")
    tab.keyboard.press("Escape")


def test_a_server_with_keys_is_asked_with_the_one_that_was_typed_in(browser, tmp_path):
    keys = ApiKeys([ApiKey("team", "sk-test-0123456789")])
    folder = make_tokenizer.byte_level(tmp_path)
    with live_server.serve(LiveCore(), tokenizer_dir=folder, front=FrontConfig(keys)) as (url, _):
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        tab = context.new_page()
        tab.goto(url)
        sync_api.expect(tab.locator("#status")).to_contain_text("needs an API key")
        sync_api.expect(tab.locator(".field.wanted label")).to_have_text("API key")
        shot(tab, "locked")
        tab.fill("#api-key", "sk-test-0123456789")
        tab.press("#api-key", "Tab")
        sync_api.expect(tab.locator("#status")).to_contain_text("ready", timeout=10_000)
        assert tab.locator("#model option").all_inner_texts() == ["fake", "alias"]
        set_length(tab, 3)
        ask(tab, "Hello")
        sync_api.expect(tab.locator(".turn.assistant footer")).to_contain_text("3 tokens")
        tab.reload()
        assert tab.input_value("#api-key") == "sk-test-0123456789"
        other = context.new_page()
        other.goto(url)
        assert other.input_value("#api-key") == "", "another tab has no key"
        context.close()


def test_at_the_width_of_a_phone_nothing_is_cut_off(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    assert not tab.locator("#settings").is_visible()
    tab.click("#open-settings")
    sync_api.expect(tab.locator("#temperature")).to_be_visible()
    shot(tab, "phone-settings")
    tab.click("#open-settings")
    shot(tab, "phone-chat")
    tab.click("#tab-live")
    tab.wait_for_timeout(1500)
    shot(tab, "phone-live")
    for view in ("#live", "#chat"):
        tab.goto(tab.url.partition("#")[0] + view)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_axe_is_broken(browser, server, scheme):
    """Contrast, names, landmarks, roles, keyboard: what axe-core can tell of the WCAG."""
    # The policy of the page lets no other script in; axe is one.
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    tab = context.new_page()
    tab.goto(server[0])
    tab.add_script_tag(path=AXE)
    script(tab, "Some `code`\n```py\nx = 1\n```\n", "and more")
    ask(tab, "Hi")
    sync_api.expect(tab.locator(".turn.assistant footer")).to_contain_text("first token")
    tab.select_option("#format", "json_schema")
    for view in ("chat", "live"):
        tab.click(f"#tab-{view}")
        tab.wait_for_timeout(1200)
        found = tab.evaluate("axe.run()")["violations"]
        assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found] == []
    context.close()


def test_everything_has_a_name_and_the_tabs_go_by_arrows(tab):
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')]
          .filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))
          .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    tab.focus("#tab-chat")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#tab-live").get_attribute("aria-selected") == "true"
    assert tab.evaluate("document.activeElement.id") == "tab-live"
    assert tab.locator("#view-chat").is_hidden()
