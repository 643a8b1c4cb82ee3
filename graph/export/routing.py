"""Translations of what routers of mixtures do: picking the largest, marking places, filling the others.

Masks stay numbers, one or nothing: targets compute on numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from .arguments import arguments, axis, element_type, is_tensor, refuse, static_size
from .emitter import DTYPES, Emitter

#: What leaves a mask of marks one: moves, and repetitions.
_MOVES = frozenset(
    f"aten.{op}"
    for op in ("unsqueeze", "expand", "reshape", "view", "flatten", "clone", "contiguous", "_unsafe_view")
)


def _name(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]


def _top_k(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source = a["self"]
    static_size(e, node, source, a["dim"])
    if not a["largest"]:
        raise refuse(e, node, "the smallest are not translated")
    outputs = e.builder.nodes(
        "TopK",
        [e.float32(e.name(source)), e.ints([a["k"]])],
        [e.sizes(value.shape) for value in node.meta["val"]],
        [e.dtype_of(value) for value in node.meta["val"]],
        path=e.path(node),
        attributes={"axis": axis(source, a["dim"])},
    )
    e.bind_list(node, outputs)


def is_blank(node: fx.Node) -> bool:
    """Whether a node makes zeros that marks are put into, and nothing else is done with them."""
    return _name(node) in ("aten.zeros_like", "aten.new_zeros", "aten.zeros") and all(
        _is_mark(user) for user in node.users
    )


def _is_mark(node: fx.Node) -> bool:
    """Whether a node puts ones at places along the last axis of zeros."""
    if _name(node) != "aten.scatter":
        return False
    a = arguments(node)
    rank = node.meta["val"].ndim
    return a.get("value") == 1 and a["dim"] % rank == rank - 1 and _name(a["self"]).startswith("aten.")


def _scatter(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if not _is_mark(node) or not is_blank(a["self"]):
        raise refuse(e, node, "only ones put at places of zeros are translated")
    width = static_size(e, node, node, a["dim"])
    e.emit_own(node, "MarkPlaces", e.name(a["index"]), width=width)


def _not(e: Emitter, node: fx.Node) -> None:
    if element_type(node) is not torch.bool:
        raise refuse(e, node, "bits of numbers are not translated")
    e.emit(node, "Not", e.name(arguments(node)["self"]))


def _marks_behind(mask: fx.Node) -> fx.Node | None:
    """The marks, as numbers, that ``mask`` is the negation of; None if it is something else."""
    if _name(mask) not in ("aten.bitwise_not", "aten.logical_not"):
        return None
    cast = arguments(mask)["self"]
    if _name(cast) not in ("aten.to", "aten._to_copy"):
        return None
    marks: fx.Node = cast.all_input_nodes[0]
    node = marks
    while _name(node) in _MOVES:
        node = node.all_input_nodes[0]
    return marks if _is_mark(node) else None


def _masked_fill(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    marks, value = _marks_behind(a["mask"]), a["value"]
    x, dtype = e.name(a["self"]), e.dtype(node)
    if marks is None:
        filled = e.name(value) if is_tensor(value) else e.scalar(value, DTYPES[element_type(node)])
        e.emit(node, "Where", e.name(a["mask"]), filled, x)
    elif value == -math.inf:  # the logarithm of a mark is 0, that of none is the value
        e.emit(node, "Add", x, e.temporary(node, "Log", [e.name(marks)], e.shape(marks), dtype))
    elif value == 0:
        e.emit(node, "Mul", x, e.name(marks))
    else:
        raise refuse(e, node, f"what is not marked becomes {value}; 0 and -inf are translated")


ROUTING: dict[str, Callable[[Emitter, fx.Node], None]] = {
    "aten.topk": _top_k,
    "aten.scatter": _scatter,
    "aten.bitwise_not": _not,
    "aten.masked_fill": _masked_fill,
}
