"""Llama 3.2 and 4: the whole answer is a Python list of calls, ``[weather(city='Rome'), time()]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from .parser import Parser
from .reader import Reading

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}
#: A call is parsed by Python's compiler, whose stack is not endless.
_MAX_DEPTH, _MAX_CALL = 48, 1 << 17
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)


class PythonicParser(Parser):
    """A call is known at its closing bracket, and only functions of the request are called."""

    _marked = False

    def _answer(self) -> Reading[None]:
        yield from self._calls_at_beginning(OPEN, self._list)

    def _list(self) -> Reading[None]:
        text = self._text
        if (yield from text.take("[")) is None:
            return
        while (yield from self._call()):
            if not (yield from self._sign(",")):
                yield from self._sign("]")
                yield from text.take(CLOSE)
                text.mark()
                break

    def _call(self) -> Reading[bool]:
        yield from self._text.blanks()
        place = self._text.place
        head = yield from self._text.before("(", most=128)
        if head is None or not self._callable(head[0].strip()):
            return False
        self._text.back(place)
        source = yield from self._balanced()
        call = None if source is None else _call_of(source)
        if call is None:
            return False
        self._whole_call(*call)
        return True

    def _balanced(self) -> Reading[str | None]:
        """Read to the bracket that closes the first one, strings left out."""
        text = self._text
        start, quote = text.place, ""
        closers: list[str] = []
        while True:
            c = yield from text.peek()
            if not c or text.place - start > _MAX_CALL or len(closers) > _MAX_DEPTH:
                return None
            text.step()
            if quote:
                if c == "\\":
                    if not (yield from text.peek()):
                        return None
                    text.step()
                elif c == quote:
                    quote = ""
            elif c in "\"'":
                quote = c
            elif c in _BRACKETS:
                closers.append(_BRACKETS[c])
            elif c in ")]}":
                if not closers or closers.pop() != c:
                    return None
                if not closers:
                    return text.raw[start:]


def _call_of(source: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of one call in Python's syntax; None where it is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes
            call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not (name := _NAME.match(source.strip())):
            return None
        arguments = {str(k.arg): _value(k.value) for k in call.keywords if k.arg is not None}
        json.dumps(arguments, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return (name[0], arguments) if len(arguments) == len(call.keywords) else None


def _value(node: ast.expr) -> Any:
    """A literal, with JSON's names for constants too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no string")
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
