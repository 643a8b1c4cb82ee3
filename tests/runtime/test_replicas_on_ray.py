"""castiron serve-engine --replicas 2 on this machine: make ray-test."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_calls import wait_until
from server_process import running

pytest.importorskip("ray", reason="needs castiron[ray]: make ray-test")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(engine_folder):
    """The base URL of two replicas of the tiny engine, and their process."""
    options = ("--replicas", "2", "--num-threads", "1", "--disable-access-log")
    with running(str(engine_folder), *options) as server:
        yield server.url, server.process


def complete(url, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    body |= {"ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def by_replica(url, name):
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"castiron:{name}":
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0) + sample.value
    return found


def test_prompts_go_where_their_beginning_is_cached(served):
    url, _ = served
    prompts = [[40 - i] * 64 for i in range(4)]
    answers = []
    for _round in range(3):
        for prompt in prompts:
            answer = complete(url, prompt)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["token_ids"])
    assert answers[:4] == answers[4:8] == answers[8:]
    prompts_at = by_replica(url, "prefix_cache_queries_total")
    assert prompts_at["0"] == prompts_at["1"] > 0, "new prompts take turns"
    # Each prompt is computed once, wherever that was: of the other two times all but the last token is there.
    assert sum(by_replica(url, "prefix_cache_hits_total").values()) == 4 * 2 * 63


def test_a_replica_that_is_killed_costs_no_later_request_and_is_started_again(served):
    url, process = served
    (pid,) = [pid for pid, name in descendants(process.pid) if "castiron-0" in name]
    os.kill(pid, signal.SIGKILL)
    statuses = [complete(url, [i + 1] * 40).status_code for i in range(10)]
    assert statuses == [200] * 10
    wait_until(lambda: httpx.get(f"{url}/health/ready").json()["replicas_up"] == 2, 90)
    assert httpx.get(f"{url}/stats?replica=0", timeout=30).json()["model"] == "tiny"


def test_a_client_that_goes_frees_its_request(served):
    url, _ = served
    body = {"prompt": [3, 4], "max_tokens": 90, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_raw())
    wait_until(lambda: httpx.get(f"{url}/health").json()["unfinished_requests"] == 0, 20)


def test_sigterm_finishes_what_was_accepted_and_leaves_with_0(served):
    url, process = served
    body = {"prompt": [3, 4], "max_tokens": 90, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        parts = answer.iter_text()
        received = next(parts)
        process.send_signal(signal.SIGTERM)
        received += "".join(parts)
    assert received.endswith("data: [DONE]\n\n")
    tokens = [
        token
        for line in received.split("\n\n")
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
        for token in choice.get("token_ids") or ()
    ]
    assert len(tokens) == 90
    assert process.wait(60) == 0


def descendants(root):
    """(pid, command line) of all processes below ``root``."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
