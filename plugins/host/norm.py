"""RMSNorm and LayerNorm, per row or per run of columns, alone or with the residual add in front."""

from __future__ import annotations

from ..reading import as_rows, is_norm_of_rows, norm_group
from ..tactic import Attr, Context, Lowering, Op, Operand, Tactic, View, WeightUse, bandwidth_cost
from .kernels import host_call


def _norm_fits(op: Op, context: Context) -> bool:
    return is_norm_of_rows(op)


def _norm(kernel: str, has_bias: bool) -> Tactic:
    kind = "castiron.LayerNorm" if has_bias else "castiron.RMSNorm"

    def lower(op: Op, context: Context) -> Lowering:
        x, y = op.required(0), op.outputs[0]
        rows = as_rows(x.shape)
        assert rows is not None
        attrs: dict[str, Attr] = {"eps": float(op.attrs["eps"]), "group": norm_group(op)}
        weights = _affine(op, 1, attrs, has_bias)
        if rows == x.shape:
            return Lowering((host_call(kernel, [x.name], [y.name], weights, attrs),))
        flat, normed = f"{x.name}.as_rows.{y.name}", f"{y.name}.as_rows"
        return Lowering(
            (
                View(flat, x.name, rows),
                host_call(kernel, [flat], [normed], weights, attrs),
                View(y.name, normed, y.shape),
            ),
            (Operand(normed, rows),),
        )

    return Tactic(f"host.{kernel}", kind, "host", _norm_fits, lower, bandwidth_cost)


def _add_norm(kernel: str, has_bias: bool) -> Tactic:
    kind = "castiron.AddLayerNorm" if has_bias else "castiron.AddRMSNorm"

    def accepts(op: Op, context: Context) -> bool:
        return len(op.required(0).shape) == 2 and op.required(0).shape == op.required(1).shape

    def lower(op: Op, context: Context) -> Lowering:
        attrs: dict[str, Attr] = {"eps": float(op.attrs["eps"])}
        weights = _affine(op, 2, attrs, has_bias)
        inputs = [op.required(0).name, op.required(1).name]
        return Lowering((host_call(kernel, inputs, [o.name for o in op.outputs], weights, attrs),))

    return Tactic(f"host.{kernel}", kind, "host", accepts, lower, bandwidth_cost)


def _affine(op: Op, first: int, attrs: dict[str, Attr], has_bias: bool) -> list[WeightUse]:
    weight, bias = op.input(first), op.input(first + 1)
    attrs["has_weight"] = weight is not None
    if has_bias:
        attrs["has_bias"] = bias is not None
    return [WeightUse((w.name,), "vector") for w in (weight, bias) if w is not None]


TACTICS = (
    _norm("rms_norm", has_bias=False),
    _norm("layer_norm", has_bias=True),
    _add_norm("add_rms_norm", has_bias=False),
    _add_norm("add_layer_norm", has_bias=True),
)
