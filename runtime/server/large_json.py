"""JSON of large request bodies, read in steps between which other threads get their turn.

A C parser keeps the interpreter to itself from the first byte to the last: 10 MB of small lists are seconds
in which no stream gets a token, from whichever thread it is called. Here only scalars and runs of integers
are read in C.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BLANKS = re.compile(r"[ \t\n\r]*")
#: Integers with a comma behind each: the beginning of a list of token ids.
_INTEGERS = re.compile(r"(?:-?[0-9]{1,19}[ \t\n\r]*,[ \t\n\r]*){1,4096}")
#: What a reader of small bodies allows as well.
_MAX_DEPTH = 200
#: Of all but such runs: Python pays for each of them, and its garbage collector again.
MAX_VALUES = 1 << 18


class LongIntegerError(ValueError):
    """An integer of more digits than Python reads. ``field``: of the whole object, that it is in."""

    def __init__(self, field: str | None) -> None:
        super().__init__("an integer of thousands of digits")
        self.field = field


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text; to be called on a worker thread.

    Raises:
        LongIntegerError: it holds an integer that nobody means.
        ValueError: it is none, or holds more than ``MAX_VALUES``.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"invalid UTF-8 at byte {e.start}") from None
    return _Reader(text).whole()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._scalar = json.JSONDecoder().raw_decode
        self._at = 0
        self._depth = 0
        self._values = 0
        self._field: str | None = None

    def whole(self) -> Any:
        self._blanks()
        value = self._value()
        self._blanks()
        if self._at < len(self._text):
            raise self._expected("the end")
        return value

    def _value(self) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, lists of integers aside")
        sign = self._text[self._at : self._at + 1]
        if sign not in ("[", "{"):
            return self._scalar_value()
        if self._depth == _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
        self._at += 1
        self._depth += 1
        self._blanks()
        value = self._array() if sign == "[" else self._object()
        self._depth -= 1
        return value

    def _array(self) -> list[Any]:
        items: list[Any] = []
        if self._take("]"):
            return items
        while True:
            while run := _INTEGERS.match(self._text, self._at):
                try:
                    items += json.loads(f"[{run[0].rstrip()[:-1]}]")
                except json.JSONDecodeError:  # a zero before other digits
                    raise self._expected("integers") from None
                self._at = run.end()
            items.append(self._value())
            self._blanks()
            if self._take("]"):
                return items
            self._comma("a comma or ]")

    def _object(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._take("}"):
            return fields
        while True:
            if self._text[self._at : self._at + 1] != '"':
                raise self._expected("a name in quotes")
            name = self._scalar_value()
            if self._depth == 1:
                self._field = name
            self._blanks()
            if not self._take(":"):
                raise self._expected("a colon")
            self._blanks()
            fields[name] = self._value()
            self._blanks()
            if self._take("}"):
                return fields
            self._comma("a comma or }")

    def _scalar_value(self) -> Any:
        try:
            value, self._at = self._scalar(self._text, self._at)
        except json.JSONDecodeError as e:
            raise ValueError(f"{e.msg} at character {e.pos}") from None
        except ValueError:
            raise LongIntegerError(self._field) from None
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"half of a surrogate pair before character {self._at}") from None
        return value

    def _comma(self, expected: str) -> None:
        if not self._take(","):
            raise self._expected(expected)
        self._blanks()

    def _take(self, sign: str) -> bool:
        found = self._text.startswith(sign, self._at)
        self._at += found
        return found

    def _blanks(self) -> None:
        self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _expected(self, what: str) -> ValueError:
        return ValueError(f"expected {what} at character {self._at}")
