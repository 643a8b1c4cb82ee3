"""Data movement: column views, reshapes, and the copies that remain (Transpose, Slice, Concat, ...)."""

from __future__ import annotations

from collections.abc import Sequence

from ..launch import KernelLaunch, Param, TritonKernel, row_stride, value
from ..reading import first_column, slice_bounds
from ..tactic import Call, Context, Dims, Lowering, Op, Operand, Tactic, View, bandwidth_cost
from . import reference_ops as reference
from .kernels.generic import move
from .strides import (
    BLOCK,
    Box,
    Codes,
    box,
    broadcast_strides,
    describable,
    is_wide,
    product,
    sizes_of,
    strides_of,
    symbol_count,
    symbol_of,
    walk_grid,
)
from .types import pointer


def _move(
    x: Operand,
    y: Operand,
    shape: Dims,
    x_strides: Codes,
    y_strides: Codes,
    context: Context,
    x_offset: int = 0,
    y_offset: int = 0,
) -> KernelLaunch:
    """Copy a box of ``shape``; strides and offsets are codes, in elements."""
    walk = box(sizes_of(shape), x_strides, y_strides)
    constants = _constants(walk, context) | {"X_OFFSET": x_offset, "Y_OFFSET": y_offset}
    return _launch(x, y, constants, Param("i32", 0), symbol_of(shape, x.shape, y.shape))


def _constants(walk: Box, context: Context) -> dict[str, object]:
    return {
        "RANK": len(walk.sizes),
        "SIZES": walk.sizes,
        "X_STRIDES": walk.strides[0],
        "Y_STRIDES": walk.strides[1],
        "X_OFFSET": 0,
        "Y_OFFSET": 0,
        "TOTAL": walk.total,
        "X_IS_ROWS": False,
        "BLOCK": BLOCK,
        "WIDE": is_wide(walk.total, context),
    }


def _launch(
    x: Operand, y: Operand, constants: dict[str, object], stride: Param, symbol: str | None
) -> KernelLaunch:
    types = {"x": pointer(x.dtype), "y": pointer(y.dtype), "n": "i32", "row_stride": "i32"}
    kernel = TritonKernel(move, types, constants, num_stages=1)
    total = constants["TOTAL"]
    assert isinstance(total, int)
    args = (value(x.name), value(y.name), symbol_count(symbol), stride)
    return KernelLaunch(kernel, (walk_grid(total, symbol),), args)


def _copy(op: Op, context: Context) -> Lowering:
    """The same numbers in another shape or type; a two-dimensional input may be a column view."""
    x, y = op.required(0), op.outputs[0]
    sizes = sizes_of(x.shape)
    contiguous = strides_of(sizes)
    if len(sizes) != 2:
        launch = _move(x, y, x.shape, contiguous, contiguous, context)
        # Only two-dimensional values can be views: this one is whole.
        return Lowering((Call("copy", [x.name], [y.name], (), {}, (launch,), takes_views=True),))
    walk = Box(sizes, (contiguous, contiguous), product(sizes[0], sizes[1]))
    constants = _constants(walk, context) | {"X_IS_ROWS": True}
    launch = _launch(x, y, constants, row_stride(x.name), symbol_of(x.shape))
    return Lowering((Call("copy", [x.name], [y.name], (), {}, (launch,), takes_views=True),))


def _copy_fits(op: Op, context: Context) -> bool:
    return not op.required(0).constant and describable(op.required(0).shape, op.outputs[0].shape)


def _same_bytes(op: Op, context: Context) -> Lowering:
    return Lowering((View(op.outputs[0].name, op.required(0).name, op.outputs[0].shape),))


def _any(op: Op, context: Context) -> bool:
    return not op.required(0).constant


def _moves(op: Op, context: Context) -> bool:
    operands = [o for o in (*op.inputs[:1], *op.outputs) if o is not None]
    return _any(op, context) and describable(*(o.shape for o in operands))


def _transpose(op: Op, context: Context) -> Lowering:
    x, y = op.required(0), op.outputs[0]
    perm = [int(p) for p in op.attrs.get("perm", range(len(x.shape))[::-1])]
    strides = strides_of(sizes_of(x.shape))
    permuted = tuple(strides[axis] for axis in perm)
    launch = _move(x, y, y.shape, permuted, strides_of(sizes_of(y.shape)), context)
    return Lowering((Call("transpose", [x.name], [y.name], (), {"perm": perm}, (launch,)),))


def _cut(x: Operand, y: Operand, bounds: list[tuple[int, int, int]], context: Context) -> Call | View:
    """Part of x: a view where it is a run of columns, else one copy."""
    column = first_column(x.shape, bounds)
    if column is not None:
        return View(y.name, x.name, y.shape, column)
    strides = list(strides_of(sizes_of(x.shape)))
    offsets = [product(start, strides[axis]) for axis, start, _ in bounds]
    for axis, _, step in bounds:
        strides[axis] = product(step, strides[axis])
    # Starts before and behind the symbolic axis differ in kind; only like ones add up to one code.
    scaled = [offset for offset in offsets if offset < 0]
    fixed = [offset for offset in offsets if offset > 0]
    assert not (scaled and fixed), "accepts() lets through cuts on one side of the symbolic axis only"
    y_strides = strides_of(sizes_of(y.shape))
    launch = _move(x, y, y.shape, tuple(strides), y_strides, context, sum(scaled) + sum(fixed))
    return Call("slice", [x.name], [y.name], (), {}, (launch,))


def _one_sided(shape: Dims, axes: Sequence[int]) -> bool:
    """Whether all axes lie before the symbolic one, or all behind it."""
    symbolic = [axis for axis, dim in enumerate(shape) if isinstance(dim, str)]
    return not symbolic or len({axis < symbolic[0] for axis in axes}) <= 1


def _slice(op: Op, context: Context) -> Lowering:
    bounds = slice_bounds(op)
    assert bounds is not None
    return Lowering((_cut(op.required(0), op.outputs[0], bounds, context),))


def _slice_fits(op: Op, context: Context) -> bool:
    bounds = slice_bounds(op)
    if bounds is None or not _moves(op, context):
        return False
    return _one_sided(op.required(0).shape, [axis for axis, start, _ in bounds if start])


def _split(op: Op, context: Context) -> Lowering:
    x = op.required(0)
    axis = int(op.attrs.get("axis", 0)) % len(x.shape)
    start = 0
    actions: list[Call | View] = []
    for output in op.outputs:
        actions.append(_cut(x, output, [(axis, start, 1)], context))
        start += int(output.shape[axis])
    return Lowering(tuple(actions))


def _split_fits(op: Op, context: Context) -> bool:
    axis = int(op.attrs.get("axis", 0)) % len(op.required(0).shape)
    return _moves(op, context) and all(isinstance(o.shape[axis], int) for o in op.outputs)


def _concat(op: Op, context: Context) -> Lowering:
    """One launch for each input, into its part of the output."""
    y = op.outputs[0]
    axis = int(op.attrs["axis"]) % len(y.shape)
    y_strides = strides_of(sizes_of(y.shape))
    inputs = [o for o in op.inputs if o is not None]
    launches, start = [], 0
    for x in inputs:
        own = strides_of(sizes_of(x.shape))
        launches.append(
            _move(x, y, x.shape, own, y_strides, context, y_offset=product(start, y_strides[axis]))
        )
        start += int(x.shape[axis]) if isinstance(x.shape[axis], int) else 0
    names = [x.name for x in inputs]
    return Lowering((Call("concat", names, [y.name], (), {"axis": axis}, tuple(launches)),))


def _concat_fits(op: Op, context: Context) -> bool:
    operands = [o for o in op.inputs if o is not None]
    axis = int(op.attrs["axis"]) % len(op.outputs[0].shape)
    return (
        len(operands) == len(op.inputs)
        and not any(o.constant for o in operands)
        and describable(op.outputs[0].shape, *(o.shape for o in operands))
        and all(isinstance(o.shape[axis], int) for o in operands)
    )


def _expand(op: Op, context: Context) -> Lowering:
    x, y = op.required(0), op.outputs[0]
    launch = _move(x, y, y.shape, broadcast_strides(x.shape, y.shape), strides_of(sizes_of(y.shape)), context)
    return Lowering((Call("expand", [x.name], [y.name], (), {}, (launch,)),))


def _free(op: Op, context: Context, tokens: int) -> float:
    return 0.0


TACTICS = (
    Tactic("cuda.copy", "castiron.Copy", "cuda", _copy_fits, _copy, bandwidth_cost, reference.same),
    Tactic("cuda.reshape", "Reshape", "cuda", _any, _same_bytes, _free, reference.same),
    Tactic("cuda.identity", "Identity", "cuda", _any, _same_bytes, _free, reference.same),
    Tactic("cuda.transpose", "Transpose", "cuda", _moves, _transpose, bandwidth_cost, reference.transpose),
    Tactic("cuda.slice", "Slice", "cuda", _slice_fits, _slice, bandwidth_cost, reference.cut),
    Tactic("cuda.split", "Split", "cuda", _split_fits, _split, bandwidth_cost, reference.split),
    Tactic("cuda.concat", "Concat", "cuda", _concat_fits, _concat, bandwidth_cost, reference.concat),
    Tactic("cuda.expand", "Expand", "cuda", _moves, _expand, bandwidth_cost, reference.expand),
)
