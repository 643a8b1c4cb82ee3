"""In-place ops rewritten as ordinary ones, so that every node has one value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from castiron.errors import UnsupportedModelError


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops. Refuses one that changes buffers: state between steps.

    Model code mostly changes values in place that it has just computed; that is a local rewrite. What is not
    so plain goes through torch's functionalisation, which costs as much as the trace did.
    """
    if not all(_rewrite(node) for node in list(program.graph.nodes) if _is_in_place(node)):
        program = program.run_decompositions({})
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise UnsupportedModelError(
                f"the model changes its buffer '{spec.target}' while it runs; the graph has no such state"
            )
    return program


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _is_in_place(node: fx.Node) -> bool:
    return bool(getattr(_schema(node), "is_mutable", False))


def _shares_memory(node: fx.Node) -> bool:
    """Whether the node's result may be a view of something else; inputs and unknown ops count as such."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _shares_memory(node.args[0])  # one of several results
    schema = _schema(node)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _rewrite(node: fx.Node) -> bool:
    """Makes ``node`` out of place if its operand is a value of its own that no view refers to."""
    operand = node.args[0] if node.args else None
    if not isinstance(operand, fx.Node) or _shares_memory(operand):
        return False
    order = {other: place for place, other in enumerate(node.graph.nodes)}
    earlier = [user for user in operand.users if order[user] < order[node]]
    if any(_shares_memory(user) for user in earlier):
        return False
    name, overload = str(node.target).removeprefix("aten.").split(".")
    target = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)
    if target is None or not name.endswith("_"):
        return False
    later = {user for user in operand.users if order[user] > order[node]}
    operand.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    node.target = target
    return True
