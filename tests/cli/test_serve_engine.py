"""castiron serve-engine: what it prints at the start, and how it fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

from castiron.runtime import loading
from fake_core import FOR_EVER, FakeCore, make_session
from server_calls import raw_post, wait_until

from castiron.cli import main

RUNTIME_TESTS = Path(__file__).resolve().parent.parent / "runtime"
#: The command line over the twin of the core, as a process of its own that signals can be sent to.
SERVER = """
import contextlib, sys, threading
sys.path.insert(0, sys.argv.pop(1))
from fake_core import FakeCore, make_session
from castiron.cli import main
from castiron.runtime import loading
core, max_seq_len, held = FakeCore(step_seconds=0.02), int(sys.argv.pop(1)), contextlib.ExitStack()
if sys.argv.pop(1) == "held":
    held.enter_context(core.held())
    threading.Thread(target=lambda: (sys.stdin.readline(), held.close()), daemon=True).start()
loading.open_session = lambda *a, options, **k: make_session(
    core, max_queue_size=options.max_queue_size, max_seq_len=max_seq_len
)
main()
"""


def start(*options, max_seq_len=256, held=False):
    """held: no request goes on until a line has been written to the process."""
    command = [sys.executable, "-c", SERVER, str(RUNTIME_TESTS), str(max_seq_len), "held" if held else "free"]
    command += ["serve-engine", "E", "--port", "0", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    head = []
    for line in process.stdout:
        head.append(line)
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            return process, int(found[1]), "".join(head)
    raise AssertionError(process.stderr.read())


def post(port, body):
    """Send a completion request and return the socket, without waiting for the answer."""
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(raw_post("/v1/completions", body))
    return client


def test_the_start_prints_limits_room_and_address():
    process, _, head = start("--served-model-name", "one", "--served-model-name", "two")
    try:
        limits = "64 running requests, 256 waiting, 256 tokens a step, 256 tokens a request"
        assert f"limits: {limits}" in head
        assert "KV cache: 3200 tokens; maximum concurrency for 256 tokens: 12.5x" in head
        assert "no tokenizer" in head
        assert "served_model_name=one,two (command line)" in head
        assert re.search(r"loaded in \d+\.\d\d s: imports \d", head)
        assert "POST /v1/chat/completions" in head
        assert "serving one on" in head
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_running_request_and_exits_with_0(kind):
    process, port, _ = start()
    with post(port, {"prompt": [5], "max_tokens": 50, "stream": True}) as client:
        received = client.recv(100)
        process.send_signal(kind)
        while part := client.recv(1 << 16):
            received += part
        assert process.wait(20) == 0
    process.communicate()
    assert b"[DONE]" in received
    assert b'"finish_reason":"length"' in received


def test_a_second_signal_ends_at_once():
    process, port, _ = start("--shutdown-timeout", "60", max_seq_len=2 * FOR_EVER)
    with post(port, {"prompt": [5], "max_tokens": FOR_EVER, "stream": True}) as client:
        client.recv(100)
        process.send_signal(signal.SIGTERM)
        while client.recv(1 << 10) and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
    process.communicate()


def test_a_port_in_use_is_told_before_an_engine_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["serve-engine", "E", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_a_bad_generation_config_is_refused_at_the_start(monkeypatch):
    session = make_session(FakeCore(), generation_config={"temperature": -3})
    monkeypatch.setattr(loading, "open_session", lambda *a, **k: session)
    result = CliRunner().invoke(main, ["serve-engine", "E", "--port", "0"])
    assert result.exit_code == 1
    assert "--generation-config none" in result.stderr


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "http:///v1/traces"])
def test_an_address_for_traces_that_is_none_is_refused_at_the_start(endpoint):
    result = CliRunner().invoke(main, ["serve-engine", "E", "--otlp-traces-endpoint", endpoint])
    assert result.exit_code == 1
    assert "expected an address such as" in result.stderr


@pytest.mark.parametrize("name", ["", "two\nlines"])
def test_a_model_name_that_nobody_could_write_is_refused(name):
    result = CliRunner().invoke(main, ["serve-engine", "E", "--served-model-name", name])
    assert result.exit_code == 1
    assert "--served-model-name" in result.stderr


def test_clients_may_change_adapters_only_where_the_engine_takes_some():
    result = CliRunner().invoke(main, ["serve-engine", "E", "--allow-runtime-lora-updating"])
    assert result.exit_code == 1
    assert "add --enable-lora" in result.stderr


def test_no_engine_is_an_error_line(tmp_path):
    result = CliRunner().invoke(main, ["serve-engine", str(tmp_path), "--port", "0"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_under_load_a_signal_loses_nothing_that_was_accepted():
    process, port, _ = start("--max-queue-size", "100", held=True)
    base = f"http://127.0.0.1:{port}"
    bodies = [
        {"prompt": [5 + k], "max_tokens": 60, "stream": k % 2 == 0} for k in range(90)
    ]  # 64 run, 26 wait
    clients = [post(port, body) for body in bodies]
    wait_until(lambda: httpx.get(base + "/health").json()["unfinished_requests"] == len(bodies))
    process.send_signal(signal.SIGTERM)
    # It still answers, so that probes and clients that come now learn that they must go elsewhere.
    wait_until(lambda: httpx.get(base + "/health/ready").status_code == 503)
    assert httpx.get(base + "/health/ready").json()["status"] == "draining"
    assert httpx.get(base + "/health/live").status_code == 200
    refused = httpx.post(base + "/v1/completions", json=bodies[0])
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    process.stdin.write("go on\n")
    process.stdin.flush()
    answers = []
    for client in clients:
        with client:
            client.settimeout(30)
            answer = b""
            while b"[DONE]" not in answer and b'"usage"' not in answer:
                part = client.recv(1 << 16)
                assert part, answer
                answer += part
            answers.append(answer)
    assert process.wait(20) == 0
    process.communicate()
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert all(b'"finish_reason":"length"' in answer for answer in answers)


def test_what_does_not_finish_in_time_is_told_so():
    process, port, _ = start("--shutdown-timeout", "0.5", max_seq_len=2 * FOR_EVER)
    with post(port, {"prompt": [5], "max_tokens": FOR_EVER, "stream": True}) as client:
        received = client.recv(100)
        process.send_signal(signal.SIGTERM)
        while part := client.recv(1 << 16):
            received += part
        assert process.wait(20) == 0
    process.communicate()
    assert b"shut down before" in received
    assert received.rstrip(b"0\r\n").endswith(b"data: [DONE]")


def test_options_come_from_a_file_and_variables_too(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("served_model_name: [from-file]\nmax_queue_size: 7\nlog_format: json\n")
    monkeypatch.setenv("CASTIRON_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("CASTIRON_API_KEY", "sk-in-a-variable")
    process, port, head = start("--config", str(tmp_path / "c.yaml"))
    try:
        assert "serving from-file on" in head
        assert "64 running requests, 8 waiting" in head
        assert "max_queue_size=8 (environment)" in head
        assert "sk-in-a-variable" not in head
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
    finally:
        process.terminate()
        _, log = process.communicate()
    assert json.loads(log.splitlines()[0])["status"] == 401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ray-address", "auto"), "--ray-address is for --replicas 2 or more"),
        (("--replicas", "0"), "0 is not in the range x>=1"),
    ],
)
def test_options_that_do_not_go_with_replicas_are_refused(options, message):
    result = CliRunner().invoke(main, ["serve-engine", "E", *options])
    assert result.exit_code != 0
    assert message in result.stderr


def test_without_ray_replicas_say_what_to_install(monkeypatch, tiny_engine):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(main, ["serve-engine", str(tiny_engine), "--port", "0", "--replicas", "2"])
    assert result.exit_code == 1
    assert "pip install 'castiron[ray]'" in result.stderr
