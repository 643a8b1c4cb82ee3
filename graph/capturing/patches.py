"""Temporary changes to other people's modules, undone in reverse order whatever happens."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

_ABSENT = object()


class Patches:
    """A context in which attributes and mapping entries may be replaced; leaving it restores them all."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def attribute(self, owner: object, name: str, value: object) -> None:
        """Sets ``owner.name``; an attribute that was only inherited becomes inherited again."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)

    def entry(self, mapping: dict[Any, Any], key: object, value: object) -> None:
        """Sets ``mapping[key]``."""
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        if before is _ABSENT:
            self._undo.callback(mapping.pop, key)
        else:
            self._undo.callback(mapping.__setitem__, key, before)
