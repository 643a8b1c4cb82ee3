"""Pieces of streamed text, joined, are what the tokenizers library decodes from the whole."""

from __future__ import annotations

import make_tokenizer
import pytest
from castiron.runtime.detokenizer import WindowDetokenizer
from castiron.runtime.tokenizer import Tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

TEXTS = st.text(alphabet=st.sampled_from("abe Tfox,.\n éüßЖ日本語🙂👩‍👧\u200d"), max_size=40)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer(make_tokenizer.byte_level(tmp_path_factory.mktemp("bl")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    return Tokenizer(make_tokenizer.byte_fallback(tmp_path_factory.mktemp("bf")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    return Tokenizer(make_tokenizer.metaspace(tmp_path_factory.mktemp("ms")))


def stream(detokenizer, ids):
    return "".join([detokenizer.push(i) for i in ids] + [detokenizer.flush()])


@given(ids=st.lists(st.integers(0, 299), max_size=60), skip=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_byte_level_streams_any_ids_as_the_library_decodes_them(byte_level, ids, skip):
    assert stream(byte_level.detokenizer([], skip), ids) == byte_level.backend.decode(
        ids, skip_special_tokens=skip
    )


@given(text=TEXTS)
def test_byte_fallback_streams_any_text_unbroken(byte_fallback, text):
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert stream(byte_fallback.detokenizer([]), ids) == byte_fallback.backend.decode(ids)


@given(prompt=TEXTS, text=TEXTS)
def test_the_text_after_a_prompt_is_the_difference_of_the_two_decoded(byte_fallback, prompt, text):
    prompt_ids = byte_fallback.encode(prompt, add_special_tokens=False)
    ids = byte_fallback.encode(text, add_special_tokens=False)
    before, whole = byte_fallback.backend.decode(prompt_ids), byte_fallback.backend.decode(prompt_ids + ids)
    if not prompt_ids:
        return
    assert whole.startswith(before)
    assert before + stream(byte_fallback.detokenizer(prompt_ids), ids) == whole


@given(ids=st.lists(st.integers(5, 199), min_size=1, max_size=40))
@example(ids=[5, 5, *[199] * 8, 5])  # many ids of no token, then a space
def test_metaspace_keeps_every_space_between_words(metaspace, ids):
    assert stream(metaspace.detokenizer([]), ids) == metaspace.backend.decode(ids)


def test_the_window_agrees_with_the_byte_level_path(byte_level):
    ids = byte_level.encode("naïve 日本語 🙂 text", add_special_tokens=False)
    window = WindowDetokenizer(lambda x: byte_level.decode(x, False), [], byte_level.special_ids)
    assert stream(window, ids) == stream(byte_level.detokenizer([]), ids) == "naïve 日本語 🙂 text"


def test_no_piece_ends_inside_a_character(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        detokenizer = tokenizer.detokenizer(tokenizer.encode("The", False))
        pieces = [detokenizer.push(i) for i in tokenizer.encode("🙂é日", add_special_tokens=False)]
        assert "\ufffd" not in "".join(pieces)
        assert any(p == "" for p in pieces)


def test_an_unfinished_character_becomes_one_replacement_at_the_end(byte_level):
    ids = byte_level.encode("a🙂", add_special_tokens=False)[:-1]
    assert stream(byte_level.detokenizer([]), ids) == byte_level.backend.decode(ids)


def test_an_id_behind_the_vocabulary_has_no_text(byte_level):
    assert stream(byte_level.detokenizer([]), [5000]) == ""


def test_many_special_tokens_cost_and_show_nothing(byte_fallback):
    detokenizer = byte_fallback.detokenizer([1])
    assert [detokenizer.push(2) for _ in range(100)] == [""] * 100
    hello = byte_fallback.backend.token_to_id("▁Hello")
    assert detokenizer.push(hello) in ("Hello", " Hello")
