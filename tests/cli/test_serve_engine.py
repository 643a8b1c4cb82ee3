"""castiron serve-engine: what it prints at the start, and how it fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

from castiron.runtime import loading
from fake_core import FakeCore, make_session

from castiron.cli import main

RUNTIME_TESTS = Path(__file__).resolve().parent.parent / "runtime"
#: The command line over the twin of the core, as a process of its own that signals can be sent to.
SERVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from fake_core import FakeCore, make_session
from castiron.cli import main
from castiron.runtime import loading
loading.open_session = lambda *a, options, **k: make_session(
    FakeCore(step_seconds=0.02), max_queue_size=options.max_queue_size
)
main()
"""


def start(*options):
    command = [sys.executable, "-c", SERVER, str(RUNTIME_TESTS), "serve-engine", "E", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    head = []
    for line in process.stdout:
        head.append(line)
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            return process, int(found[1]), "".join(head)
    raise AssertionError(process.stderr.read())


def post(port, body):
    """Send a completion request and return the socket, without waiting for the answer."""
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    )
    return client


def test_the_start_prints_limits_room_and_address():
    process, _, head = start("--served-model-name", "one", "--served-model-name", "two")
    try:
        assert "limits: 64 running requests, 256 tokens a step, 256 tokens a request" in head
        assert "KV cache: 3200 tokens; maximum concurrency for 256 tokens: 12.5x" in head
        assert "no tokenizer" in head
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
    process, port, _ = start("--shutdown-timeout", "60")
    with post(port, {"prompt": [5], "max_tokens": 250, "stream": True}) as client:
        client.recv(100)
        process.send_signal(signal.SIGTERM)
        while client.recv(1 << 10) and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)
    process.communicate()


def test_a_port_in_use_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(loading, "open_session", lambda *a, **k: make_session(FakeCore()))
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
    result = CliRunner().invoke(main, ["serve-engine", "E"])
    assert result.exit_code == 1
    assert "--generation-config none" in result.stderr


def test_no_engine_is_an_error_line(tmp_path):
    result = CliRunner().invoke(main, ["serve-engine", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
