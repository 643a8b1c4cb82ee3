"""The quantization plan enters the graph: weights become Dequantize(Quantize(w)), products round their x."""

from __future__ import annotations

from typing import Any

from castiron.errors import BuildError

from ..ops import MATRICES
from ..quant_plan import LinearPlan, TensorRef
from ..weights.formats import CODE_DTYPES
from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    optional_input,
    producer,
    shape_of,
)

#: Products as they are before any are fused: each has one matrix.
_PRODUCTS = ("Linear", "ExpertLinear")


def quantize_linears(rewriter: Rewriter, ctx: PassContext) -> int:
    """Apply ``ctx.quantization`` to every product that it names; returns how many.

    Runs before weights are rearranged, so that scales belong to rows and columns as the model has them.
    """
    plans = ctx.quantization.linears
    if not plans:
        return 0
    used: set[str] = set()
    scaled: dict[tuple[int, str], Tensor] = {}
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op not in _PRODUCTS or node.domain != CASTIRON:
            continue
        weight = node.inputs[MATRICES[node.op].start]
        # Of experts the parameter, which reshapes that cancel have taken out of the expression
        known = [node.attrs.get("source", ""), *_weight_names(weight)]
        name = next((name for name in known if name in plans), None)
        if name is not None:
            _apply(rewriter, node, name, plans[name], scaled)
            used.add(name)
            applied += 1
    missing = sorted(plans.keys() - used)
    if missing:
        raise BuildError(
            f"the quantization plan names {len(missing)} weights that no product of the graph reads: "
            f"{', '.join(missing[:3])}"
        )
    rewriter.tidy()
    return applied


def _weight_names(weight: Tensor) -> list[str]:
    """Names of the values that a weight expression consists of, its own first."""
    names, stack = [], [weight]
    while stack:
        tensor = stack.pop(0)
        names.append(tensor.name)
        node = producer(tensor)
        if node is not None:
            stack.extend(t for t in node.inputs if not t.is_empty())
    return names


def _apply(
    rewriter: Rewriter,
    node: Node,
    name: str,
    plan: LinearPlan,
    scaled: dict[tuple[int, str], Tensor],
) -> None:
    if plan.x_format:
        node.attrs.update(x_format=plan.x_format, x_group=plan.x_group, x_scale=float(plan.x_scale))
    matrix = MATRICES[node.op].start
    if plan.output_scale is not None:
        bias = optional_input(node, matrix + 1)
        if bias is not None:
            factor = rewriter.stored(plan.output_scale)
            wide = rewriter.float32(bias)
            node.inputs[matrix + 1] = rewriter.op(
                "Mul", [wide, factor], shape_of(bias), hint=f"{bias.name}.scaled"
            )
    if plan.format is not None:
        node.inputs[matrix] = _quantized(rewriter, node.inputs[matrix], name, plan)
    if plan.input_scale is not None and not plan.input_is_scaled:
        x = node.inputs[0]
        key = (id(x), plan.input_scale.name)
        if key not in scaled:
            factor = rewriter.stored(plan.input_scale)
            scaled[key] = rewriter.op("Mul", [x, factor], shape_of(x), hint=f"{x.name}.scaled")
        node.inputs[0] = scaled[key]


def _quantized(rewriter: Rewriter, weight: Tensor, name: str, plan: LinearPlan) -> Tensor:
    if plan.scale is None or plan.format is None:
        raise BuildError(f"the quantization plan of {weight.name!r} has no scale")
    shape = [int(size) for size in shape_of(weight)]
    _check_shapes(weight.name, shape, plan)
    attrs: dict[str, Any] = {"format": plan.format, "group": plan.group}
    scales: list[Tensor | None] = [
        None if ref is None else rewriter.float32(rewriter.stored(ref)) for ref in (plan.scale, plan.offset)
    ]
    if plan.codes is not None:
        codes = rewriter.stored(plan.codes)
    else:
        codes = _rounded(rewriter, weight, plan, scales, attrs)
    hint = f"{weight.name}.{plan.format}"
    if plan.input_scale is None and plan.output_scale is None:
        attrs["source"] = name
    return rewriter.op("Dequantize", [codes, *scales], shape, attrs=attrs, domain=CASTIRON, hint=hint)


def _rounded(
    rewriter: Rewriter, weight: Tensor, plan: LinearPlan, scales: list[Tensor | None], attrs: dict[str, Any]
) -> Tensor:
    shape, hint = [int(size) for size in shape_of(weight)], weight.name
    if plan.output_scale is not None:
        rows = rewriter.reshape(rewriter.stored(plan.output_scale), [shape[0], 1], "output_scale")
        weight = rewriter.op("Mul", [rewriter.float32(weight), rows], shape, hint=f"{hint}.rows")
    if plan.input_scale is not None:
        columns = rewriter.stored(plan.input_scale)
        weight = rewriter.op("Div", [rewriter.float32(weight), columns], shape, hint=f"{hint}.columns")
    assert plan.format is not None
    return rewriter.op(
        "Quantize",
        [weight, *scales],
        shape,
        attrs=dict(attrs),
        domain=CASTIRON,
        dtype=CODE_DTYPES[plan.format],
        hint=f"{hint}.codes",
    )


def _check_shapes(name: str, shape: list[int], plan: LinearPlan) -> None:
    groups = -(-shape[1] // plan.group) if plan.group else 1
    wanted: list[tuple[str, TensorRef | None, tuple[int, ...]]] = [
        ("scale", plan.scale, (shape[0], groups)),
        ("offset", plan.offset, (shape[0], groups)),
        ("codes", plan.codes, (shape[0], shape[1])),
        ("input_scale", plan.input_scale, (shape[1],)),
        ("output_scale", plan.output_scale, (shape[0],)),
    ]
    for what, ref, expected in wanted:
        if ref is not None and ref.shape != expected:
            raise BuildError(
                f"the quantization plan of {name!r} {shape} has {what} of shape {list(ref.shape)}; expected "
                f"{list(expected)}"
            )
