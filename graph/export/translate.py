"""The walk over the exported program, and what comes out of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import onnx
from torch import fx
from torch.export import ExportedProgram

from castiron.errors import UnsupportedModelError

from .. import ops
from .arguments import is_tensor
from .custom import CUSTOM
from .elementwise import ELEMENTWISE
from .emitter import Emitter, Resolve
from .functional import functional
from .linear import LINEAR
from .movement import MOVEMENT
from .routing import ROUTING

_HANDLERS = {**ELEMENTWISE, **LINEAR, **MOVEMENT, **ROUTING, **CUSTOM}


@dataclass(frozen=True)
class Emitted:
    """The ONNX model, and the stored names of the tensors it refers to."""

    model: onnx.ModelProto
    used: frozenset[str]


def emit(program: ExportedProgram, resolve: Resolve, name: str) -> Emitted:
    """Translates an exported PackedCausalLM into the graph vocabulary.

    Raises UnsupportedModelError for an op without a translation (naming module and op) and for one that mixes
    tokens outside attention; CheckpointError where ``resolve`` finds no tensor or one of another shape.
    """
    program = functional(program)
    emitter = Emitter(program, resolve)
    emitter.declare_inputs()
    (output,) = next(node for node in reversed(program.graph.nodes) if node.op == "output").args[0]
    for node in _live(output):
        if node.op != "call_function":
            continue
        handler = _HANDLERS.get(_op_name(node))
        if handler is None:
            raise UnsupportedModelError(
                f"{emitter.path(node) or 'the model'} computes {node.target}, which castiron's graph has no "
                f"translation for"
            )
        handler(emitter, node)
    logits = emitter.name(output)
    if emitter.builder.shapes[logits][0] != ops.ROWS:
        raise UnsupportedModelError(
            f"the logits have shape {emitter.builder.shapes[logits]}, expected [N, vocab]"
        )
    model = emitter.builder.model(logits, name)
    _check_token_axis(model)
    return Emitted(model, frozenset(emitter.used))


def _op_name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    # aten.add.Tensor and aten.add.Scalar mean the same; the overload is told by the arguments.
    return str(node.target).rpartition(".")[0]


def _live(output: fx.Node) -> list[fx.Node]:
    """Nodes that the output depends on through tensors, in graph order."""
    live: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        # Sizes are read off the recorded shapes, so nodes that only compute sizes are not followed.
        stack.extend(source for source in node.all_input_nodes if is_tensor(source) or _is_list(source))
    return [node for node in output.graph.nodes if node in live]


def _is_list(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def _check_token_axis(model: onnx.ModelProto) -> None:
    """At most one dimension of a value is symbolic, and it is T or N: anything else mixes tokens or heads."""
    for value in [*model.graph.value_info, *model.graph.output]:
        symbols = [dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param]
        if len(symbols) > 1 or any(symbol not in (ops.TOKENS, ops.ROWS) for symbol in symbols):
            raise UnsupportedModelError(
                f"'{value.name}' has the shape {symbols}: the model compares tokens with tokens outside its "
                f"attention function (attention written out in the model code, for instance), which cannot "
                f"be cached or batched"
            )
