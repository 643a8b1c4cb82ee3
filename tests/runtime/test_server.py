"""The HTTP server over a real socket: what clients send and what they get."""

from __future__ import annotations

import json
import threading

import fake_core
import httpx
import live_server
import numpy as np
import pytest
from castiron.runtime.tokenizer import Tokenizer
from fake_core import FakeCore, greedy
from server_calls import USER, events, post, says


def test_a_completion_has_the_fields_that_clients_read(server, folder):
    answer = post(server, "/v1/completions", model="fake", prompt="Hello", max_tokens=5, temperature=0)
    assert answer.status_code == 200
    data = answer.json()
    prompt = Tokenizer(folder).encode("Hello")
    expected = greedy(prompt, 5)
    assert data["object"] == "text_completion"
    assert data["id"].startswith("cmpl-")
    assert data["model"] == "fake"
    (choice,) = data["choices"]
    assert choice["text"] == Tokenizer(folder).decode(expected)
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = data["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 5)
    assert usage["total_tokens"] == len(prompt) + 5


def test_completions_make_16_tokens_unless_told_otherwise(server):
    for body in ({}, {"max_tokens": None}):
        assert (
            post(server, "/v1/completions", prompt=[5, 6], **body).json()["usage"]["completion_tokens"] == 16
        )


def test_prompts_come_in_four_shapes_and_choices_are_numbered_over_all(server):
    bodies = [("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6], [7]], 3)]
    for prompt, count in bodies:
        data = post(server, "/v1/completions", prompt=prompt, max_tokens=2, n=2, temperature=0).json()
        assert [c["index"] for c in data["choices"]] == list(range(2 * count))
        assert data["usage"]["completion_tokens"] == 4 * count
    texts = post(
        server, "/v1/completions", prompt=[[5], [6]], max_tokens=3, n=2, temperature=0, return_token_ids=True
    )
    assert [c["token_ids"] for c in texts.json()["choices"]] == [greedy([5], 3)] * 2 + [greedy([6], 3)] * 2


def test_streamed_pieces_add_up_to_the_whole(server):
    body = {"prompt": [[9, 9], [8]], "max_tokens": 12, "temperature": 0}
    whole = post(server, "/v1/completions", **body).json()
    text = ["", ""]
    reasons = [[], []]
    for chunk in events(server, "/v1/completions", **body):
        assert "usage" not in chunk
        (choice,) = chunk["choices"]
        text[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert text == [c["text"] for c in whole["choices"]]
    assert reasons == [["length"], ["length"]]


def test_a_chat_answer_and_its_stream_agree(server):
    body = {"messages": USER, "max_completion_tokens": 8, "temperature": 0, "unknown_field": {"x": 1}}
    data = post(server, "/v1/chat/completions", **body).json()
    (choice,) = data["choices"]
    assert data["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert data["usage"]["completion_tokens"] == 8
    chunks = events(server, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    content = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert content == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("length") == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == data["usage"]


def test_chat_fills_the_context_when_no_length_is_given(server):
    usage = post(server, "/v1/chat/completions", messages=USER, temperature=0).json()["usage"]
    assert usage["total_tokens"] == 256


def test_continuous_usage_stats_put_usage_into_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, "/v1/chat/completions", messages=USER, max_tokens=4, stream_options=options)
    assert all("usage" in c for c in chunks)


def test_several_chat_outputs_each_end_once(server):
    chunks = events(server, "/v1/chat/completions", messages=USER, max_tokens=4, n=3, temperature=1)
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_a_stop_string_ends_the_answer_and_is_named(folder):
    core = FakeCore(script=says(folder, "one two, three four "))
    with live_server.serve(core, tokenizer_dir=folder) as server:
        for stop in (["three", "zzz"], "three"):
            (choice,) = post(server, "/v1/completions", prompt="x", max_tokens=60, stop=stop).json()[
                "choices"
            ]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
                "one two, ",
                "stop",
                "three",
            )
        chunks = events(server, "/v1/chat/completions", messages=USER, max_tokens=60, stop="three")
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one two, "


def test_completion_logprobs_are_parallel_arrays_of_raw_values(server):
    data = post(
        server,
        "/v1/completions",
        prompt=[5, 6],
        max_tokens=4,
        logprobs=2,
        temperature=0,
        return_token_ids=True,
    )
    (choice,) = data.json()["choices"]
    logprobs = choice["logprobs"]
    history = [5, 6]
    for i, token in enumerate(choice["token_ids"]):
        raw = fake_core.log_softmax(fake_core.logits(history))
        assert logprobs["token_logprobs"][i] == pytest.approx(raw[token], abs=1e-6)
        assert len(logprobs["top_logprobs"][i]) in (2, 3)
        history.append(token)
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 4


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(server, folder, max_tokens):
    prompt = says(folder, "The quick fox")
    data = post(
        server, "/v1/completions", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    ).json()
    (choice,) = data["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("The quick fox")
    assert len(logprobs["tokens"]) == len(prompt) + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for i in range(1, len(prompt)):
        raw = fake_core.log_softmax(fake_core.logits(prompt[:i]))
        assert logprobs["token_logprobs"][i] == pytest.approx(raw[prompt[i]], abs=1e-5)
        assert max(logprobs["top_logprobs"][i].values()) == pytest.approx(raw.max(), abs=1e-5)
    assert "".join(logprobs["tokens"][: len(prompt)]) == "The quick fox"
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


def test_every_output_of_an_echoed_prompt_has_the_prompts_scores(server):
    body = {"prompt": [[5, 6], [7, 8], [9, 10]], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    choices = post(server, "/v1/completions", **body).json()["choices"]
    for choice, ids in zip(choices, [p for p in body["prompt"] for _ in range(2)], strict=True):
        raw = fake_core.log_softmax(fake_core.logits(ids[:1]))
        assert choice["logprobs"]["token_logprobs"][1] == pytest.approx(raw[ids[1]], abs=1e-5)


def test_prompt_logprobs_have_the_shape_of_vllms(server, folder):
    ids = says(folder, "The quick fox")
    body = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1, "n": 2, "temperature": 0}
    for choice in post(server, "/v1/completions", **body).json()["choices"]:
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == len(ids)
        for i in range(1, len(ids)):
            raw = fake_core.log_softmax(fake_core.logits(ids[:i]))
            best = np.argsort(-raw)[:2].tolist()
            entry = choice["prompt_logprobs"][i]
            assert {int(t) for t in entry} == {ids[i], *best}
            assert [entry[str(t)]["rank"] for t in best] == [1, 2]
            assert entry[str(ids[i])]["logprob"] == pytest.approx(raw[ids[i]], abs=1e-5)
            assert entry[str(ids[i])]["decoded_token"] == Tokenizer(folder).decode([ids[i]], False)
    chat = post(server, "/v1/chat/completions", messages=USER, prompt_logprobs=0, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None


def test_a_prompt_is_cut_to_its_last_tokens_when_asked(server):
    body = {"prompt": list(range(1, 251)), "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    assert post(server, "/v1/completions", **body).status_code == 400
    for kept, expected in ((7, 7), (-1, 236), (300, None)):
        answer = post(server, "/v1/completions", truncate_prompt_tokens=kept, **body)
        if expected is None:
            assert answer.status_code == 400
            continue
        data = answer.json()
        prompt = list(range(251 - expected, 251))
        assert data["usage"]["prompt_tokens"] == expected
        assert data["choices"][0]["prompt_token_ids"] == prompt
        assert data["choices"][0]["token_ids"] == greedy(prompt, 20)


def test_best_of_answers_with_the_likeliest_outputs(server):
    body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 1.5, "seed": 7}
    eight = post(server, "/v1/completions", n=8, logprobs=0, **body).json()["choices"]
    sums = sorted((sum(c["logprobs"]["token_logprobs"]) for c in eight), reverse=True)
    data = post(server, "/v1/completions", n=2, best_of=8, **body).json()
    assert [c["cumulative_logprob"] for c in data["choices"]] == pytest.approx(sums[:2])
    assert data["usage"]["completion_tokens"] == 8
    best = next(c for c in eight if sum(c["logprobs"]["token_logprobs"]) == sums[0])
    assert data["choices"][0]["text"] == best["text"]
    chat = post(server, "/v1/chat/completions", messages=USER, max_tokens=4, best_of=3).json()
    assert len(chat["choices"]) == 1


def test_chat_logprobs_name_tokens_and_bytes(server):
    body = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    entries = post(server, "/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 3
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    streamed = events(server, "/v1/chat/completions", **body)
    found = [
        e for c in streamed if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]
    ]
    assert found == entries


def test_tokens_may_be_named_by_their_ids(server):
    body = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = post(server, "/v1/completions", prompt=[5], logprobs=1, **body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    (choice,) = post(server, "/v1/chat/completions", messages=USER, logprobs=True, **body).json()["choices"]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{t}" for t in choice["token_ids"]]


def test_a_token_that_is_no_utf8_is_written_as_bytes(folder):
    core = FakeCore(script=says(folder, "🙂")[:1])
    with live_server.serve(core, tokenizer_dir=folder) as server:
        data = post(server, "/v1/completions", prompt=[5], max_tokens=1, logprobs=0).json()
        assert data["choices"][0]["logprobs"]["tokens"][0].startswith("bytes:\\x")


def test_models_are_listed(server):
    data = httpx.get(server[0] + "/v1/models").json()
    assert data["object"] == "list"
    assert [m["id"] for m in data["data"]] == ["fake", "alias"]
    assert data["data"][0]["max_model_len"] == 256
    assert httpx.get(server[0] + "/v1/models/alias").json()["id"] == "alias"
    missing = httpx.get(server[0] + "/v1/models/none")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_version_and_openapi_answer(server):
    for path in ("/health", "/health/live", "/health/ready"):
        answer = httpx.get(server[0] + path)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ok"
    assert httpx.get(server[0] + "/version").json()["version"]
    schema = httpx.get(server[0] + "/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in body["properties"]
    assert "$ref" not in json.dumps(body)


def test_an_engine_without_tokenizer_serves_token_ids():
    with live_server.serve() as server:
        data = post(
            server,
            "/v1/completions",
            prompt=[5, 6],
            max_tokens=3,
            temperature=0,
            return_token_ids=True,
            logprobs=1,
        )
        (choice,) = data.json()["choices"]
        assert choice["token_ids"] == greedy([5, 6], 3)
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        assert post(server, "/v1/completions", prompt="text").status_code == 400
        assert post(server, "/v1/chat/completions", messages=USER).status_code == 400


def test_sampling_defaults_are_request_then_model_then_api(folder):
    core = FakeCore()
    with live_server.serve(
        core, tokenizer_dir=folder, generation_config={"temperature": 0.6, "top_k": 20}
    ) as server:
        post(server, "/v1/completions", prompt=[5], max_tokens=1)
        post(server, "/v1/completions", prompt=[5], max_tokens=1, temperature=0.1)
    seen = [(p.temperature, p.top_k, p.top_p) for _, p in core.submitted]
    assert seen == [(0.6, 20, 1.0), (0.1, 20, 1.0)]
    core = FakeCore()
    config = {"use_generation_config": False}
    with live_server.serve(
        core, tokenizer_dir=folder, generation_config={"temperature": 0.6}, config=config
    ) as server:
        post(server, "/v1/completions", prompt=[5], max_tokens=1)
    assert core.submitted[0][1].temperature == 1.0


def test_many_streams_at_once_each_get_their_own_tokens(server):
    results = {}

    def one(i):
        chunks = events(
            server, "/v1/completions", prompt=[20 + i], max_tokens=20, temperature=0, return_token_ids=True
        )
        results[i] = [t for c in chunks for t in c["choices"][0]["token_ids"]]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: greedy([20 + i], 20) for i in range(16)}


def test_the_openai_client_works(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["fake", "alias"]
    answer = client.chat.completions.create(
        model="fake", messages=USER, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content) == 6
    stream = client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    for chunk in stream:
        pieces += [c.delta.content or "" for c in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == answer.choices[0].message.content
    assert usage.completion_tokens == 6
    text = client.completions.create(model="fake", prompt="Hello", max_tokens=4, echo=True, logprobs=1)
    assert text.choices[0].text.startswith("Hello")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="fake", prompt=[5] * 300)
