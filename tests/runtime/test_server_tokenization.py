"""/tokenize, /detokenize and /tokenizer_info: the ids that a request would have, and back."""

from __future__ import annotations

import httpx
import live_server
import pytest
from castiron.runtime.tokenizer import Tokenizer
from server_calls import USER, post


def test_a_text_becomes_its_tokens_and_back(server, folder):
    reference = Tokenizer(folder).backend
    text = "naïve 日本語 🙂"
    data = post(server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert data["tokens"] == reference.encode(text).ids
    assert (data["count"], data["max_model_len"]) == (len(data["tokens"]), 256)
    assert len(data["token_strs"]) == data["count"]
    assert data["token_strs"][0] == "<s>"
    assert post(server, "/detokenize", tokens=data["tokens"]).json() == {"prompt": "<s>" + text}
    plain = post(server, "/tokenize", prompt=text, add_special_tokens=False).json()
    assert plain["tokens"] == data["tokens"][1:]
    assert plain["token_strs"] is None
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("strings", [True, False])
@pytest.mark.parametrize("words", [0, 7, 40, 1000])
def test_long_answers_are_rendered_in_slices_and_are_the_same(server, monkeypatch, words, strings):
    body = {"prompt": "日本 naïve " * words, "return_token_strs": strings, "add_special_tokens": False}
    whole = post(server, "/tokenize", **body)
    monkeypatch.setattr("castiron.runtime.server.tokenization._SLICE", 7)
    sliced = post(server, "/tokenize", **body)
    assert sliced.headers["content-type"] == whole.headers["content-type"] == "application/json"
    assert sliced.content == whole.content
    tokens = whole.json()["tokens"]
    back = post(server, "/detokenize", tokens=tokens)
    monkeypatch.setattr("castiron.runtime.server.tokenization._SLICE", 1 << 20)
    assert back.content == post(server, "/detokenize", tokens=tokens).content


def test_messages_have_the_tokens_of_the_chat_that_they_begin(server):
    counted = post(server, "/tokenize", messages=USER).json()
    core = server[1].engine.session.core
    post(server, "/v1/chat/completions", messages=USER, max_tokens=1)
    assert counted["tokens"] == core.submitted[-1][0]
    longer = post(server, "/tokenize", messages=USER, add_special_tokens=True).json()
    assert longer["count"] == counted["count"] + 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [5]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": {"messages": []}}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [300]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
    ],
)
def test_bad_requests_are_refused(server, path, body, status):
    answer = post(server, path, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("token", [-1, 10**30])
def test_a_token_outside_the_vocabulary_is_told_by_the_clients_own_name(server, token):
    error = post(server, "/detokenize", tokens=[5, token]).json()["error"]
    assert error["param"] == "tokens"
    assert error["message"].startswith(f"tokens holds {token}; expected 0 to ")


def test_the_tokenizers_configuration_is_shown_to_those_who_were_asked(server, folder):
    assert httpx.get(server[0] + "/tokenizer_info").status_code == 404
    with live_server.serve(tokenizer_dir=folder, config={"tokenizer_info": True}) as open_server:
        data = httpx.get(open_server[0] + "/tokenizer_info").json()
    assert (data["bos_token"], data["eos_token"]) == ("<s>", "</s>")
    assert "im_start" in data["chat_template"]
