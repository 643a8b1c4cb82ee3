"""Translation of the ops that plugins put in place of whole modules."""

from __future__ import annotations

import json
from typing import Any

from torch import fx

from .arguments import arguments
from .builder import Shape
from .emitter import Emitter


def _custom(e: Emitter, node: fx.Node) -> None:
    """The plugin's op sees packed rows: the batch axis, always one, is taken off around it."""
    a = arguments(node)
    domain, _, op = str(a["op"]).rpartition(".")
    attributes: dict[str, Any] = json.loads(a["attributes"])
    operands: list[str | None] = []
    for x in a["inputs"]:
        shape = e.shape(x)[1:]
        operands.append(e.temporary(x, "Reshape", [e.name(x), _target(e, shape)], shape, e.dtype(x)))
    operands += [e.name(w) for w in a["weights"]]
    shape = e.shape(node)
    rows = e.builder.node(
        op, operands, shape[1:], e.dtype(node), path=e.path(node), attributes=attributes, domain=domain
    )
    e.emit(node, "Reshape", rows, _target(e, shape))


def _target(e: Emitter, shape: Shape) -> str:
    return e.ints([-1 if isinstance(size, str) else size for size in shape])


CUSTOM = {"castiron.custom": _custom}
