"""What every pass needs to read and rewrite an onnx-graphsurgeon graph.

graphsurgeon is used for structure alone. Two of its habits are avoided: its ``toposort`` orders nodes by
depth (which would stretch every value's lifetime over a whole layer), and touching ``Constant.values`` of an
external tensor loads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]
from onnx_graphsurgeon.ir.tensor import LazyValues  # type: ignore[import-untyped]

from castiron.errors import BuildError

from ..custom import Pattern
from ..quant_plan import QuantPlan, TensorRef

# Its warnings (a missing package for colours, bfloat16 kept as it is) tell a user nothing.
gs.logger.G_LOGGER.severity = gs.logger.G_LOGGER.ERROR

CASTIRON = "castiron"
#: Inlined constants with more elements than this are not folded further: the graph stays small.
MAX_FOLDED_ELEMENTS = 1 << 22

Graph: TypeAlias = Any
Node: TypeAlias = Any
Tensor: TypeAlias = Any
Shape: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True)
class PassContext:
    """What passes may know about the engine to be built.

    ``max_seq_len``: positions run from 0 to ``max_seq_len - 1``; tables are evaluated for these.
    ``patterns``: of plugins, in the order of their registration. ``quantization``: empty leaves all as it is.
    """

    max_seq_len: int
    patterns: tuple[Pattern, ...] = ()
    quantization: QuantPlan = field(default_factory=QuantPlan)


def shape_of(tensor: Tensor) -> Shape:
    """Recorded shape; raises when capture left it out, since no pass may guess it."""
    if tensor.shape is None:
        raise BuildError(f"value {tensor.name!r} has no recorded shape; capture must record every shape")
    return tuple(tensor.shape)


def is_external(tensor: Tensor) -> bool:
    """Whether the tensor is a checkpoint tensor (external data that must stay unloaded)."""
    if not isinstance(tensor, gs.Constant) or not isinstance(tensor._values, LazyValues):
        return False
    proto = tensor._values.tensor
    return bool(proto.data_location == onnx.TensorProto.EXTERNAL)


def is_inline(tensor: Tensor) -> bool:
    """Whether the tensor is a constant whose numbers are in the graph."""
    return isinstance(tensor, gs.Constant) and not is_external(tensor)


def scalar_of(tensor: Tensor) -> float | None:
    """The number held by an inlined one-element constant, else None."""
    if is_inline(tensor) and math.prod(int(d) for d in shape_of(tensor)) == 1:
        return float(np.asarray(tensor.values).reshape(-1)[0])
    return None


def ints_of(tensor: Tensor) -> list[int] | None:
    """Integers of an inlined constant, else None."""
    if not is_inline(tensor):
        return None
    return [int(v) for v in np.asarray(tensor.values).reshape(-1)]


def producer(tensor: Tensor) -> Node | None:
    """The node that makes the tensor; None for graph inputs and constants."""
    return tensor.inputs[0] if tensor.inputs else None


def produced_by(tensor: Tensor, *ops: str) -> Node | None:
    """The tensor's producer if it is one of ``ops``, else None."""
    node = producer(tensor)
    return node if node is not None and node.op in ops else None


def optional_input(node: Node, index: int) -> Tensor | None:
    """Input ``index``, or None where it is absent or empty."""
    if index < len(node.inputs) and not node.inputs[index].is_empty():
        return node.inputs[index]
    return None


def rounding_of(node: Node) -> dict[str, Any]:
    """The attributes of a Linear or GatedLinear that say how it rounds x."""
    return {name: node.attrs[name] for name in ("x_format", "x_group", "x_scale") if name in node.attrs}


_MOVES_ROWS = ("Gather", "Slice", "Split", "Concat", "Reshape", "Identity", "PickRows", "Transpose")


def codes_of(weight: Tensor) -> tuple[str, int] | None:
    """(format, group) of a weight expression that is a quantized matrix, perhaps cut or rearranged."""
    node = producer(weight)
    while node is not None and node.op in _MOVES_ROWS:
        node = producer(node.inputs[0])
    if node is None or node.op != "Dequantize" or node.domain != CASTIRON:
        return None
    return str(node.attrs["format"]), int(node.attrs["group"])


def dtype_name(tensor: Tensor) -> str:
    """Numpy name of the element type ("float32", "int64", "bfloat16" ...)."""
    dtype = tensor.dtype
    if isinstance(dtype, int):  # graphsurgeon gives the ONNX enum for types that numpy lacks
        return str(onnx.TensorProto.DataType.Name(dtype)).lower()
    return str(np.dtype(dtype).name)


class Rewriter:
    """A graph under change: fresh names, node creation with recorded shapes, redirection of consumers."""

    def __init__(self, graph: Graph) -> None:
        self.adopt(graph)

    def adopt(self, graph: Graph) -> None:
        """Go on with another graph, one that a tool outside graphsurgeon has rewritten."""
        self.graph = graph
        self._names = set(graph.tensors().keys()) | {node.name for node in graph.nodes}
        self._stored: dict[str, Tensor] = {}

    def export(self) -> onnx.ModelProto:
        """The graph as an ONNX model with the castiron domain declared."""
        model = gs.export_onnx(self.graph, do_type_check=False)
        if not any(entry.domain == CASTIRON for entry in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid(CASTIRON, 1))
        assert isinstance(model, onnx.ModelProto)
        return model

    def fresh(self, hint: str) -> str:
        """A tensor name that is not taken yet."""
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}.{count}"
        self._names.add(name)
        return name

    def constant(self, values: np.ndarray[Any, Any] | Sequence[int], hint: str = "const") -> Tensor:
        """A new inlined constant; integer sequences become int64."""
        array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=np.int64)
        return gs.Constant(self.fresh(hint), np.ascontiguousarray(array))

    def stored(self, ref: TensorRef) -> Tensor:
        """The tensor of a file as an initializer that refers to it; the same one for the same name."""
        if ref.name not in self._stored:
            proto = onnx.TensorProto(name=self.fresh(ref.name), dims=ref.shape)
            proto.data_type = onnx.helper.np_dtype_to_tensor_dtype(ref.dtype)
            proto.data_location = onnx.TensorProto.EXTERNAL
            place = {"location": str(ref.file), "offset": str(ref.offset), "length": str(ref.nbytes)}
            for key, value in place.items():
                proto.external_data.add(key=key, value=value)
            self._stored[ref.name] = gs.Constant(proto.name, LazyValues(proto))
        return self._stored[ref.name]

    def op(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        shape: Sequence[int | str],
        *,
        attrs: dict[str, Any] | None = None,
        domain: str = "",
        dtype: Any = np.float32,
        hint: str | None = None,
    ) -> Tensor:
        """Append a node with one output and return that output. Absent inputs are given as None."""
        return self.op_n(op, inputs, [shape], attrs=attrs, domain=domain, dtype=dtype, hint=hint)[0]

    def op_n(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        shapes: Sequence[Sequence[int | str]],
        *,
        attrs: dict[str, Any] | None = None,
        domain: str = "",
        dtype: Any = np.float32,
        hint: str | None = None,
    ) -> list[Tensor]:
        """As ``op`` with one output per entry of ``shapes``."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        operands = [gs.Variable.empty() if t is None else t for t in given]
        stem = hint or op.lower()
        outputs = [gs.Variable(self.fresh(stem), dtype=dtype, shape=list(shape)) for shape in shapes]
        node = gs.Node(op, self.fresh(f"{stem}_node"), dict(attrs or {}), operands, outputs, domain or None)
        self.graph.nodes.append(node)
        return outputs

    def float32(self, tensor: Tensor) -> Tensor:
        """The tensor, or a Cast of it: standard ops want operands of one type."""
        if dtype_name(tensor) == "float32":
            return tensor
        to = {"to": int(onnx.TensorProto.FLOAT)}
        return self.op("Cast", [tensor], shape_of(tensor), attrs=to, hint=f"{tensor.name}.float32")

    def reshape(self, tensor: Tensor, shape: Sequence[int | str], hint: str = "reshape") -> Tensor:
        """Reshape to a recorded shape with at most one symbolic size."""
        if tuple(shape) == shape_of(tensor):
            return tensor
        target = self.constant(reshape_target(shape), "shape")
        return self.op("Reshape", [tensor, target], shape, dtype=tensor.dtype, hint=hint)

    def columns(self, tensor: Tensor, start: int, stop: int, hint: str) -> Tensor:
        """Columns [start, stop) of a two-dimensional value."""
        rows, width = shape_of(tensor)
        if start == 0 and stop == width:
            return tensor
        bounds = [self.constant([v], "bound") for v in (start, stop, 1, 1)]
        return self.op("Slice", [tensor, *bounds], [rows, stop - start], dtype=tensor.dtype, hint=hint)

    def pick_rows(self, tensor: Tensor, experts: int, start: int, count: int, step: int = 1) -> Tensor:
        """``count`` rows of every expert's matrix (elements of its bias) from ``start`` on, by ``step``."""
        cut = {"experts": experts, "start": start, "step": step, "count": count}
        shape = [experts * count, *shape_of(tensor)[1:]]
        name = f"{tensor.name}[{start}:{start + count}]" if step == 1 else f"{tensor.name}[{start}::{step}]"
        return self.op("PickRows", [tensor], shape, attrs=cut, domain=CASTIRON, dtype=tensor.dtype, hint=name)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Make every consumer of ``old`` read ``new``; graph outputs keep their name."""
        for consumer in list(old.outputs):
            for index, operand in enumerate(consumer.inputs):
                if operand is old:
                    consumer.inputs[index] = new
        for index, output in enumerate(self.graph.outputs):
            if output is old:
                if isinstance(new, gs.Constant) or any(
                    new is graph_input for graph_input in self.graph.inputs
                ):
                    new = self.op("Identity", [new], shape_of(new), dtype=new.dtype)
                name = old.name
                old.name, new.name = self.fresh(f"{name}.replaced"), name
                self.graph.outputs[index] = new

    def consumers(self, tensor: Tensor) -> list[Node]:
        """Nodes that read the tensor; a node that reads it twice appears once."""
        seen: list[Node] = []
        for node in tensor.outputs:
            if not any(node is other for other in seen):
                seen.append(node)
        return seen

    def is_output(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the graph's outputs."""
        return any(tensor is output for output in self.graph.outputs)

    def only_consumer(self, tensor: Tensor) -> Node | None:
        """The single node that reads the tensor (once), else None."""
        if self.is_output(tensor) or len(tensor.outputs) != 1:
            return None
        return tensor.outputs[0]

    def read_only_by(self, tensor: Tensor, node: Node) -> bool:
        """Whether ``node`` alone reads the tensor, once."""
        return self.only_consumer(tensor) is node

    def tidy(self) -> None:
        """Drop dead nodes and order the rest so that operands are made right before they are needed.

        Depth-first from the outputs: a value lives from its first possible to its last use, not longer,
        which is what the memory plan wants.
        """
        order: list[Node] = []
        done: set[int] = set()
        for output in self.graph.outputs:
            for node in _post_order(output, done):
                order.append(node)
        kept = {id(node) for node in order}
        for node in self.graph.nodes:
            if id(node) not in kept:
                node.inputs.clear()
                node.outputs.clear()
        self.graph.nodes = order


def _post_order(root: Tensor, done: set[int]) -> Iterator[Node]:
    # Iterative, since a deep model exceeds Python's recursion limit.
    stack: list[tuple[Node, Iterator[Tensor]]] = []
    active: set[int] = set()

    def enter(tensor: Tensor) -> None:
        node = producer(tensor)
        if node is None or id(node) in done:
            return
        if id(node) in active:
            raise BuildError(f"the graph has a cycle through node {node.name!r} ({node.op})")
        active.add(id(node))
        stack.append((node, iter(list(node.inputs))))

    enter(root)
    while stack:
        node, operands = stack[-1]
        tensor = next(operands, None)
        if tensor is not None:
            enter(tensor)
            continue
        stack.pop()
        active.discard(id(node))
        done.add(id(node))
        yield node


def reshape_target(shape: Iterable[int | str]) -> list[int]:
    """The constant operand of a Reshape to ``shape``: -1 stands for the one symbolic size."""
    target = [-1 if isinstance(dim, str) else int(dim) for dim in shape]
    if target.count(-1) > 1:
        raise BuildError(f"cannot reshape to {list(shape)}: more than one symbolic size")
    return target


def last_axis_range(tensor: Tensor) -> tuple[Tensor, int, int] | None:
    """(source, start, stop) if the tensor is a run of the source's last axis, made by Slice or Split."""
    node = producer(tensor)
    if node is None or not node.inputs:
        return None
    source = node.inputs[0]
    rank = len(shape_of(source))
    width = shape_of(source)[-1]
    if not isinstance(width, int):
        return None
    if node.op == "Split" and node.attrs.get("axis", 0) in (-1, rank - 1):
        start = 0
        for output in node.outputs:
            size = shape_of(output)[-1]
            assert isinstance(size, int)
            if output is tensor:
                return source, start, start + size
            start += size
    if node.op == "Slice":
        given = [ints_of(t) for t in node.inputs[1:]]
        if any(v is None or len(v) != 1 for v in given) or len(given) < 3:
            return None
        start, stop, axis = (given[0] or [0])[0], (given[1] or [0])[0], (given[2] or [0])[0]
        step = given[3][0] if len(given) > 3 and given[3] else 1
        if axis not in (-1, rank - 1) or step != 1:
            return None
        start, stop = start + width if start < 0 else start, stop + width if stop < 0 else stop
        return source, max(0, start), min(stop, width)
    return None


def weight_nodes(tensor: Tensor) -> bool:
    """Whether the tensor is a constant or computed from constants alone (a weight expression)."""
    stack, seen = [tensor], set()
    while stack:
        current = stack.pop()
        if id(current) in seen or isinstance(current, gs.Constant) or current.is_empty():
            continue
        seen.add(id(current))
        node = producer(current)
        if node is None:
            return False
        stack.extend(node.inputs)
    return True
