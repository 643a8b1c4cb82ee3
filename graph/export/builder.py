"""An ONNX graph under construction: unique names, every shape recorded, weights by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from castiron.errors import UnsupportedModelError

from .. import ops

#: Sizes of a value; a string names a symbol ("T") or an expression of symbols.
Shape = tuple[int | str, ...]
#: Largest constant that is inlined. Rotary tables of long-context models are the largest that occur.
_MAX_INLINE_BYTES = 256 << 20


class StoredTensor(Protocol):
    """What the graph needs to know of a checkpoint tensor (``graph.checkpoint.TensorInfo`` is one)."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""

    @property
    def file(self) -> Path:
        """The safetensors file, symlinks resolved."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Stored dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored shape."""

    @property
    def offset(self) -> int:
        """First byte in the file."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""


class GraphBuilder:
    """Collects nodes, initializers and shapes, and makes the model of them."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._values: dict[str, onnx.ValueInfoProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple[object, ...], str] = {}
        self._used: set[str] = set()
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """``name``, or ``name`` with the first free number behind it."""
        candidate, number = name, 1
        while candidate in self._used:
            candidate, number = f"{name}_{number}", number + 1
        self._used.add(candidate)
        return candidate

    def input(self, name: str, shape: Shape, dtype: int = TensorProto.INT64) -> str:
        """Declares a graph input."""
        self._used.add(name)
        self._record(name, shape, dtype)
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str | None],
        shape: Shape,
        dtype: int,
        *,
        path: str = "",
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> str:
        """Adds a node of one output and returns its name, ``path`` (the module's) followed by the op."""
        return self.nodes(op, inputs, [shape], dtype, path=path, attributes=attributes, domain=domain)[0]

    def nodes(
        self,
        op: str,
        inputs: Sequence[str | None],
        shapes: Sequence[Shape],
        dtype: int | Sequence[int],
        *,
        path: str = "",
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> list[str]:
        """Adds a node of several outputs, of one dtype or one each, and returns their names."""
        name = self.unique(f"{path}/{op}" if path else op)
        names = [name] if len(shapes) == 1 else [self.unique(f"{name}.{i}") for i in range(len(shapes))]
        operands = [operand or "" for operand in inputs]
        while operands and not operands[-1]:
            operands.pop()
        node = helper.make_node(op, operands, names, name=name, domain=domain, **(attributes or {}))
        self._nodes.append(node)
        dtypes = [dtype] * len(shapes) if isinstance(dtype, int) else dtype
        for output, shape, one in zip(names, shapes, dtypes, strict=True):
            self._record(output, shape, one)
        return names

    def constant(self, value: npt.NDArray[Any], name: str = "constant") -> str:
        """Inlines a small array; equal unnamed ones are shared."""
        if value.nbytes > _MAX_INLINE_BYTES:
            raise UnsupportedModelError(
                f"the model holds a computed table '{name}' of {value.nbytes >> 20} MiB; up to "
                f"{_MAX_INLINE_BYTES >> 20} MiB can be inlined in the graph"
            )
        key = (value.dtype.str, value.shape, value.tobytes()) if value.size <= 64 else (name,)
        if key not in self._constants:
            unique = self.unique(name)
            tensor = numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), unique)
            self._initializers[unique] = tensor
            self._record(unique, tuple(value.shape), tensor.data_type)
            self._constants[key] = unique
        return self._constants[key]

    def weight(self, stored: StoredTensor) -> str:
        """References a checkpoint tensor; a second reference is the same initializer."""
        if stored.name not in self._initializers:
            self._used.add(stored.name)
            tensor = TensorProto(name=stored.name, dims=stored.shape)
            tensor.data_type = helper.np_dtype_to_tensor_dtype(stored.dtype)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": str(stored.file), "offset": str(stored.offset), "length": str(stored.nbytes)}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
            self._initializers[stored.name] = tensor
            self._record(stored.name, tuple(stored.shape), tensor.data_type)
        return stored.name

    def model(self, output: str, name: str) -> onnx.ModelProto:
        """The model with ``output`` as ``logits``; what it does not need is left out."""
        needed, nodes = {output}, []
        for node in reversed(self._nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                nodes.append(node)
        nodes.reverse()
        nodes.append(helper.make_node("Identity", [output], [ops.LOGITS], name=ops.LOGITS))
        if nodes[-2].output[0] == output and list(nodes[-2].output) == [output]:
            nodes.pop()
            nodes[-1].output[0] = ops.LOGITS
        logits = helper.make_tensor_value_info(ops.LOGITS, self.dtypes[output], list(self.shapes[output]))
        inner = {value for node in nodes for value in node.output if value and value != ops.LOGITS}
        graph = helper.make_graph(
            nodes,
            name,
            self._inputs,
            [logits],
            initializer=[tensor for key, tensor in self._initializers.items() if key in needed],
            value_info=[self._values[value] for value in sorted(inner)],
        )
        imports = [helper.make_opsetid("", ops.OPSET), helper.make_opsetid(ops.DOMAIN, ops.DOMAIN_VERSION)]
        plugins = {node.domain for node in nodes} - {"", ops.DOMAIN}
        imports += [helper.make_opsetid(domain, 1) for domain in sorted(plugins)]
        # IR version 11 is what belongs to opset 23; newer ones are refused by older readers for no gain.
        return helper.make_model(graph, opset_imports=imports, ir_version=11, producer_name="castiron")

    def _record(self, name: str, shape: Shape, dtype: int) -> None:
        self.shapes[name] = shape
        self.dtypes[name] = dtype
        self._values[name] = helper.make_tensor_value_info(name, dtype, list(shape))
