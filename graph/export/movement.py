"""Translations of ops that move, cut, join or retype data, and of those that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from .arguments import arguments, axis, element_type, is_tensor, rank, refuse, static_size
from .builder import Shape
from .emitter import DTYPES, Emitter
from .routing import is_blank

_Handler = Callable[[Emitter, fx.Node], None]


def _same(e: Emitter, node: fx.Node) -> None:
    e.bind(node, e.name(node.all_input_nodes[0]))


def _dropout(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if a["train"] and a["p"]:
        raise refuse(e, node, "it drops values in evaluation mode")
    e.bind(node, e.name(a["input"]))


def _convert(e: Emitter, node: fx.Node) -> None:
    source = node.all_input_nodes[0]
    if element_type(source) is element_type(node):
        _same(e, node)
    else:
        e.emit(node, "Cast", e.name(source), to=e.dtype(node))


def reshape(e: Emitter, node: fx.Node, value: str) -> None:
    """Binds ``node`` to ``value`` in the node's shape."""
    shape = e.shape(node)
    if e.builder.shapes[value] == shape:
        e.bind(node, value)
        return
    symbols = [size for size in shape if isinstance(size, str)]
    if len(symbols) > 1:
        raise refuse(e, node, f"a shape with several symbols {shape}")
    e.emit(node, "Reshape", value, e.ints([-1 if isinstance(size, str) else size for size in shape]))


def _reshape(e: Emitter, node: fx.Node) -> None:
    reshape(e, node, e.name(node.all_input_nodes[0]))


def _unsqueeze(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    e.emit(node, "Unsqueeze", e.name(a["self"]), e.ints([a["dim"] % rank(node)]))


def _squeeze(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source, dims = a["self"], a.get("dim")
    if dims is None:
        reshape(e, node, e.name(source))
        return
    dims = [dims] if isinstance(dims, int) else dims
    axes = [axis(source, dim) for dim in dims if e.shape(source)[axis(source, dim)] == 1]
    if axes:
        e.emit(node, "Squeeze", e.name(source), e.ints(axes))
    else:
        _same(e, node)


def _permute(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source = a["self"]
    order = list(range(rank(source)))
    if "dims" in a:
        order = [axis(source, dim) for dim in a["dims"]]
    elif "dim0" in a:
        i, j = axis(source, a["dim0"]), axis(source, a["dim1"])
        order[i], order[j] = order[j], order[i]
    else:
        order.reverse()
    e.bind(node, e.permuted(node, e.name(source), order, e.shape(node)))


def _slice(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source = a["self"]
    dim = axis(source, a["dim"])
    if e.shape(source) == e.shape(node) and a["step"] == 1:
        _same(e, node)
        return
    size = static_size(e, node, source, dim)
    start, stop = (0 if a["start"] is None else a["start"]), (size if a["end"] is None else a["end"])
    bounds = [max(0, min(size, bound + size if bound < 0 else bound)) for bound in (start, stop)]
    e.emit(node, "Slice", e.name(source), *(e.ints([v]) for v in (*bounds, dim, a["step"])))


def _select(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source = a["self"]
    dim = axis(source, a["dim"])
    size = static_size(e, node, source, dim)
    value = e.name(source)
    if size != 1:
        start = a["index"] % size
        shape = (*e.shape(source)[:dim], 1, *e.shape(source)[dim + 1 :])
        operands = [value, *(e.ints([v]) for v in (start, start + 1, dim, 1))]
        value = e.temporary(node, "Slice", list(operands), shape, e.dtype(node))
    e.emit(node, "Squeeze", value, e.ints([dim]))


def _split(e: Emitter, node: fx.Node) -> None:
    """Binds the outputs of split, chunk and unbind as a list, read by getitem."""
    a = arguments(node)
    source = a["self"]
    dim = axis(source, a["dim"])
    static_size(e, node, source, dim)
    unbind = str(node.target).startswith("aten.unbind")
    pieces = [e.sizes(value.shape) for value in node.meta["val"]]
    cut = [(*piece[:dim], 1, *piece[dim:]) if unbind else piece for piece in pieces]
    sizes = [piece[dim] for piece in cut]
    dtype = e.dtype_of(node.meta["val"][0])
    outputs = e.builder.nodes(
        "Split",
        [e.float32(e.name(source)), e.ints([int(size) for size in sizes])],
        cut,
        dtype,
        path=e.path(node),
        attributes={"axis": dim},
    )
    if unbind:
        outputs = [
            e.temporary(node, "Squeeze", [output, e.ints([dim])], piece, dtype)
            for output, piece in zip(outputs, pieces, strict=True)
        ]
    e.bind_list(node, outputs)


def _getitem(e: Emitter, node: fx.Node) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    e.bind(node, e.names(source)[index])  # type: ignore[index]


def _concat(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    tensors: list[fx.Node] = a["tensors"]
    dim = axis(node, a["dim"])
    for tensor in tensors:
        static_size(e, node, tensor, dim)
    e.emit(node, "Concat", *(_as(e, node, tensor) for tensor in tensors), axis=dim)


def _stack(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    tensors: list[fx.Node] = a["tensors"]
    dim = axis(node, a["dim"])
    shape = (*e.shape(node)[:dim], 1, *e.shape(node)[dim + 1 :])
    parts = [
        e.temporary(node, "Unsqueeze", [_as(e, node, t), e.ints([dim])], shape, e.dtype(node))
        for t in tensors
    ]
    e.emit(node, "Concat", *parts, axis=dim)


def _as(e: Emitter, node: fx.Node, tensor: fx.Node) -> str:
    value = e.float32(e.name(tensor))
    if element_type(tensor) is element_type(node):
        return value
    return e.temporary(node, "Cast", [value], e.shape(tensor), e.dtype(node), to=e.dtype(node))


def _index(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source, indices = a["self"], a["indices"]
    places = [i for i, index in enumerate(indices) if index is not None]
    if len(places) != 1 or not is_tensor(indices[places[0]]):
        raise refuse(e, node, "only indexing by one tensor is translated")
    dim, index = places[0], indices[places[0]]
    if element_type(index) not in (torch.int64, torch.int32):
        raise refuse(e, node, "indexing by a mask has no fixed shape")
    if index.name != "logit_rows":
        static_size(e, node, source, dim)
    e.emit(node, "Gather", e.name(source), e.name(index), axis=dim)


def _index_select(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    static_size(e, node, a["self"], a["dim"])
    e.emit(node, "Gather", e.name(a["self"]), e.name(a["index"]), axis=axis(a["self"], a["dim"]))


def _gather(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    static_size(e, node, a["self"], a["dim"])
    e.emit(node, "GatherElements", e.name(a["self"]), e.name(a["index"]), axis=axis(a["self"], a["dim"]))


def _expand(e: Emitter, node: fx.Node) -> None:
    source = node.all_input_nodes[0]
    before, after = e.shape(source), e.shape(node)
    if before == after:
        _same(e, node)
        return
    # A symbolic size can only stand where the source already has it; 1 then leaves it alone.
    padded: Shape = (*[1] * (len(after) - len(before)), *before)
    if any(isinstance(new, str) and new != old for old, new in zip(padded, after, strict=True)):
        raise refuse(e, node, f"it repeats a value of shape {before} for every token ({after})")
    sizes = [1 if isinstance(size, str) else size for size in after]
    e.emit(node, "Expand", e.name(source), e.ints(sizes))


def _repeat_interleave(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if not isinstance(a["repeats"], int) or a["dim"] is None:
        raise refuse(e, node, "only a fixed number of repeats along one axis is translated")
    dim = axis(a["self"], a["dim"])
    size = static_size(e, node, a["self"], dim)
    rows = np.repeat(np.arange(size), a["repeats"]).tolist()
    e.emit(node, "Gather", e.name(a["self"]), e.ints(rows), axis=dim)


def _filled(e: Emitter, node: fx.Node) -> None:
    """Constants made in the model code: arange, zeros, ones, full, scalar_tensor and their *_like forms."""
    shape = e.shape(node)
    if is_blank(node):
        return  # the marks say what becomes of it
    if any(isinstance(size, str) for size in shape):
        raise refuse(
            e,
            node,
            f"a value of shape {shape} made from the number of tokens in the step (a position counter?); "
            f"positions must come from position_ids",
        )
    a: dict[str, Any] = arguments(node)
    dtype = element_type(node)
    if str(node.target).startswith("aten.arange"):
        tensor = torch.arange(a.get("start", 0), a["end"], a.get("step", 1), dtype=dtype)
    else:
        kind = str(node.target).split(".")[1].removeprefix("new_").removesuffix("_like")
        fill = {"zeros": 0, "ones": 1}.get(kind, a.get("fill_value", a.get("s")))
        tensor = torch.full(shape, fill, dtype=dtype)  # type: ignore[arg-type]
    if dtype not in DTYPES:
        raise refuse(e, node, f"a constant of type {dtype}")
    e.bind(node, e.builder.constant(tensor.numpy(), node.name))


MOVEMENT: dict[str, _Handler] = {
    "getitem": _getitem,
    "aten.dropout": _dropout,
    "aten.arange": _filled,
    "aten.full": _filled,
    "aten.zeros": _filled,
    "aten.ones": _filled,
    "aten.scalar_tensor": _filled,
    "aten.full_like": _filled,
    "aten.zeros_like": _filled,
    "aten.ones_like": _filled,
    "aten.new_zeros": _filled,
    "aten.new_ones": _filled,
    "aten.unsqueeze": _unsqueeze,
    "aten.slice": _slice,
    "aten.select": _select,
    "aten.cat": _concat,
    "aten.concat": _concat,
    "aten.stack": _stack,
    "aten.index": _index,
    "aten.index_select": _index_select,
    "aten.gather": _gather,
    "aten.repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("aten.clone", "aten.contiguous", "aten.detach", "aten.detach_", "aten.alias"), _same),
    **dict.fromkeys(("aten.lift_fresh_copy", "aten.positive"), _same),
    **dict.fromkeys(("aten.to", "aten._to_copy", "aten.type_as", "aten.float"), _convert),
    **dict.fromkeys(("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten"), _reshape),
    **dict.fromkeys(("aten.unflatten", "aten.view_as", "aten.reshape_as"), _reshape),
    **dict.fromkeys(("aten.squeeze",), _squeeze),
    **dict.fromkeys(("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.mT"), _permute),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"), _split),
    **dict.fromkeys(("aten.expand", "aten.expand_as", "aten.broadcast_to"), _expand),
}
