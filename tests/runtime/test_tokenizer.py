"""Encoding and chat templates against transformers' own tokenizers."""

from __future__ import annotations

import json
import threading
import time

import make_tokenizer
import pytest
from castiron.runtime.chat_template import ChatTemplate
from castiron.runtime.tokenizer import Tokenizer

from castiron.errors import EngineError, RequestError

AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
TEXTS = ["Hello world", "", "naïve 🙂 日本", "<s>already there", "  leading blanks", "a<|im_end|>b"]


def configure(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("explicit", [None, True, False])
def test_ids_equal_transformers_for_every_bos_setting(tmp_path, bos, explicit):
    folder = make_tokenizer.byte_level(tmp_path, bos=bos)
    if explicit is not None:
        configure(folder, add_bos_token=explicit)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        if expected[:2] == [theirs.bos_token_id] * 2:
            expected = expected[1:]  # the one place where we differ on purpose: never two BOS
        assert ours.encode(text) == expected, text
        assert (
            ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        )


def test_a_prompt_that_begins_with_bos_gets_no_second_one(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, bos=True))
    assert tokenizer.encode("<s>Hello").count(tokenizer.bos_id) == 1
    assert tokenizer.encode("Hello").count(tokenizer.bos_id) == 1


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 < 3 & 'x'?"},
]


def test_chat_prompts_equal_transformers(tmp_path):
    folder = make_tokenizer.byte_level(tmp_path, bos=True)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for generation in (True, False):
        expected = theirs.apply_chat_template(CHAT, add_generation_prompt=generation, tokenize=False)
        assert ours.render_chat(CHAT, add_generation_prompt=generation) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True)
    assert ours.encode_chat(CHAT) == list(ids["input_ids"] if hasattr(ids, "keys") else ids)


FEATURES = """{% set ns = namespace(n=0) %}{{ bos_token }}{% for m in messages %}
{%- if m.role == 'skip' %}{% continue %}
{% endif %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% set ns.n = ns.n + 1 %}
{% endfor %}{{ ns.n }}
{%- if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}
{{ extra | default('none') }}{{ eos_token }}"""


def test_the_features_that_templates_use_render_as_in_transformers(tmp_path):
    folder = make_tokenizer.byte_level(tmp_path, chat_template=FEATURES)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT, {"role": "skip", "content": "no"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    for kwargs in ({}, {"tools": tools}, {"extra": "more"}):
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs)
        assert ours.render_chat(chat, **kwargs) == expected


def test_the_last_message_can_be_continued_as_in_transformers(tmp_path):
    folder = make_tokenizer.byte_level(tmp_path)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT, {"role": "assistant", "content": "It is "}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    got = ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert got == expected
    assert got.endswith("It is ")


def test_text_parts_are_joined_and_other_parts_refused(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in tokenizer.render_chat([{"role": "user", "content": parts}])
    with pytest.raises(RequestError, match="image_url"):
        tokenizer.render_chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        )


def test_a_template_that_walks_over_parts_gets_parts(tmp_path):
    template = "{% for m in messages %}{% for c in m['content'] %}[{{ c['text'] }}]{% endfor %}{% endfor %}"
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "[a][b]"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{{ raise_exception('Roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% if %}",
    ],
)
def test_a_template_that_attacks_or_fails_is_a_request_error(tmp_path, template):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError):
        tokenizer.render_chat(CHAT)


def test_a_conversation_without_messages_is_refused():
    with pytest.raises(RequestError, match="the conversation is empty"):
        ChatTemplate("{{ messages | length }}", {}).render([])


def test_a_missing_template_says_what_to_do(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match=r"no chat template.*plain prompt"):
        tokenizer.render_chat(CHAT)


def test_the_template_file_wins_over_the_config(tmp_path):
    folder = make_tokenizer.byte_level(tmp_path)
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer(folder).render_chat(CHAT) == "from file"


def test_a_damaged_tokenizer_is_an_engine_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_bytes_of_tokens_add_up_to_the_text(tmp_path):
    for make in (make_tokenizer.byte_level, make_tokenizer.byte_fallback):
        tokenizer = Tokenizer(make(tmp_path / make.__name__))
        ids = tokenizer.encode("The quick 🙂 naïve", add_special_tokens=False)
        text = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert text.lstrip() == "The quick 🙂 naïve"


def test_a_lone_surrogate_is_a_request_error(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path))
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("\ud800")


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path))
    worker = threading.Thread(target=tokenizer.encode, args=("lorem ipsum " * 30_000,))
    turns = 0
    worker.start()
    while worker.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 100, "one or two, where the tokenizer keeps the interpreter to itself"
