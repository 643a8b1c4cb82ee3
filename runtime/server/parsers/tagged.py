"""The base of parsers whose calls have each argument between tags, its text as it is."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import ClassVar

from .deltas import CallArguments
from .parser import Parser
from .reader import Reading
from .schema_types import ANY, argument_schemas, as_json, types_of

#: Of names of functions and arguments.
MAX_NAME = 128


class TaggedParser(Parser):
    """Makes JSON of such arguments: what is a text by its schema is passed on while it is written."""

    #: Ends the text of an argument.
    _value_end: ClassVar[str]
    #: A line break behind the opening tag and one before the closing are not of the text.
    _on_lines: ClassVar[bool]

    @abstractmethod
    def _key(self) -> Reading[str | None]:
        """Read up to the text of the next argument; its name, None where no other follows."""

    @abstractmethod
    def _closed(self) -> Reading[bool]:
        """Read the end of the call; False where something else stands there."""

    def _tagged_call(self, name: str) -> Reading[bool]:
        """A call at the first of its arguments; False where it is broken, which is then said."""
        index = self._start(name)
        schemas = argument_schemas(self._functions.get(name))
        keys: set[str] = set()
        while (key := (yield from self._key())) is not None and key not in keys:
            types = types_of(schemas[key]) if key in schemas else ANY
            self._found.append(CallArguments(index, f"{', ' if keys else '{'}{json.dumps(key)}: "))
            keys.add(key)
            if not (yield from self._value(index, types)):
                break
        else:
            if key is None and (yield from self._closed()):
                self._found.append(CallArguments(index, "}" if keys else "{}"))
                self._text.mark()
                return True
        self._break(index)
        return False

    def _value(self, index: int, types: frozenset[str]) -> Reading[bool]:
        """The text of an argument as JSON; False where it does not end."""
        inner = _Inner(self._on_lines)
        if types != {"string"}:
            pieces: list[str] = []
            ended = yield from self._text.until((self._value_end,), lambda t: pieces.append(inner.take(t)))
            self._found.append(CallArguments(index, as_json("".join(pieces), types)))
            return ended is not None

        def put(text: str) -> None:
            if more := inner.take(text):
                self._found.append(CallArguments(index, json.dumps(more, ensure_ascii=False)[1:-1]))

        self._found.append(CallArguments(index, '"'))
        ended = yield from self._text.until((self._value_end,), put)
        self._found.append(CallArguments(index, '"'))
        return ended is not None


class _Inner:
    """A text without the line breaks at its ends, where it is on lines of its own."""

    def __init__(self, on_lines: bool) -> None:
        self._on_lines = on_lines
        self._begun = False
        self._held = ""

    def take(self, text: str) -> str:
        """The next piece, without a line break at its end that may be the last character."""
        if not self._on_lines or not text:
            return text
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
