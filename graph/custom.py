"""What a plugin adds to the graph: ops of its own domain, and the patterns or modules that become them.

Plain data; ``castiron.plugins.sdk`` shows it to plugin authors (docs/plugins.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx

from castiron.errors import BuildError

from .ops import DOMAIN

#: Sizes; "T" (tokens of a step) and "N" (rows of logits) stand for what is known only when a step runs.
Shape: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True)
class CustomOp:
    """An op of a plugin.

    Attributes:
        name: "domain.Op"; neither ONNX's nor castiron's own domain.
        inputs: operand names in order; a trailing "?" marks an optional one.
        shape: from the operands' shapes (None where absent), in order, and the attributes by name, to the
            shapes of the results.
        reference: from float32 numpy arrays (None where absent) and the attributes by name, to the result or
            a tuple of results: what the op means.
        attributes: name -> type (bool, int, float or str).
    """

    name: str
    inputs: tuple[str, ...]
    shape: Callable[..., Sequence[Shape]]
    reference: Callable[..., np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], ...]]
    attributes: Mapping[str, type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        domain, _, op = self.name.rpartition(".")
        if not op.isidentifier() or not domain or domain in (DOMAIN, "ai.onnx", "onnx"):
            raise BuildError(
                f"a plugin's op is named {self.name!r}; expected 'domain.Op' with a domain of its own"
            )

    @property
    def required(self) -> int:
        """Number of operands that must be present."""
        return sum(not name.endswith("?") for name in self.inputs)


@dataclass(frozen=True)
class Pattern:
    """A subgraph, and what takes its place.

    Attributes:
        name: for the build report.
        match: an onnxscript pattern: a function (op, value, ...) that writes the subgraph, such as
            ``lambda op, x: op.Mul(op.Activation(x, fn="silu", _domain="castiron"), x)``.
        replace: a function of the same values that writes the replacement.
        check: further conditions; an onnxscript condition function, or None.
    """

    name: str
    match: Callable[..., Any]
    replace: Callable[..., Any]
    check: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ModuleTakeover:
    """A module of the source model that becomes one op.

    Attributes:
        module: its class, with the Python module: "transformers.models.llama.modeling_llama.LlamaMLP".
        op: the op, with one result. Its operands are the tensors that the module's forward is called with, as
            packed rows [T, ...] without the batch axis, then the module's ``weights``.
        weights: names of parameters, such as "gate_proj.weight".
        attributes: of the op, from the module (a ``torch.nn.Module``).
    """

    module: str
    op: CustomOp
    weights: tuple[str, ...] = ()
    attributes: Callable[[Any], Mapping[str, bool | int | float | str]] = lambda module: {}


def check_custom_ops(model: onnx.ModelProto, ops: Mapping[str, CustomOp]) -> None:
    """Check every node of a foreign domain against its CustomOp: operands, attributes, shapes.

    Raises BuildError that names the node, what it has and what its op's definition expects.
    """
    shapes = _shapes(model)
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx", DOMAIN):
            continue
        name = f"{node.domain}.{node.op_type}"
        op = ops.get(name)
        if op is None:
            known = ", ".join(ops) or "none"
            raise BuildError(f"{node.name}: no plugin defines {name}; the plugins' ops are: {known}")
        given = [bool(operand) for operand in node.input]
        if len(given) > len(op.inputs) or not all(given[: op.required]) or len(given) < op.required:
            raise BuildError(f"{node.name}: {name}({', '.join(op.inputs)}) has {sum(given)} operands")
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        if set(attributes) != set(op.attributes):
            raise BuildError(
                f"{node.name}: {name} has the attributes {sorted(attributes)}; its definition has "
                f"{sorted(op.attributes)}"
            )
        operands = [shapes[operand] if operand else None for operand in node.input]
        _check_result(node, op, operands, attributes, [shapes[result] for result in node.output])


def _check_result(
    node: onnx.NodeProto,
    op: CustomOp,
    operands: Sequence[Shape | None],
    attributes: Mapping[str, Any],
    recorded: Sequence[Shape],
) -> None:
    padded = [*operands, *[None] * (len(op.inputs) - len(operands))]
    try:
        expected = [tuple(shape) for shape in op.shape(*padded, **attributes)]
    except Exception as error:
        raise BuildError(
            f"{node.name}: the shape rule of {op.name} failed on {padded}: {type(error).__name__}: {error}"
        ) from error
    if expected != list(recorded):
        raise BuildError(
            f"{node.name}: {op.name} on {padded} gives {expected} by its shape rule, but what it replaces "
            f"has the shape {list(recorded)}"
        )


def _shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    graph = model.graph
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes[value.name] = tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)
    return shapes
