"""Reading a quantization config: every field is understood, known to be irrelevant, or refused by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from castiron.errors import CheckpointError

_MISSING: Final = object()
_T = TypeVar("_T")


class Fields:
    """An object of a config file, read field by field.

    ``where`` names file and object in messages. ``finish`` refuses what nobody asked for: a field that is not
    understood may change what the numbers mean.
    """

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where}: found {values!r}; expected an object.")
        self.where = where
        self._values: dict[str, Any] = dict(values)
        self._left = set(self._values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """The field's value, null and absent alike ``default``."""
        self._left.discard(name)
        value = self._values.get(name)
        return default if value is None else value

    def choice(self, name: str, allowed: Sequence[_T], default: object = _MISSING) -> _T:
        """A value that is one of ``allowed``."""
        value = self.raw(name, None if default is _MISSING else default)
        for entry in allowed:
            if value == entry and type(value) is type(entry):
                return entry
        shown = ", ".join(map(repr, allowed))
        raise CheckpointError(f"{self.where}: {name} is {value!r}; this version reads {shown}.")

    def integer(self, name: str, default: object = _MISSING) -> int:
        """A whole number."""
        value = self.raw(name, None if default is _MISSING else default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; expected a whole number.")
        return value

    def flag(self, name: str, default: object = _MISSING) -> bool:
        """True or false."""
        return self.choice(name, (True, False), default)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, absent: empty."""
        value = self.raw(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; expected a list of names.")
        return tuple(value)

    def irrelevant(self, *names: str) -> None:
        """Fields that say how the checkpoint was made or is run elsewhere, and nothing about its numbers."""
        self._left.difference_update(names)

    def empty(self, *names: str) -> None:
        """Fields that must not be set: each would change what the numbers mean."""
        for name in names:
            value = self.raw(name)
            if value not in (None, False, [], {}, ""):
                raise CheckpointError(f"{self.where}: {name} is {value!r}, which this version does not read.")

    def finish(self) -> None:
        """Refuse fields that were not read."""
        unknown = sorted(name for name in self._left if self._values[name] is not None)
        if unknown:
            raise CheckpointError(
                f"{self.where}: unknown field {unknown[0]!r} ({self._values[unknown[0]]!r}); it may change "
                "what the stored numbers mean. Use a checkpoint without it."
            )


def names_module(pattern: str, module: str) -> bool:
    """Whether an entry of a list of modules means ``module``: its name, a part of it, a wildcard, ``re:``."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    parts, wanted = module.split("."), pattern.strip(".").split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def refuse_excluded(modules: Iterable[str], excluded: Sequence[str], where: str, name: str) -> None:
    """Refuse a list of unquantized modules that names one whose codes are stored."""
    for module in modules:
        pattern = next((entry for entry in excluded if names_module(entry, module)), None)
        if pattern is not None:
            raise CheckpointError(
                f"{where}: {name} lists {pattern!r} as not quantized, but {module!r} is stored as codes. "
                "Config and weights are of different checkpoints."
            )
