"""A call that is required, by the real core with random weights: valid by construction."""

from __future__ import annotations

import json
from dataclasses import replace

import live_server
import pytest
from core_engine import open_tiny, tiny
from server_calls import events, post
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 57}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
ASK = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def server(engine_folder, tmp_path_factory):
    """The tiny engine with a tokenizer for its 53 tokens: one for each character that a call needs."""
    folder = tmp_path_factory.mktemp("calls")
    characters = sorted(set('<tool_call>\n{"name": "f", "arguments": }</tool_call>0123456789'))
    shown = [{" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in characters]
    names = ["<pad>", "<s>", "</s>", *shown]
    assert len(names) <= tiny.TOKENS.vocab_size_used
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    session = open_tiny(engine_folder)
    session.info = replace(session.info, tokenizer_dir=folder)  # the engine came without
    with live_server.serve_session(session) as found:
        yield found


NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
@pytest.mark.parametrize("seed", range(4))
def test_random_weights_call_the_function_with_arguments_of_its_schema(server, choice, seed):
    answer = post(server, "/v1/chat/completions", **ASK, tool_choice=choice, temperature=2, seed=seed)
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["choices"]
    (call,) = one["message"]["tool_calls"]
    assert (one["finish_reason"], call["function"]["name"]) == ("tool_calls", "f")
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["n"]
    assert 3 <= arguments["n"] <= 57


def test_the_stream_of_a_required_call_has_the_same_arguments(server):
    body = {**ASK, "tool_choice": "required", "temperature": 0}
    whole = post(server, "/v1/chat/completions", **body).json()["choices"][0]["message"]["tool_calls"][0]
    chunks = events(server, "/v1/chat/completions", **body)
    entries = [e for c in chunks for e in c["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(e["function"]["arguments"] for e in entries) == whole["function"]["arguments"]
