"""Connections: TLS, Unix sockets, clients that send slowly, too much, or nothing that is HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import time

import httpx
import live_server
import pytest
import trustme
from castiron.runtime.server import lingering
from castiron.runtime.server.listening import Listen, open_sockets
from cryptography.hazmat.primitives import serialization
from fake_core import FakeCore
from server_calls import connect, raw_post, wait_until

from castiron.errors import EngineError


def received(client):
    """All that comes until the server closes; None when it does not within ten seconds."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


REQUEST = raw_post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    made.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    return folder


def trusting(certificates, with_certificate=False):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if with_certificate:
        context.load_cert_chain(certificates / "both.pem")
    return context


def test_over_tls_a_client_that_trusts_the_authority_is_served(folder, certificates):
    listen = {"ssl_certfile": str(certificates / "cert.pem"), "ssl_keyfile": str(certificates / "key.pem")}
    with live_server.serve(tokenizer_dir=folder, listen=listen) as (url, _):
        assert url.startswith("https://")
        assert httpx.get(f"{url}/health", verify=trusting(certificates)).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_with_ca_certs_clients_need_a_certificate(folder, certificates):
    listen = {"ssl_certfile": str(certificates / "both.pem"), "ssl_ca_certs": str(certificates / "ca.pem")}
    with live_server.serve(tokenizer_dir=folder, listen=listen) as (url, _):
        assert httpx.get(f"{url}/health", verify=trusting(certificates, True)).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", verify=trusting(certificates))


def test_tls_files_that_do_not_work_are_refused_with_the_reason(certificates, tmp_path):
    key, cert = str(certificates / "key.pem"), str(certificates / "cert.pem")
    other = trustme.CA().issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    encryption = serialization.BestAvailableEncryption(b"phrase")
    plain = serialization.load_pem_private_key(other.private_key_pem.bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (tmp_path / "locked.pem").write_bytes(plain.private_bytes(*form, encryption))
    for fields, says in (
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "locked.pem")}, "encrypted.*pass phrase"),
        ({"ssl_keyfile": key}, "needs --ssl-certfile"),
        ({"ssl_certfile": cert}, "cannot be used"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "other.pem")}, "belong together"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": key}, "in PEM"),
    ):
        with pytest.raises(EngineError, match=says):
            Listen(**fields).check()


def test_a_unix_socket_serves_and_its_file_goes_with_the_server(folder, tmp_path):
    path = str(tmp_path / "s")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with live_server.serve(tokenizer_dir=folder, listen={"uds": path}):
        client = httpx.Client(transport=httpx.HTTPTransport(uds=path))
        assert client.get("http://x/health").status_code == 200
        with pytest.raises(EngineError, match="another server"):
            open_sockets(Listen(uds=path))
    assert not os.path.exists(path)
    (tmp_path / "s").write_text("")
    with pytest.raises(EngineError, match="no socket"):
        open_sockets(Listen(uds=path))


def test_a_taken_port_is_refused_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="--port"):
        open_sockets(Listen(port=taken.getsockname()[1]))
    with pytest.raises(EngineError, match="cannot listen"):
        open_sockets(Listen(host="no.such.host.invalid"))


@pytest.fixture(scope="module")
def hasty(folder):
    with live_server.serve(tokenizer_dir=folder, listen={"read_timeout": 0.3}) as server:
        yield server


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n", REQUEST[:-1], b"\r\n"])
def test_a_request_that_is_not_complete_in_time_is_408_and_the_connection_ends(hasty, sent):
    began = time.monotonic()
    with connect(hasty[0]) as client:
        client.sendall(sent)
        answer = received(client)
        assert time.monotonic() - began >= 0.25  # the clock of the connection starts a little earlier
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "RequestTimeoutError"


def test_dribbling_wins_no_time_also_on_a_connection_that_was_used_before(hasty):
    with connect(hasty[0]) as client:
        client.sendall(REQUEST)
        assert b"200 OK" in client.recv(65536)
        began = time.monotonic()
        with contextlib.suppress(OSError):  # broken pipe or reset, as the kernel likes
            for byte in REQUEST * 3:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - began < 5


def test_a_connection_that_brings_nothing_is_closed(hasty):
    with connect(hasty[0]) as client:
        assert received(client) == b""


def test_a_complete_request_may_take_longer_than_its_client_may_send(folder):
    core = FakeCore(step_seconds=0.02)
    with live_server.serve(core, tokenizer_dir=folder, listen={"read_timeout": 0.3}) as (url, _):
        body = {"prompt": [5], "max_tokens": 40}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        # and so may the second of two that were sent at once
        with connect(url) as client:
            path, close = "/v1/completions", "Connection: close"
            client.sendall(raw_post(path, body) + raw_post(path, body, close))
            assert received(client).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 50_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 300_000,
        b"GET /" + b"x" * 300_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        + b"t: u\r\n" * 50_000,
    ],
)
def test_headers_without_end_are_431(server, head):
    with connect(server[0]) as client:
        with contextlib.suppress(OSError):  # refused while we were still sending
            client.sendall(head)
        answer = received(client)
    assert answer == b"" or b" 431 " in answer or b" 400 " in answer
    assert httpx.get(server[0] + "/health").status_code == 200


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\na: b\r\n\r\n"])
def test_large_headers_are_431_also_in_one_piece_with_the_request(server, end):
    with connect(server[0]) as client:
        with contextlib.suppress(OSError):
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\na: "
            client.sendall(head + b"b" * 70_000 + end)
        answer = received(client)
    assert b" 200 " not in answer
    assert answer == b"" or b" 431 " in answer


def test_a_body_in_chunks_of_one_byte_is_taken(server):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    body = json.dumps({"prompt": [5, 6], "max_tokens": 3, "ignored": "x" * 50_000}).encode()
    with connect(server[0]) as client:
        client.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_is_400_in_the_envelope(server, sent):
    with connect(server[0]) as client:
        client.sendall(sent)
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


def test_a_client_that_goes_before_its_body_is_complete_is_no_error_of_the_server(folder, caplog):
    with live_server.serve(tokenizer_dir=folder) as server:
        with connect(server[0]) as client:
            client.sendall(REQUEST[:-5])
            time.sleep(0.1)
        assert httpx.get(server[0] + "/health").status_code == 200
        assert 'status="500"' not in httpx.get(server[0] + "/metrics").text
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_sending_side_counts_as_gone(folder, stream):
    core = FakeCore()
    with live_server.serve(core, tokenizer_dir=folder) as (url, service), connect(url) as client:
        body = {"prompt": [5], "max_tokens": 250, "stream": stream}
        with core.held():
            client.sendall(raw_post("/v1/completions", body))
            wait_until(lambda: service.engine.session.unfinished == 1)
            client.shutdown(socket.SHUT_WR)
            wait_until(lambda: core.cancelled)
        wait_until(lambda: service.engine.session.unfinished == 0)


def test_a_client_that_goes_frees_all_that_it_sent_at_once(folder, caplog):
    core = FakeCore()
    with live_server.serve(core, tokenizer_dir=folder) as (url, service):
        stream = {"prompt": [5], "max_tokens": 250, "stream": True}
        with core.held():
            with connect(url) as client:
                client.sendall(raw_post("/v1/completions", stream) * 3)
                wait_until(lambda: service.engine.session.unfinished == 1)
            wait_until(lambda: core.cancelled)
        wait_until(lambda: service.slot.current.users == 0)
        assert httpx.get(f"{url}/health").json()["unfinished_requests"] == 0
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(server):
    body = {"prompt": [5], "max_tokens": 5, "stream": True}
    with connect(server[0]) as client:
        client.sendall(raw_post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, events = received(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")


def test_a_head_is_answered_as_a_get_without_its_body(server):
    for path in ("/health", "/v1/models", "/metrics"):
        answer = httpx.head(server[0] + path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.head(server[0] + "/v1/completions").status_code == 405


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server):
    with connect(server[0]) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{")
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ANNOUNCED = b"Content-Length: 40000000\r\n\r\n"


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("tls", [False, True])
def test_who_sends_forty_megabytes_before_reading_gets_to_read_that_they_are_too_many(
    folder, certificates, tls, announced
):
    listen = {"ssl_certfile": str(certificates / "both.pem")} if tls else {}
    megabyte = b"x" * 1_000_000
    with live_server.serve(tokenizer_dir=folder, listen=listen) as (url, _), connect(url) as plain:
        wrapped = trusting(certificates).wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        with wrapped as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + (ANNOUNCED if announced else CHUNKED)
            )
            for _ in range(40):
                client.sendall(megabyte if announced else b"f4240\r\n" + megabyte + b"\r\n")
            answer = b""
            while b"limit of" not in answer:
                part = client.recv(65536)
                assert part, answer
                answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


def lasts(client, until):
    """Seconds until the server does not take what is sent any more, or ``until`` of them."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() < began + until:
            client.sendall(b"x" * 1000)
            time.sleep(0.02)
    return time.monotonic() - began


def test_a_connection_lingers_for_a_while_only(folder, monkeypatch):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + ANNOUNCED
    with live_server.serve(tokenizer_dir=folder, listen={"read_timeout": 1.0}) as (url, _):
        with connect(url) as client:  # the time that a request has
            client.sendall(head)
            assert 0.9 < lasts(client, 5) < 4
        monkeypatch.setattr(lingering, "MOST_BYTES", 10_000)
        with connect(url) as client:
            client.sendall(head)
            assert lasts(client, 5) < 0.9
        monkeypatch.setattr(lingering, "SILENCE", 0.2)
        with connect(url) as client:
            client.sendall(head)
            assert received(client).startswith(b"HTTP/1.1 413 ")
            time.sleep(0.5)
            assert lasts(client, 5) < 0.4


def test_headers_without_end_get_their_answer_also_when_all_were_sent_before_it_is_read(server):
    with connect(server[0]) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000)
        assert received(client).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_nonsense_behind_a_whole_request_does_not_cost_its_answer(server):
    with connect(server[0]) as client:
        client.sendall(raw_post("/v1/completions", {"prompt": [5], "max_tokens": 3}) + b"nonsense\r\n\r\n")
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1") == 1


def test_who_asks_for_http_2_is_answered_without_and_nothing_is_logged(server, caplog):
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQ"}
    assert httpx.get(f"{server[0]}/health", headers=headers).status_code == 200
    assert not caplog.records
