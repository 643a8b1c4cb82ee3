"""Grammars over a tokenizer: whatever is drawn from their masks is a text of the form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import make_tokenizer
import numpy as np
import pytest
from castiron.runtime.grammar import Grammars, Matcher
from castiron.runtime.mask_thread import MaskThread
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.structured_output import StructuredOutput
from server_calls import wait_until
from tokenizers import Tokenizer

from castiron.errors import RequestError

END = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = make_tokenizer.byte_level(tmp_path_factory.mktemp("grammar"))
    file = folder / "tokenizer.json"
    return file, Tokenizer.from_file(str(file))


@pytest.fixture(scope="module")
def grammars(tokenizer: tuple[Path, Tokenizer]) -> Grammars:
    return Grammars(tokenizer[1].to_str, tokenizer[1].get_vocab_size(), [END])


def allowed(mask: np.ndarray[Any, Any]) -> list[int]:
    return [t for t in range(32 * len(mask)) if mask[t // 32] >> np.uint32(t % 32) & np.uint32(1)]


def drawn(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 400) -> str | None:
    """A text that follows the masks at random; None when it does not end in time."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(most):
        choices = allowed(matcher.mask())
        assert choices, "a grammar that is not complete always allows something"
        # A text that may end does, or strings grow without an end
        token = END if END in choices else int(rng.choice(choices))
        if token == END:
            text: str = tokenizer.decode(tokens, skip_special_tokens=False)
            return text
        tokens.append(token)
        matcher.advance([token])
    return None


FORMS: list[tuple[StructuredOutput, Any]] = [
    (StructuredOutput(choice=("yes", "no", 'with "quotes" and \\')), {"yes", "no", 'with "quotes" and \\'}),
    (StructuredOutput(regex=r"[A-C]{2}-[0-9]{3}"), re.compile(r"[A-C]{2}-[0-9]{3}")),
    (StructuredOutput(json={"enum": ["red", 3, None]}), lambda v: v in ("red", 3, None)),
    (StructuredOutput(json='{"type": "boolean"}'), lambda v: isinstance(v, bool)),
    (
        StructuredOutput(json={"type": "integer", "minimum": 5, "maximum": 17}),
        lambda v: isinstance(v, int) and 5 <= v <= 17,
    ),
    (
        StructuredOutput(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
        lambda v: len(v) in (2, 3) and all(isinstance(x, bool) for x in v),
    ),
    (
        StructuredOutput(
            json={
                "$defs": {
                    "leaf": {
                        "type": "object",
                        "properties": {"b": {"enum": [1, 2]}},
                        "required": ["b"],
                        "additionalProperties": False,
                    }
                },
                "type": "object",
                "properties": {"a": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        lambda v: list(v) == ["a"] and (v["a"] is None or v["a"]["b"] in (1, 2)),
    ),
    (StructuredOutput(grammar='start: "x" ("," "y")~2'), {"x,y,y"}),
    (StructuredOutput(grammar='root ::= "p" [0-9] "q"'), re.compile(r"p[0-9]q")),
]


@pytest.mark.parametrize(("form", "expected"), FORMS, ids=lambda x: "")
def test_what_masks_allow_is_of_the_form(
    grammars: Grammars, tokenizer: tuple[Path, Tokenizer], form: StructuredOutput, expected: Any
) -> None:
    texts = [drawn(grammars.matcher(form), tokenizer[1], seed) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 10
    for text in ended:
        if callable(expected):
            assert expected(json.loads(text)), text
        elif isinstance(expected, re.Pattern):
            assert expected.fullmatch(text), text
        else:
            assert text in expected


@pytest.mark.parametrize("form", [form for form, _ in FORMS], ids=lambda x: "")
def test_masks_along_drafts_are_those_that_come_with_the_tokens(grammars: Grammars, form: Any) -> None:
    rng = np.random.default_rng(5)
    slow, tokens = grammars.matcher(form), []
    masks = [slow.mask().copy()]
    while len(tokens) < 12 and (choices := [t for t in allowed(masks[-1]) if t != END]):
        tokens.append(int(rng.choice(choices)))
        slow.advance(tokens[-1:])
        masks.append(slow.mask().copy())
    quick = grammars.matcher(form)
    for i in range(len(tokens)):
        drafts = tokens[i : i + 4]
        along = quick.masks_along(drafts)
        assert (along == masks[i : i + len(along)]).all()
        assert len(along) == 1 + len(drafts)
        # Behind a draft that is wrong, or that ends the text, nobody goes on.
        forbidden = next(token for token in range(len(masks[i]) * 32) if token not in allowed(masks[i]))
        assert len(quick.masks_along([forbidden, *drafts])) == 1
        assert len(quick.masks_along([*drafts[:1], END, *drafts])) == 2
        assert (quick.mask() == masks[i]).all()
        quick.advance(drafts[:1])


def test_blanks_of_json_end_unless_the_schema_says_otherwise(
    grammars: Grammars, tokenizer: tuple[Path, Tokenizer]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    backend = tokenizer[1]
    begun, line = backend.encode('{"a":\n').ids, backend.encode("\n").ids[0]

    def may_go_on(schema: dict[str, Any]) -> bool:
        matcher = grammars.matcher(StructuredOutput(json=schema))
        matcher.mask()
        matcher.advance(begun)
        return line in allowed(matcher.mask())

    assert not may_go_on(schema)
    assert may_go_on({**schema, "x-guidance": {"whitespace_pattern": "\\n+"}})


def test_any_json_object_is_an_object(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    ended = [drawn(grammars.matcher(StructuredOutput(json_object=True)), tokenizer[1], s) for s in range(30)]
    found = [json.loads(text) for text in ended if text is not None]
    assert len(found) > 5
    assert all(isinstance(value, dict) for value in found)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "a(b"}, "regular expression cannot be used.*unclosed group"),
        ({"json": '{"type": "objekt"}'}, "JSON schema cannot be used"),
        ({"json": "{"}, "JSON schema cannot be used"),
        ({"json": '{"$ref": "#/$defs/nowhere"}'}, "JSON schema cannot be used"),
        ({"grammar": "start: nowhere"}, "grammar cannot be used.*nowhere"),
        ({"grammar": "%%%%"}, "grammar cannot be used"),
        ({"grammar": "start: start"}, "grammar"),
        ({"regex": r"[^\s\S]"}, "regular expression"),
        ({"json": '{"$ref": "#"}'}, "JSON schema"),
    ],
)
def test_a_wrong_form_is_refused_with_its_compilers_words(grammars: Grammars, form: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        grammars.matcher(StructuredOutput(**form))


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [1]},
        {"json": 5},
        {"json": {"a": float}},
        {"regex": "x" * 300_000},
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused_where_it_is_made(form: Any) -> None:
    with pytest.raises(RequestError):
        StructuredOutput(**form)


def test_min_tokens_and_a_form_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="min_tokens is 3; expected 0 with structured output"):
        SamplingParams(structured_output=StructuredOutput(choice=("a",)), min_tokens=3)


class _Wish:
    def __init__(self, request_id: int, num_output: int, tokens: list[int]) -> None:
        self.request_id, self.num_output, self.tokens = request_id, num_output, tokens
        self.drafts: list[int] = []


class _Core:
    """Hands out wishes once and keeps the answers."""

    def __init__(self, wishes: list[_Wish]) -> None:
        self.wishes, self.answers = wishes, {}

    def poll_masks(self, timeout: float) -> list[_Wish]:
        given, self.wishes = self.wishes, []
        return given

    def give_masks(self, request_id: int, num_output: int, num_drafts: int, masks: Any) -> None:
        assert (num_drafts, len(masks)) == (0, 1)
        self.answers[request_id] = (num_output, allowed(masks[0]))

    def refuse_mask(self, request_id: int, num_output: int, reason: str) -> None:
        self.answers[request_id] = (num_output, reason)


def test_one_grammar_that_fails_does_not_stop_the_others(
    grammars: Grammars, tokenizer: tuple[Path, Tokenizer]
) -> None:
    form = StructuredOutput(choice=("ab", "ac"))
    a, b, c = (tokenizer[1].token_to_id(x) for x in "abc")
    core = _Core([])
    thread = MaskThread(core)
    for request_id in (1, 2):
        assert thread.submit(grammars.matcher(form), lambda request_id=request_id: request_id) == request_id
    core.wishes = [_Wish(1, 1, [b]), _Wish(2, 1, [a]), _Wish(9, 1, [a])]
    wait_until(lambda: len(core.answers) == 2)
    thread.close()
    count, reason = core.answers[1]
    assert count == 1
    assert "grammar failed" in reason
    assert core.answers[2][0] == 1
    assert {b, c} <= set(core.answers[2][1])
    assert 9 not in core.answers


def test_a_grammar_at_its_limits_begins_the_second_text_as_the_first(grammars: Grammars) -> None:
    # Computing its first mask uses up what bounds its size, for all copies.
    wanted = StructuredOutput(regex="a{99999}{99999}")
    first = grammars.matcher(wanted).mask().copy()
    for _ in range(3):
        assert (grammars.matcher(wanted).mask() == first).all()
    assert allowed(first)
