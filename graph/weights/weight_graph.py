"""Weight expressions: values of the graph that depend on initializers only, evaluated row range by row range.

The graph keeps what combines checkpoint tensors before use (a fused QKV weight, a transposed Conv1D weight,
``1 + w``, the codes and scales of a quantized one) as nodes over initializers. ``WeightGraph`` tells which
values these are and gives each as a ``WeightExpr``, whose rows are read from the checkpoint when asked for,
so that packing a model of any size works in bounded memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from castiron.errors import BuildError

from .. import ops
from ..files import FileReader
from .exprs import (
    Cast,
    Concat,
    Constant,
    Elementwise,
    Gather,
    PickedRows,
    Reshape,
    Slice,
    Stored,
    Transpose,
    WeightExpr,
)
from .quantized import Dequantize, Quantize
from .unpack import Unpack

#: An op without a streaming rule is evaluated on whole tensors, up to this size.
MAX_WHOLE_BYTES: Final = 256 << 20

_ELEMENTWISE: Final[Mapping[str, np.ufunc]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Abs": np.abs,
}

#: Ops of the castiron domain that make weights of weights.
_OWN: Final = frozenset({"PickRows", "Unpack", "Quantize", "Dequantize"})


class WeightGraph:
    """The part of an ONNX graph that can be computed before any token is known."""

    def __init__(self, model: onnx.ModelProto, base_dir: Path | None = None) -> None:
        """Index the graph. ``base_dir`` resolves relative external-data locations."""
        self._files = FileReader()
        self._base_dir = base_dir
        self._opsets = {entry.domain: entry.version for entry in model.opset_import}
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes: dict[str, tuple[onnx.NodeProto, int]] = {}
        self._known: dict[str, WeightExpr] = {}
        self._constant = set(self._tensors) - {value.name for value in model.graph.input}
        for node in model.graph.node:  # ONNX keeps nodes in topological order
            if node.domain not in ("", "ai.onnx") and not _is_own(node):
                continue
            if all(name == "" or name in self._constant for name in node.input) and _is_function(node):
                for index, name in enumerate(node.output):
                    self._nodes[name] = (node, index)
                    self._constant.add(name)

    def is_weight(self, name: str) -> bool:
        """Whether the value depends on initializers only."""
        return name in self._constant

    def names(self) -> frozenset[str]:
        """All values that depend on initializers only."""
        return frozenset(self._constant)

    def expr(self, name: str) -> WeightExpr:
        """The value as an expression; ``BuildError`` if it depends on an input or has no streaming rule."""
        found = self._known.get(name)
        if found is None:
            if name in self._tensors:
                found = self._initializer(self._tensors[name])
            elif name in self._nodes:
                found = self._node(*self._nodes[name])
            else:
                raise BuildError(f"value {name!r} is not a weight: it depends on an input of the graph.")
            self._known[name] = found
        return found

    def value(self, name: str) -> npt.NDArray[Any]:
        """The whole value; for small things such as axes, shapes, scalars."""
        return self.expr(name).whole()

    def _initializer(self, tensor: onnx.TensorProto) -> WeightExpr:
        shape = tuple(tensor.dims)
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return Constant(tensor.name, numpy_helper.to_array(tensor))
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        fields = {entry.key: entry.value for entry in tensor.external_data}
        file = Path(fields["location"])
        if not file.is_absolute():
            if self._base_dir is None:
                raise BuildError(f"weight {tensor.name!r} lies in {file}; expected an absolute path.")
            file = self._base_dir / file
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        length = int(fields.get("length", expected))
        if length != expected:
            raise BuildError(
                f"weight {tensor.name!r} ({dtype} {shape}) refers to {length} bytes, expected {expected}."
            )
        return Stored(tensor.name, file, int(fields.get("offset", 0)), dtype, shape, self._files)

    def _node(self, node: onnx.NodeProto, index: int) -> WeightExpr:
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        inputs = [self.expr(name) for name in node.input if name]
        name = node.output[index]
        if _is_own(node):
            return _own(node, inputs)
        match node.op_type:
            case "Identity":
                return inputs[0]
            case "Cast":
                return Cast(inputs[0], np.dtype(helper.tensor_dtype_to_np_dtype(attrs["to"])))
            case "Concat":
                return Concat(inputs, _axis(attrs["axis"], inputs[0].ndim))
            case "Transpose" if inputs[0].ndim > 1:
                return Transpose(inputs[0], attrs.get("perm", range(inputs[0].ndim)[::-1]))
            case "Gather" if inputs[1].ndim <= 1:
                return _gather(inputs[0], inputs[1].whole(), _axis(attrs.get("axis", 0), inputs[0].ndim))
            case "Reshape":
                return Reshape(inputs[0], _target_shape(inputs[0].shape, inputs[1].whole(), attrs))
            case "Squeeze" | "Unsqueeze" | "Flatten":
                return Reshape(inputs[0], _small_reshape(node.op_type, inputs, attrs))
            case "Slice":
                return _slice(inputs)
            case "Split":
                return _split(inputs, attrs, index, len(node.output))
            case op if op in _ELEMENTWISE and inputs[0].dtype.kind not in "iu":
                return Elementwise(_ELEMENTWISE[op], inputs)
            case _:
                return self._whole(node, name, index)

    def _whole(self, node: onnx.NodeProto, name: str, index: int) -> WeightExpr:
        """Evaluate any other op by onnx's reference implementation, on small tensors."""
        from onnx.reference import ReferenceEvaluator

        inputs = {entry: self.expr(entry) for entry in node.input if entry}
        size = sum(expr.nbytes for expr in inputs.values())
        if size > MAX_WHOLE_BYTES:
            raise BuildError(
                f"weight {name!r} is computed by {node.op_type} from {size >> 20} MiB of weights, for which "
                f"there is no streaming rule (limit {MAX_WHOLE_BYTES >> 20} MiB). Express it by "
                "Concat, Slice, Split, Transpose, Reshape or arithmetic."
            )
        values = {entry: expr.whole() for entry, expr in inputs.items()}
        graph = helper.make_graph(
            [node],
            "weight",
            [
                helper.make_tensor_value_info(
                    entry, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
                )
                for entry, value in values.items()
            ],
            [onnx.ValueInfoProto(name=output) for output in node.output],
        )
        opsets = [helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]
        evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
        outputs: Any = evaluator.run(None, values)
        return Constant(name, np.asarray(outputs[index]))


def _is_own(node: onnx.NodeProto) -> bool:
    return node.domain == ops.DOMAIN and node.op_type in _OWN


def _own(node: onnx.NodeProto, inputs: Sequence[WeightExpr]) -> WeightExpr:
    attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    if node.op_type == "Unpack":
        return Unpack(inputs[0], attrs["layout"].decode())
    if node.op_type == "PickRows":
        return PickedRows(inputs[0], **attrs)
    make = Quantize if node.op_type == "Quantize" else Dequantize
    offset = inputs[2] if len(inputs) > 2 else None
    return make(inputs[0], inputs[1], offset, attrs["format"].decode(), attrs["group"])


def _is_function(node: onnx.NodeProto) -> bool:
    """Whether the inputs alone decide the output: no randomness, no body that sees outer values."""
    random = node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")
    return not random and not any(attr.HasField("g") for attr in node.attribute)


def _axis(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def _target_shape(
    shape: tuple[int, ...], target: npt.NDArray[Any], attrs: Mapping[str, Any]
) -> tuple[int, ...]:
    sizes = [int(size) for size in target]
    if not attrs.get("allowzero", 0):
        sizes = [shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    if -1 in sizes:
        rest = int(np.prod([size for size in sizes if size != -1], dtype=np.int64))
        sizes[sizes.index(-1)] = int(np.prod(shape, dtype=np.int64)) // max(1, rest)
    return tuple(sizes)


def _small_reshape(op: str, inputs: Sequence[WeightExpr], attrs: Mapping[str, Any]) -> tuple[int, ...]:
    shape = list(inputs[0].shape)
    if op == "Flatten":
        axis = _axis(attrs.get("axis", 1), len(shape))
        return (
            int(np.prod(shape[:axis], dtype=np.int64)),
            int(np.prod(shape[axis:], dtype=np.int64)),
        )
    axes = [int(axis) for axis in inputs[1].whole()] if len(inputs) > 1 else None
    if op == "Squeeze":
        drop = (
            {i for i, size in enumerate(shape) if size == 1}
            if axes is None
            else {_axis(axis, len(shape)) for axis in axes}
        )
        return tuple(size for i, size in enumerate(shape) if i not in drop)
    assert axes is not None  # ONNX requires axes for Unsqueeze
    for axis in sorted(_axis(axis, len(shape) + len(axes)) for axis in axes):
        shape.insert(axis, 1)
    return tuple(shape)


def _slice(inputs: Sequence[WeightExpr]) -> WeightExpr:
    data = inputs[0]
    starts, ends = inputs[1].whole(), inputs[2].whole()
    axes = inputs[3].whole() if len(inputs) > 3 else np.arange(len(starts))
    steps = inputs[4].whole() if len(inputs) > 4 else np.ones(len(starts), np.int64)
    slices = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # ONNX writes "to the very beginning" of a reversed slice as a huge negative end
        stop = None if step < 0 and end < -data.shape[int(axis)] else int(end)
        slices[_axis(int(axis), data.ndim)] = slice(int(start), stop, int(step))
    return Slice(data, slices)


def _gather(data: WeightExpr, indices: npt.NDArray[Any], axis: int) -> WeightExpr:
    indices = np.where(indices < 0, indices + data.shape[axis], indices)
    if indices.ndim == 1:
        return Gather(data, indices, axis)
    slices = [slice(None)] * data.ndim
    slices[axis] = slice(int(indices), int(indices) + 1)
    return Reshape(Slice(data, slices), [size for i, size in enumerate(data.shape) if i != axis])


def _split(inputs: Sequence[WeightExpr], attrs: Mapping[str, Any], index: int, outputs: int) -> WeightExpr:
    data = inputs[0]
    axis = _axis(attrs.get("axis", 0), data.ndim)
    if len(inputs) > 1:
        sizes = [int(size) for size in inputs[1].whole()]
    else:
        each = -(-data.shape[axis] // outputs)
        sizes = [each] * outputs
    start = sum(sizes[:index])
    slices = [slice(None)] * data.ndim
    slices[axis] = slice(start, min(start + sizes[index], data.shape[axis]))
    return Slice(data, slices)
