"""From the exported torch program to the ONNX graph: one walk over the FX nodes that reach the logits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from castiron.errors import CheckpointError, UnsupportedModelError

from .. import ops
from .builder import GraphBuilder, Shape, StoredTensor

#: torch dtype -> ONNX element type of the values that may occur.
DTYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}

#: Parameter or persistent buffer name -> the checkpoint tensor that holds it; raises CheckpointError.
Resolve = Callable[[str], StoredTensor]


class Emitter:
    """State of one translation: FX node -> ONNX value name, and the graph being built.

    ``used`` collects the stored names that the graph refers to.
    """

    def __init__(self, program: ExportedProgram, resolve: Resolve) -> None:
        self.builder = GraphBuilder()
        self.program = program
        self.used: set[str] = set()
        self._resolve = resolve
        self._names: dict[fx.Node, str] = {}
        self._lists: dict[fx.Node, list[str]] = {}
        self._transposes: dict[str, tuple[str, list[int]]] = {}
        self._symbols: dict[str, str] = {}
        self._held: Mapping[str, Any] = {**dict(program.named_buffers()), **program.constants}
        self._specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        # What is written as an operand of a std op, by initializer: Cast to float32 once, not per use.
        self._casts: dict[str, str] = {}

    # -- values ----------------------------------------------------------------------------------------------

    def name(self, node: fx.Node) -> str:
        """The ONNX value of a translated node; parameters and buffers are declared when first needed."""
        if node not in self._names:
            if node.op != "placeholder":
                raise AssertionError(f"{node} is used before it is translated")
            self._names[node] = self._declare(node)
        return self._names[node]

    def bind(self, node: fx.Node, value: str) -> None:
        """Says that ``node``'s value is the ONNX value ``value``."""
        self._names[node] = value

    def bind_list(self, node: fx.Node, values: list[str]) -> None:
        """Says that ``node`` is the list of these ONNX values."""
        self._lists[node] = values

    def names(self, node: fx.Node) -> list[str]:
        """The ONNX values of a node that is a list."""
        return self._lists[node]

    def permuted(self, node: fx.Node, value: str, order: list[int], shape: Shape) -> str:
        """``value`` with its axes in ``order``. Transposes of transposes are merged, identities dropped."""
        source, before = self._transposes.get(value, (value, list(range(len(order)))))
        order = [before[axis] for axis in order]
        if order == sorted(order):
            return source
        result = self.builder.node(
            "Transpose",
            [self.float32(source)],
            shape,
            self.dtype(node),
            path=self.path(node),
            attributes={"perm": order},
        )
        self._transposes[result] = (source, order)
        return result

    def float32(self, value: str) -> str:
        """``value`` for a std op: a weight stored in another float type gets a Cast (a weight expression)."""
        if self.builder.dtypes[value] in DTYPES.values():
            return value
        if value not in self._casts:
            shape = self.builder.shapes[value]
            self._casts[value] = self.builder.node(
                "Cast", [value], shape, TensorProto.FLOAT, path=value, attributes={"to": TensorProto.FLOAT}
            )
        return self._casts[value]

    def shape(self, node: fx.Node) -> Shape:
        """Sizes of the node's tensor, with the graph's symbols."""
        return self.sizes(node.meta["val"].shape)

    def sizes(self, sizes: Any) -> Shape:
        """Sizes with the graph's symbols in place of torch's."""
        return tuple(size if isinstance(size, int) else self._symbol(size) for size in sizes)

    def _symbol(self, size: Any) -> int | str:
        text = re.sub(r"[su]\d+", lambda m: self._symbols.get(m[0], m[0]), str(size))
        return int(text) if text.isdigit() else text

    def dtype(self, node: fx.Node) -> int:
        """ONNX element type of the node's tensor."""
        return self.dtype_of(node.meta["val"])

    def dtype_of(self, tensor: Tensor) -> int:
        """ONNX element type of a tensor."""
        if tensor.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"the model computes in {tensor.dtype}, which the graph does not have"
            )
        return DTYPES[tensor.dtype]

    def path(self, node: fx.Node) -> str:
        """The Hugging Face module path of a node, as model/layers.0/self_attn/q_proj."""
        if node.op == "placeholder" and self._specs[node.name].target:
            # A weight expression belongs to its parameter.
            return _slashed(self.stored_name(str(self._specs[node.name].target)))
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0] if stack else ""
        path = path.removeprefix("model").removeprefix(".")
        return _slashed(path)

    # -- nodes -----------------------------------------------------------------------------------------------

    def emit(self, node: fx.Node, op: str, *inputs: str | None, **attributes: Any) -> str:
        """Adds a standard op that computes ``node`` and binds it."""
        operands = [None if value is None else self.float32(value) for value in inputs]
        value = self.builder.node(
            op, operands, self.shape(node), self.dtype(node), path=self.path(node), attributes=attributes
        )
        self.bind(node, value)
        return value

    def emit_own(self, node: fx.Node, op: str, *inputs: str | None, **attributes: Any) -> str:
        """Adds an op of the castiron domain that computes ``node`` and binds it."""
        value = self.builder.node(
            op,
            inputs,
            self.shape(node),
            self.dtype(node),
            path=self.path(node),
            attributes=attributes,
            domain=ops.DOMAIN,
        )
        self.bind(node, value)
        return value

    def temporary(
        self, node: fx.Node, op: str, inputs: list[str | None], shape: Shape, dtype: int, **attributes: Any
    ) -> str:
        """Adds a standard op in front of the one that computes ``node``."""
        operands = [None if value is None else self.float32(value) for value in inputs]
        return self.builder.node(op, operands, shape, dtype, path=self.path(node), attributes=attributes)

    def ints(self, values: list[int]) -> str:
        """An int64 constant."""
        return self.builder.constant(np.array(values, np.int64), "ints")

    def scalar(self, value: float | int | bool, dtype: int) -> str:
        """A 0-dimensional constant of an ONNX element type."""
        numpy_types: dict[int, type] = {
            TensorProto.FLOAT: np.float32,
            TensorProto.DOUBLE: np.float64,
            TensorProto.INT64: np.int64,
            TensorProto.INT32: np.int32,
            TensorProto.BOOL: np.bool_,
        }
        return self.builder.constant(np.array(value, numpy_types[dtype]), "scalar")

    # -- parameters and buffers ----------------------------------------------------------------------------

    def declare_inputs(self) -> None:
        """Declares the three graph inputs and learns which torch symbols T and N are."""
        symbols = {ops.TOKEN_IDS: ops.TOKENS, ops.POSITIONS: ops.TOKENS, ops.LOGIT_ROWS: ops.ROWS}
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and self._specs[node.name].kind is InputKind.USER_INPUT:
                symbol = symbols[node.name]
                size = node.meta["val"].shape[0]
                if isinstance(size, int):
                    raise UnsupportedModelError(
                        f"the model fixes the size of {node.name} to {size}: its code depends on the "
                        f"number of tokens in a way that cannot be served for other lengths"
                    )
                self._symbols[str(size)] = symbol
                self.bind(node, self.builder.input(node.name, (symbol,)))

    def stored_name(self, target: str) -> str:
        """A parameter's name in the Hugging Face model (without the wrapper's prefix)."""
        return target.removeprefix("model.")

    def _declare(self, node: fx.Node) -> str:
        spec = self._specs[node.name]
        target = spec.target or node.name
        stored = self._stored(spec.kind, bool(spec.persistent), self.stored_name(target))
        if stored is not None:
            if tuple(stored.shape) != tuple(node.meta["val"].shape):
                raise CheckpointError(
                    f"tensor '{stored.name}' has shape {list(stored.shape)} in {stored.file.name}; the model "
                    f"built from config.json expects {list(node.meta['val'].shape)}. Config and weights do "
                    f"not belong together"
                )
            self.used.add(stored.name)
            return self.builder.weight(stored)
        held: Tensor = self._held[target]
        return self.builder.constant(held.detach().cpu().numpy(), self.stored_name(target))

    def _stored(self, kind: InputKind, persistent: bool, name: str) -> StoredTensor | None:
        if kind is InputKind.PARAMETER:
            return self._resolve(name)
        if kind is InputKind.BUFFER and persistent:
            # Savers of all times disagree about buffers; the model computes the ones that are not stored.
            with contextlib.suppress(CheckpointError):
                return self._resolve(name)
        return None


def _slashed(path: str) -> str:
    """model.layers.0.mlp -> model/layers.0/mlp: a layer's number belongs to its list."""
    return re.sub(r"\.(?!\d+(\.|$))", "/", path)
