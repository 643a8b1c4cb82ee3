"""What parsers make of a model's text: pieces of content, of reasoning and of tool calls, and their sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks with."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function begins; ``index`` counts the calls of one answer, ``id`` is the model's own."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces joined are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The arguments of a call that had begun are none, or do not end; ``raw`` is the model's text for it."""

    index: int
    raw: str


Delta: TypeAlias = Content | Reasoning | CallStart | CallArguments | CallBroken


@dataclass(slots=True)
class Call:
    """A whole call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True)
class Message:
    """A whole answer: the sum of its deltas. What was no call after all is content."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add pieces, in order."""
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallStart):
                self.calls[delta.index] = Call(delta.name, id=delta.id)
            elif isinstance(delta, CallArguments):
                self.calls[delta.index].arguments += delta.text
            else:
                del self.calls[delta.index]
                self.content += delta.raw
