"""RMSNorm and LayerNorm, per row or per run of columns, alone or with the residual add in front."""

from __future__ import annotations

from ..launch import Grid, KernelLaunch, Param, TritonKernel, row_stride, value, weight
from ..reading import as_rows, is_norm_of_rows, norm_group
from ..tactic import Call, Context, Dims, Lowering, Op, Operand, Tactic, View, WeightUse, bandwidth_cost
from .kernels.norm import norm
from .reference_ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .types import blocks_over, count, next_power_of_two, pointer

#: Elements of a block: short runs share one, so that a warp has work for more than one instruction.
_BLOCK_ELEMENTS = 1024


def _launch(
    op: Op, x: str, y: Operand, total: Operand | None, rows: Dims, group: int, center: bool
) -> tuple[KernelLaunch, list[WeightUse]]:
    """The launch over ``x`` [R, C], and the weights it uses. What is absent gets the address of y."""
    residual = op.required(1) if total is not None else None
    first = 2 if residual is not None else 1
    scale, bias = op.input(first), op.input(first + 1) if center else None
    uses = [WeightUse((w.name,), "vector") for w in (scale, bias) if w is not None]
    nothing = (pointer(y.dtype), value(y.name))
    added, sums = residual or y, total or y
    arguments: dict[str, tuple[str, Param]] = {
        "x": (pointer(op.required(0).dtype), value(x)),
        "residual": (pointer(added.dtype), value(added.name)),
        "weight": nothing if scale is None else ("*fp32", weight(0)),
        "bias": nothing if bias is None else ("*fp32", weight(len(uses) - 1)),
        "y": nothing,
        "total": (pointer(sums.dtype), value(sums.name)),
        "rows": ("i32", count(rows[0])),
        "x_stride": ("i32", row_stride(x)),
        "residual_stride": ("i32", row_stride(added.name)),
        "eps": ("fp32", Param("f32", float(op.attrs["eps"]))),
    }
    block = next_power_of_two(group)
    block_rows = max(1, min(16, _BLOCK_ELEMENTS // block))
    groups = int(rows[1]) // group
    constants = {
        "GROUPS": groups,
        "WIDTH": group,
        "BLOCK_ROWS": block_rows,
        "BLOCK": block,
        "CENTER": center,
        "HAS_WEIGHT": scale is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
    }
    # Eight elements a thread are two 16-byte loads of float32; long rows take up to 16 warps.
    warps = max(1, min(16, block * block_rows // (32 * 8)))
    kernel = TritonKernel(
        norm, {name: kind for name, (kind, _) in arguments.items()}, constants, num_warps=warps, num_stages=1
    )
    grid = (blocks_over(rows[0], block_rows), Grid(times=groups))
    return KernelLaunch(kernel, grid, tuple(param for _, param in arguments.values())), uses


def _norm_fits(op: Op, context: Context) -> bool:
    return is_norm_of_rows(op)


def _norm(name: str, center: bool) -> Tactic:
    def lower(op: Op, context: Context) -> Lowering:
        x, y = op.required(0), op.outputs[0]
        rows = as_rows(x.shape)
        assert rows is not None
        if rows == x.shape:
            launch, uses = _launch(op, x.name, y, None, rows, norm_group(op), center)
            call = Call(name, [x.name], [y.name], uses, {}, (launch,), takes_views=True)
            return Lowering((call,))
        flat, normed = f"{x.name}.as_rows.{y.name}", Operand(f"{y.name}.as_rows", rows, y.dtype)
        launch, uses = _launch(op, flat, normed, None, rows, norm_group(op), center)
        call = Call(name, [flat], [normed.name], uses, {}, (launch,))
        return Lowering((View(flat, x.name, rows), call, View(y.name, normed.name, y.shape)), (normed,))

    kind = "castiron.LayerNorm" if center else "castiron.RMSNorm"
    reference = layer_norm if center else rms_norm
    return Tactic(f"cuda.{name}", kind, "cuda", _norm_fits, lower, bandwidth_cost, reference)


def _add_norm(name: str, center: bool) -> Tactic:
    def accepts(op: Op, context: Context) -> bool:
        x, residual = op.required(0), op.required(1)
        return len(x.shape) == 2 and x.shape == residual.shape and isinstance(x.shape[1], int)

    def lower(op: Op, context: Context) -> Lowering:
        x, residual = op.required(0), op.required(1)
        y, total = op.outputs
        launch, uses = _launch(op, x.name, y, total, x.shape, int(x.shape[1]), center)
        call = Call(
            name,
            [x.name, residual.name],
            [y.name, total.name],
            uses,
            {},
            (launch,),
            takes_views=True,
            in_place=((0, 0), (1, 1)),
        )
        return Lowering((call,))

    kind = "castiron.AddLayerNorm" if center else "castiron.AddRMSNorm"
    reference = add_layer_norm if center else add_rms_norm
    return Tactic(f"cuda.{name}", kind, "cuda", accepts, lower, bandwidth_cost, reference)


TACTICS = (
    _norm("rms_norm", center=False),
    _norm("layer_norm", center=True),
    _add_norm("add_rms_norm", center=False),
    _add_norm("add_layer_norm", center=True),
)
