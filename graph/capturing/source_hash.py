"""Knowing the bodies of the functions that capture replaces by assertion rather than by probing.

A replaced function is one whose meaning the graph expresses otherwise (a mask factory, an attention written
out in a model file). If its body is not one that was read when the replacement was written, the replacement
might mean something else: the model is refused, not guessed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from castiron.errors import UnsupportedModelError

from .known_bodies import EXPAND_KV, KNOWN_BODIES


def body_hash(function: Callable[..., Any]) -> str:
    """Hash of a function's syntax tree; comments, docstring, formatting and Python version do not matter."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    definition = ast.parse(source).body[0]
    return hashlib.sha256("\n".join(_lines(definition)).encode()).hexdigest()[:16]


def body_name(function: Callable[..., Any]) -> str:
    """File and name of a function, as in the table of known bodies."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"


def check_body(function: Callable[..., Any]) -> None:
    """Raises UnsupportedModelError if ``function``'s body is none of the known ones."""
    import transformers

    name, found = body_name(function), body_hash(function)
    known = KNOWN_BODIES.get(name, frozenset({EXPAND_KV} if name.endswith(".expand_kv") else ()))
    if found not in known:
        raise UnsupportedModelError(
            f"{name} has a body that castiron does not know (hash {found}; known: "
            f"{', '.join(sorted(known)) or '-'}), so it cannot be replaced safely. Found transformers "
            f"{transformers.__version__}; install a version that castiron supports (5.24), or "
            f"report this model"
        )


def _lines(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        # Fields that came with later Python versions, and annotations, do not change what runs.
        if name in ("type_params", "type_comment", "kind", "returns", "annotation"):
            continue
        children = value if isinstance(value, list) else [value]
        if name == "body" and children and _is_docstring(children[0]):
            children = children[1:]
        for child in children:
            if isinstance(child, ast.AST):
                yield f"{name}:"
                yield from _lines(child)
            elif child is not None:
                yield f"{name}={child!r}"


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
