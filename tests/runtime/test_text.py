"""Stop strings: the matcher against a character-by-character definition."""

from __future__ import annotations

from castiron.runtime.text import ReasoningGate, StopMatcher
from hypothesis import given
from hypothesis import strategies as st


def by_definition(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The first character at which any stop string is complete ends the text; the longest one counts."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return (text[:end] if keep else text[: end - len(longest)]), longest
    return text, None


def run(pieces: list[str], stops: list[str], keep: bool) -> tuple[str, str | None, list[str]]:
    matcher, shown = StopMatcher(stops, keep), []
    for piece in pieces:
        result = matcher.push(piece)
        shown.append(result.text)
        if result.stop is not None:
            return "".join(shown), result.stop, shown
    shown.append(matcher.flush())
    return "".join(shown), None, shown


letters = st.text(alphabet="abé", min_size=0, max_size=4)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4)


@given(st.lists(letters, max_size=12), stop_lists, st.booleans())
def test_any_cut_into_pieces_gives_what_the_definition_says(pieces, stops, keep):
    text, stop, _ = run(pieces, stops, keep)
    assert (text, stop) == by_definition("".join(pieces), stops, keep)


@given(st.lists(letters, max_size=12), stop_lists)
def test_text_shown_before_the_end_never_has_to_be_taken_back(pieces, stops):
    final, _ = by_definition("".join(pieces), stops, False)
    _, _, shown = run(pieces, stops, False)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert final.startswith(so_far)


def test_a_stop_string_over_three_pieces_is_found_and_cut():
    assert run(["Hello <", "|e", "nd|> more"], ["<|end|>"], False)[:2] == ("Hello ", "<|end|>")


def test_text_that_only_looks_like_a_stop_string_comes_out_when_it_differs():
    assert run(["a <|e", "x"], ["<|end|>"], False)[2] == ["a ", "<|ex", ""]


def test_without_stop_strings_nothing_is_held_back():
    assert run(["a", "b"], [], False)[2] == ["a", "b", ""]


def reasoning_by_definition(text: str, opening: str) -> str:
    """All up to the first closing, if the text begins with the opening behind blanks."""
    if not text.lstrip().startswith(opening):
        return ""
    start = text.index(opening) + len(opening)
    at = text.find("</t>", start)
    return text if at < 0 else text[: at + len("</t>")]


@given(
    st.lists(st.sampled_from(["<t>", "</t>", "<", "t", ">", "/", " ", "\n", "a"]), max_size=12).map("".join),
    st.sampled_from(["<t>", ""]),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_reasoning_is_told_from_what_follows_however_the_text_is_cut(text, opening, cuts):
    places = sorted(min(cut, len(text)) for cut in cuts)
    gate = ReasoningGate(opening, "</t>")
    thought = rest = ""
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        inside, behind = gate.push(text[start:end])
        thought, rest = thought + inside, rest + behind
    rest += gate.flush()
    assert thought + rest == text
    assert thought == reasoning_by_definition(text, opening)
