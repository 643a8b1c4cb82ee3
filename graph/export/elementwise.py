"""Translations of ops that work element by element or along an axis of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto
from torch import fx

from .arguments import arguments, axis, element_type, is_tensor, refuse, static_size
from .emitter import DTYPES, Emitter

_Handler = Callable[[Emitter, fx.Node], None]


def _operand(e: Emitter, node: fx.Node, value: Any, dtype: torch.dtype) -> str:
    """A tensor or number as an operand of element type ``dtype`` (torch promotes, ONNX does not)."""
    if not is_tensor(value):
        if not isinstance(value, (int, float, bool)):
            raise refuse(e, node, f"its operand {value} depends on the number of tokens")
        return e.scalar(value, DTYPES[dtype])
    name = e.float32(e.name(value))
    if element_type(value) is dtype:
        return name
    return e.temporary(node, "Cast", [name], e.shape(value), DTYPES[dtype], to=DTYPES[dtype])


def _binary(op: str, first: str = "self", second: str = "other") -> _Handler:
    def handler(e: Emitter, node: fx.Node) -> None:
        a = arguments(node)
        dtype = element_type(node)
        left, right = _operand(e, node, a[first], dtype), _operand(e, node, a[second], dtype)
        alpha = a.get("alpha", 1)
        if alpha != 1:
            scaled = a[second]
            if not is_tensor(scaled):
                raise refuse(e, node, "alpha with a number as operand")
            right = e.temporary(
                node, "Mul", [right, e.scalar(alpha, DTYPES[dtype])], e.shape(scaled), DTYPES[dtype]
            )
        if a.get("rounding_mode") is not None:
            raise refuse(e, node, "rounded division is not translated")
        e.emit(node, op, left, right)

    return handler


def _comparison(op: str, negated: bool = False) -> _Handler:
    def handler(e: Emitter, node: fx.Node) -> None:
        a = arguments(node)
        dtype = torch.result_type(
            *(value.meta["val"] if is_tensor(value) else value for value in (a["self"], a["other"]))
        )
        operands = [_operand(e, node, a[name], dtype) for name in ("self", "other")]
        if not negated:
            e.emit(node, op, *operands)
            return
        inner = e.temporary(node, op, list(operands), e.shape(node), TensorProto.BOOL)
        e.emit(node, "Not", inner)

    return handler


def _unary(op: str) -> _Handler:
    def handler(e: Emitter, node: fx.Node) -> None:
        value = arguments(node)["self"]
        e.emit(node, op, _operand(e, node, value, element_type(node)))

    return handler


def _activation(fn: str) -> _Handler:
    def handler(e: Emitter, node: fx.Node) -> None:
        e.emit_own(node, "Activation", e.name(arguments(node)["self"]), fn=fn)

    return handler


def _gelu(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    fn = "gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf"
    e.emit_own(node, "Activation", e.name(a["self"]), fn=fn)


def _rsqrt(e: Emitter, node: fx.Node) -> None:
    value = e.name(arguments(node)["self"])
    root = e.temporary(node, "Sqrt", [value], e.shape(node), e.dtype(node))
    e.emit(node, "Reciprocal", root)


def _square(e: Emitter, node: fx.Node) -> None:
    value = e.name(arguments(node)["self"])
    e.emit(node, "Mul", value, value)


def _softplus(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if a["beta"] != 1:
        raise refuse(e, node, "softplus with beta != 1 is not translated")
    e.emit(node, "Softplus", e.name(a["self"]))


def _clamp(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if any(is_tensor(a[bound]) for bound in ("min", "max")):
        raise refuse(e, node, "bounds that are tensors are not translated")
    bounds = [None if a[name] is None else e.scalar(a[name], e.dtype(node)) for name in ("min", "max")]
    e.emit(node, "Clip", e.name(a["self"]), *bounds)


def _where(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    dtype = element_type(node)
    chosen = [_operand(e, node, a[name], dtype) for name in ("self", "other")]
    e.emit(node, "Where", e.name(a["condition"]), *chosen)


def _softmax(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    source = a["self"]
    static_size(e, node, source, a["dim"])
    e.emit(node, "Softmax", _operand(e, node, source, element_type(node)), axis=axis(source, a["dim"]))


def _reduce(op: str) -> _Handler:
    def handler(e: Emitter, node: fx.Node) -> None:
        a = arguments(node)
        source, dims = a["self"], a.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        if not dims:
            raise refuse(e, node, "it reduces over every axis, the token axis among them")
        for dim in dims:
            static_size(e, node, source, dim)
        axes = e.ints([axis(source, dim) for dim in dims])
        value = _operand(e, node, source, element_type(node))
        e.emit(node, op, value, axes, keepdims=int(a["keepdim"]))

    return handler


ELEMENTWISE: dict[str, _Handler] = {
    "aten.add": _binary("Add"),
    "aten.sub": _binary("Sub"),
    "aten.rsub": _binary("Sub", "other", "self"),
    "aten.mul": _binary("Mul"),
    "aten.div": _binary("Div"),
    "aten.true_divide": _binary("Div"),
    "aten.pow": _binary("Pow", "self", "exponent"),
    "aten.maximum": _binary("Max"),
    "aten.minimum": _binary("Min"),
    "aten.logical_and": _binary("And"),
    "aten.logical_or": _binary("Or"),
    "aten.eq": _comparison("Equal"),
    "aten.ne": _comparison("Equal", negated=True),
    "aten.lt": _comparison("Less"),
    "aten.le": _comparison("LessOrEqual"),
    "aten.gt": _comparison("Greater"),
    "aten.ge": _comparison("GreaterOrEqual"),
    "aten.neg": _unary("Neg"),
    "aten.abs": _unary("Abs"),
    "aten.exp": _unary("Exp"),
    "aten.log": _unary("Log"),
    "aten.sqrt": _unary("Sqrt"),
    "aten.reciprocal": _unary("Reciprocal"),
    "aten.sin": _unary("Sin"),
    "aten.cos": _unary("Cos"),
    "aten.erf": _unary("Erf"),
    "aten.floor": _unary("Floor"),
    "aten.logical_not": _unary("Not"),
    "aten.rsqrt": _rsqrt,
    "aten.square": _square,
    "aten.softplus": _softplus,
    "aten.clamp": _clamp,
    "aten.where": _where,
    "aten.softmax": _softmax,
    "aten.mean": _reduce("ReduceMean"),
    "aten.sum": _reduce("ReduceSum"),
    "aten.amax": _reduce("ReduceMax"),
    "aten.silu": _activation("silu"),
    "aten.relu": _activation("relu"),
    "aten.tanh": _activation("tanh"),
    "aten.sigmoid": _activation("sigmoid"),
    "aten.gelu": _gelu,
}
