"""What Linear and GatedLinear ask of a kernel besides the product, whatever the weights are stored as."""

from __future__ import annotations

from dataclasses import dataclass

from ..tactic import Attr, Op, WeightUse


@dataclass(frozen=True)
class Epilogue:
    """``inputs`` go behind x, ``weights`` behind the matrices'."""

    inputs: list[str]
    weights: list[WeightUse]
    attrs: dict[str, Attr]


def linear_epilogue(op: Op) -> Epilogue:
    """Of a Linear: y = alpha · act(x·wᵀ + bias) + residual (docs/program.md)."""
    bias, residual = op.input(2), op.input(3)
    return Epilogue(
        [] if residual is None else [residual.name],
        [] if bias is None else [WeightUse((bias.name,), "vector")],
        {
            "has_bias": bias is not None,
            "has_residual": residual is not None,
            "activation": str(op.attrs.get("activation", "none")),
            "alpha": float(op.attrs.get("alpha", 1.0)),
        },
    )


def gated_epilogue(op: Op) -> Epilogue:
    """Of a GatedLinear, whose biases come in pairs."""
    gate, up = op.input(3), op.input(4)
    biases = [] if gate is None or up is None else [WeightUse((gate.name, up.name), "vector")]
    return Epilogue([], biases, {"has_bias": bool(biases), "activation": str(op.attrs["activation"])})
