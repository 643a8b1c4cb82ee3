"""Values of a request's parameters: each becomes the type that is meant, or is refused by its name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from .request_errors import ParameterError

MAX_STRING_CHARS = 1024
MAX_LOGIT_BIAS = 1024


def shown(value: object) -> str:
    """A value of a request for a message, in at most 80 characters."""
    try:
        text = repr(value[:80] if isinstance(value, (list, tuple, str, bytes)) else value)
    except ValueError:  # Python writes no integer of thousands of digits
        holder = "" if isinstance(value, int) else f"a {type(value).__name__} with "
        text = f"{holder}an integer of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(name: str, found: object, expected: str) -> NoReturn:
    """Raise ParameterError that says what was found and what was expected."""
    raise ParameterError(f"{name} is {shown(found)}; expected {expected}", param=name)


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``, NumPy's ones included; floats and booleans are none."""
    if isinstance(value, bool):
        refuse(name, value, "an integer")
    try:
        number = operator.index(value)  # numpy integers too, floats not
    except TypeError:
        refuse(name, value, "an integer")
    if not low <= number <= high:
        refuse(name, value, f"an integer from {low} to {high}")
    return number


def as_number(name: str, value: Any, low: float, high: float) -> float:
    """A number from ``low`` to ``high``; NaN, booleans and texts are none."""
    if isinstance(value, (bool, str, bytes)):
        refuse(name, value, "a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        refuse(name, value, "a number")
    if math.isnan(number) or not low <= number <= high:
        refuse(name, value, f"a number from {low:g} to {high:g}")
    return number


def as_strings(name: str, value: str | Iterable[str] | None, most: int) -> tuple[str, ...]:
    """A string or several, at most ``most``, as a tuple; None is none."""
    if value is not None and (isinstance(value, Mapping) or not isinstance(value, Iterable)):
        refuse(name, value, "a string or a list of strings")
    strings: tuple[Any, ...] = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(strings) > most:
        refuse(name, strings, f"at most {most} strings")
    for s in strings:
        if not isinstance(s, str) or not 1 <= len(s) <= MAX_STRING_CHARS:
            refuse(name, s, f"a string of 1 to {MAX_STRING_CHARS} characters, or a list of such strings")
        check_unicode(name, s)
    return strings


def check_unicode(name: str, text: str) -> None:
    """Raise ParameterError for a string with half of a surrogate pair, which no UTF-8 can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name} has a lone surrogate ({text[error.start]!r}) at character {error.start}; expected "
            "Unicode text. Text from bytes that are no UTF-8 has such: decode them with errors='replace'",
            param=name,
        ) from None


def as_token_ids(name: str, value: Iterable[int] | None, most: int | None) -> tuple[int, ...]:
    """Token ids, at most ``most`` (None = any number); None is none."""
    if value is None:
        return ()
    if isinstance(value, (bool, str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        refuse(name, value, "a list of token ids")
    tokens = tuple(as_integer(name, t, 0, 2**31 - 1) for t in value)
    if most is not None and len(tokens) > most:
        refuse(name, tokens, f"at most {most} token ids")
    return tokens


def as_functions(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """A function or several, as a tuple."""
    functions = (value,) if callable(value) else value
    if not isinstance(functions, (list, tuple)) or not all(callable(f) for f in functions):
        refuse(name, value, "a function or a list of functions")
    return tuple(functions)


def as_logit_bias(value: Any) -> dict[int, float]:
    """{token id: number}, with ids that JSON made strings of."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse("logit_bias", value, "an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", value, f"at most {MAX_LOGIT_BIAS} token ids")
    bias = {}
    for token, number in value.items():
        # JSON has strings for keys only
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token[:12])
        bias[as_integer("logit_bias", token, 0, 2**31 - 1)] = as_number("logit_bias", number, -1e4, 1e4)
    return bias
