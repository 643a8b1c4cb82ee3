"""The base of all parsers: text in pieces goes in, deltas come out, whatever the pieces are."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from ..tools import FUNCTION_NAME
from .deltas import CallArguments, CallBroken, CallStart, Content, Delta, Reasoning
from .json_scanner import JsonScanner, json_object
from .reader import Reading, TextReader

#: Names of functions with their JSON schemas, None = no parameters.
Functions: TypeAlias = Mapping[str, Mapping[str, Any] | None]


class Parser(ABC):
    """Splits a text into deltas. One for each output.

    Subclasses give ``_answer``, which reads ``self._text`` and calls ``_say``, ``_think`` and the like.
    Blanks at the end of content and of reasoning are held until more of the same follows, so that those
    around a call are left out.

    Args:
        functions: those that may be called, and the schemas of their parameters.
        only_known: a call of another function is content; else it is passed on, for the client to refuse.
    """

    #: Whether anything but the names of functions tells calls from content.
    _marked: ClassVar[bool] = True

    def __init__(self, functions: Functions | None = None, only_known: bool = False) -> None:
        self._functions = functions or {}
        self._only_known = only_known or not self._marked
        self._text = TextReader()
        self._found: list[Delta] = []
        self._blanks = ""
        self._thought_blanks = ""
        self._said = False
        self._ends_with_call = False
        self._calls = 0
        self._ids: set[str | None] = set()
        self._reading: Reading[None] | None = self._answer()
        self._go_on()

    def push(self, text: str) -> list[Delta]:
        """Add a piece of the text; returns what is now certain."""
        self._text.feed(text)
        self._go_on()
        return self._taken()

    def flush(self) -> list[Delta]:
        """The text is over; returns what is left."""
        self._text.end()
        self._go_on()
        if self._blanks and not self._ends_with_call:
            self._found.append(Content(self._blanks))
        return self._taken()

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Read the whole answer."""

    def _go_on(self) -> None:
        if self._reading is not None and next(self._reading, _OVER) is _OVER:
            self._reading = None

    def _taken(self) -> list[Delta]:
        taken, self._found = self._found, []
        return taken

    def _say(self, text: str) -> None:
        """Content."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            if self._calls and not self._said:
                shown = shown.lstrip()
            self._said, self._ends_with_call = True, False
            self._found.append(Content(shown))

    def _think(self, text: str) -> None:
        """Reasoning."""
        text = self._thought_blanks + text
        shown = text.rstrip()
        self._thought_blanks = text[len(shown) :]
        if shown:
            self._found.append(Reasoning(shown))

    def _give_up(self) -> None:
        """What has been read since the mark is no call: it is content."""
        self._say(self._text.raw)
        self._text.mark()

    def _calls_at_beginning(self, tag: str, calls: Callable[[], Reading[None]]) -> Reading[None]:
        """An answer whose calls nothing marks but that they come first in it, or behind ``tag``.

        Args:
            calls: reads calls at the cursor and moves the mark behind each.
        """
        text = self._text
        yield from text.blanks()
        self._give_up()
        yield from text.take(tag)
        tagged = True
        while tagged:
            text.mark()
            yield from text.blanks()
            yield from calls()
            self._give_up()
            tagged = (yield from text.until((tag,), self._say)) is not None

    def _to_call(self, outer: str, inner: str) -> Reading[bool]:
        """Read content up to ``inner``, which opens a call and may stand behind ``outer``; False at the
        end.
        """
        text = self._text
        while (marker := (yield from text.until((outer, inner), self._say))) is not None:
            text.mark_before(marker)
            if marker == inner:
                return True
            yield from text.blanks()
            if (yield from text.take(inner)) is not None:
                return True
            self._give_up()
        return False

    def _callable(self, name: str) -> bool:
        """Whether a call of this name is passed on as one."""
        known = not self._only_known or name in self._functions
        return known and FUNCTION_NAME.fullmatch(name) is not None

    def _start(self, name: str, id: str | None = None) -> int:
        self._ends_with_call = True
        index, self._calls = self._calls, self._calls + 1
        self._found.append(CallStart(index, name, None if id in self._ids else id))
        self._ids.add(id)
        return index

    def _break(self, index: int) -> None:
        """What has begun as a call is none, or does not end: all since the mark is content."""
        self._found.append(CallBroken(index, self._blanks + self._text.raw))
        self._blanks, self._said, self._ends_with_call = "", True, False
        self._text.mark()

    def _whole_call(self, name: str, arguments: dict[str, Any]) -> None:
        """A call that has been read to its end."""
        self._found.append(CallArguments(self._start(name), json.dumps(arguments)))
        self._text.mark()

    def _arguments(self, name: str, id: str | None = None) -> Reading[bool]:
        """A call whose arguments begin at the cursor; False where they are broken, which is then said."""
        index = self._start(name, id)
        pieces: list[str] = []

        def put(text: str) -> None:
            if text:
                pieces.append(text)
                self._found.append(CallArguments(index, text))

        complete = yield from self._text.json(JsonScanner(), put)
        if complete and json_object("".join(pieces)) is not None:
            return True
        self._break(index)
        return False

    def _call_object(self) -> Reading[bool]:
        """A call as one object at the cursor, ``{"name": ..., "arguments": {...}}``. False where it is none;
        what has been read since the mark is content then, or said to be broken.
        """
        text = self._text
        start = text.place
        name = yield from self._head()
        if name is not None:
            if not self._callable(name):
                self._give_up()
                return False
            if not (yield from self._arguments(name)):
                return False
            yield from self._rest_of_object()
            text.mark()
            return True
        text.back(start)
        return (yield from self._object_at_once())

    def _head(self) -> Reading[str | None]:
        """Read an object of the usual order up to the arguments; the name of the function."""
        text = self._text
        if not (yield from self._sign("{")):
            return None
        key = yield from text.take('"name"', '"type"')
        if key == '"type"':
            typed = (
                (yield from self._sign(":")) and (yield from self._quoted()) and (yield from self._sign(","))
            )
            key = (yield from text.take('"name"')) if typed else None
        if key is None or not (yield from self._sign(":")):
            return None
        name = yield from self._quoted()
        if name is None or not (yield from self._sign(",")):
            return None
        if (yield from text.take(*_ARGUMENTS)) is None or not (yield from self._sign(":")):
            return None
        return name if (yield from text.peek()) == "{" else None

    def _sign(self, sign: str) -> Reading[bool]:
        """Read a sign and the blanks around it."""
        yield from self._text.blanks()
        found = yield from self._text.take(sign)
        yield from self._text.blanks()
        return found is not None

    def _quoted(self) -> Reading[str | None]:
        if (yield from self._text.take('"')) is None:
            return None
        found = yield from self._text.before('"', most=128)
        return None if found is None else found[0]

    def _rest_of_object(self) -> Reading[None]:
        """Read what follows the arguments in their object, if it is well-formed."""
        place = self._text.place
        scanner = JsonScanner()
        scanner.feed("{")
        if not (yield from self._text.json(scanner, lambda _: None)):
            self._text.back(place)

    def _object_at_once(self) -> Reading[bool]:
        """A call whose fields are in another order, or whose arguments are in a string: known at its end."""
        text = self._text
        start = text.place
        hopeful = (yield from self._sign("{")) and (yield from text.take(*_FIRST_KEYS)) is not None
        if hopeful:
            text.back(start)
            yield from text.blanks()
            pieces: list[str] = []
            whole = yield from text.json(JsonScanner(), pieces.append)
            call = _call_of("".join(pieces)) if whole else None
            if call is not None and self._callable(call[0]):
                self._whole_call(*call)
                return True
        self._give_up()
        return False


_OVER = object()
#: Names of the field with the arguments: OpenAI's and Llama's.
_ARGUMENTS = ('"arguments"', '"parameters"')
_FIRST_KEYS = ('"name"', '"type"', '"id"', '"function"', *_ARGUMENTS)


def _call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    value = json_object(text)
    if value is None:
        return None
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name", function)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
