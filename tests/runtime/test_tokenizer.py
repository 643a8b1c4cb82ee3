"""Encoding and chat templates against transformers' own tokenizers."""

from __future__ import annotations

import json
import threading
import time

import make_tokenizer
import pytest
from castiron.runtime.chat_template import ChatTemplate
from castiron.runtime.request_errors import ParameterError
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
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [*CHAT, {"role": "skip", "content": "no", "tool_calls": [call]}]
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
    (folder / "chat_template.jinja").write_text(
        "from file{% for m in messages %} {{ m.content }}{% endfor %}"
    )
    assert Tokenizer(folder).render_chat(CHAT[:1]) == "from file Be brief."


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
    with pytest.raises(RequestError) as refusal:
        tokenizer.encode("ab\ud800")
    assert str(refusal.value).startswith(
        r"prompt has a lone surrogate ('\ud800') at character 2; expected Unicode text"
    )


CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
#: Writes what it knows and passes over the rest, tool results as JSON.
KNOWN_ROLES = """{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}
{%- elif m.role in ('tool', 'ipython') %}T:{{ m.content | tojson }}
{%- elif m.role == 'assistant' %}A:{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}
{{- m.content.split('</think>')[-1] }}{% endif %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "role", "content", "read"),
    [
        (CHATML, "wizard", "abc", True),
        (KNOWN_ROLES, "ipython", "abc", True),
        (KNOWN_ROLES, "tool", 'say "a"', True),
        (KNOWN_ROLES, "assistant", "<think>x</think>", True),
        (KNOWN_ROLES, "assistant", "", True),
        (KNOWN_ROLES, "system", "abc", False),
        (KNOWN_ROLES, "wizard", "abc", False),
        (KNOWN_ROLES, "wizard", "U", False),  # which the prompt has from elsewhere
        (KNOWN_ROLES, "wizard", "", False),
        (KNOWN_ROLES, "User", [{"type": "text", "text": "abc"}], False),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(tmp_path, template, role, content, read):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=template))
    chat = [{"role": "user", "content": "hello"}, {"role": role, "content": content}]
    for order in (chat, [*chat, {"role": "tool", "content": 'a "quote"'}], chat[::-1]):
        if read:
            assert tokenizer.render_chat(order)
            continue
        with pytest.raises(
            ParameterError, match=rf"messages\[{order.index(chat[1])}\] has the role '{role}'"
        ):
            tokenizer.render_chat(order)


def test_what_a_message_with_calls_says_besides_is_the_templates_business(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=KNOWN_ROLES))
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "abc", "tool_calls": calls}]
    assert "abc" not in tokenizer.render_chat(chat)


def test_a_template_that_reads_no_message_to_be_continued_is_refused(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=KNOWN_ROLES))
    chat = [{"role": "system", "content": "abc"}, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.render_chat(chat[1:], **options) == "A:It is"
    with pytest.raises(ParameterError, match=r"messages\[0\] has the role 'system'"):
        tokenizer.render_chat(chat, **options)


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_a_message_without_content_is_refused_where_only_a_model_may_have_none(tmp_path, role, message):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path, chat_template=CHATML))
    with pytest.raises(ParameterError, match=rf"messages\[1\] of the role '{role}' has no content; expected"):
        tokenizer.render_chat([*CHAT[:1], {"role": role, **message}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": {"a": 1}}, "tools is {'a': 1}; expected a list of JSON schemas"),
        ({"tools": [5]}, r"tools is \[5\]; expected"),
        ({"messages": []}, "messages is also a variable of the template"),
    ],
)
def test_what_is_no_list_of_tools_or_comes_twice_is_refused(tmp_path, options, message):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path))
    with pytest.raises(ParameterError, match=message):
        tokenizer.render_chat(CHAT, **options)


def test_an_assistant_may_have_said_nothing(tmp_path):
    joins = "{% for m in messages %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}"
    asks = "{% for m in messages %}{{ m.role }}{{ 'calls' if m.content == none else m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    for template, expected in ((joins, "user: x;assistant: ;"), (asks, "userxassistantcalls")):
        folder = make_tokenizer.byte_level(tmp_path / str(len(expected)), chat_template=template)
        assert Tokenizer(folder).render_chat(chat) == expected


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path):
    tokenizer = Tokenizer(make_tokenizer.byte_level(tmp_path))
    worker = threading.Thread(target=tokenizer.encode, args=("lorem ipsum " * 30_000,))
    turns = 0
    worker.start()
    while worker.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 100, "one or two, where the tokenizer keeps the interpreter to itself"
