"""Stop strings on a stream of text: found across token borders, never shown by half, not in reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stopped:
    """What ``StopMatcher.push`` lets through, and the stop string that ended the text (None = goes on)."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces.

    The text ends where a stop string is first *complete*; of several that are complete at the same character
    the
    longest counts. So the result depends on the text alone, not on how it was cut into pieces. Characters
    that may still turn out to begin a stop string are held back until that is decided.

    Args:
        stops: non-empty strings; none = all text passes through at once.
        keep: leave the stop string in the text instead of cutting before it.
    """

    __slots__ = ("_held", "_keep", "_stops")

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""

    def push(self, piece: str) -> Stopped:
        """Add a piece of text; returns what can be shown now."""
        if not self._stops:
            return Stopped(piece)
        text = self._held + piece
        hits = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            end, start, stop = min(hits)
            self._held = ""
            return Stopped(text[: end if self._keep else start], stop)
        cut = len(text) - self._may_begin(text)
        self._held = text[cut:]
        return Stopped(text[:cut])

    def flush(self) -> str:
        """The text is over: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for k in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:k]):
                    longest = k
                    break
        return longest


class ReasoningGate:
    """Tells the reasoning at the beginning of a text, which arrives in pieces, from what follows it.

    Args:
        opening: what reasoning begins with, behind blanks; empty = the text begins inside it.
        closing: what it ends with.
    """

    __slots__ = ("_closing", "_held", "_opening", "_state")

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._state: Literal["undecided", "inside", "behind"] = "undecided" if opening else "inside"
        #: Undecided: all text so far. Inside: the end of what has passed, which the closing may begin in.
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """Add a piece; returns what is reasoning, and what is not. Text that may be either is held back."""
        if self._state == "behind":
            return "", piece
        if self._state == "undecided":
            piece, self._held = self._held + piece, ""
            begun = piece.lstrip()
            if len(begun) < len(self._opening) and self._opening.startswith(begun):
                self._held = piece
                return "", ""
            if not begun.startswith(self._opening):
                self._state = "behind"
                return "", piece
            self._state = "inside"
        seen = self._held + piece
        at = seen.find(self._closing)
        if at < 0:
            self._held = seen[max(0, len(seen) + 1 - len(self._closing)) :]
            return piece, ""
        end = at + len(self._closing) - len(self._held)
        self._state, self._held = "behind", ""
        return piece[:end], piece[end:]

    def flush(self) -> str:
        """The text is over: returns what was held back."""
        held = self._held if self._state == "undecided" else ""
        self._held = ""
        return held
