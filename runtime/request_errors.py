"""Refusals that callers tell apart: the server maps each to its own status."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from castiron.errors import RequestError


class ParameterError(RequestError):
    """One parameter of a request is of the wrong type or out of range; ``param`` names it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals inside speak of parameters as the caller does.

    Args:
        names: the caller's name for a parameter by its own; those that are the same may be left out.
    """
    try:
        yield
    except ParameterError as error:
        message = str(error)
        for own, name in names.items():
            # A name such as "n" or "stop" is a word as well, but not in front of a value.
            behind = r"\b" if "_" in own else r"(?= is | \()"
            message = re.sub(rf"(?<![\w-]){own}{behind}", name, message)
        error.args = (message,)
        error.param = names.get(error.param, error.param)
        raise


class ContextLengthError(ParameterError):
    """Prompt and new tokens together do not fit into the engine."""


class QueueFullError(RequestError):
    """The engine has as many waiting requests as it accepts; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AdapterError(RequestError):
    """A LoRA adapter that cannot be used: damaged, made for another model, or of a kind not supported."""


class AdapterNotFoundError(ParameterError):
    """A request names a LoRA adapter that is not loaded."""
