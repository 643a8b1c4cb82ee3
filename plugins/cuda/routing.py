"""What routers of mixtures pick: places along the last axis and numbers there; sums over picked experts."""

from __future__ import annotations

from ..launch import Grid, KernelLaunch, TritonKernel, value
from ..tactic import Call, Context, Lowering, Op, Tactic, bandwidth_cost
from . import reference_experts as reference
from .kernels import routing
from .strides import (
    BLOCK,
    describable,
    is_wide,
    product,
    sizes_of,
    symbol_count,
    symbol_of,
    walk_grid,
)
from .types import blocks_over, next_power_of_two, pointer

#: A row's passes go over registers, one for each pick.
_MOST_PICKS = 32
_WIDEST_ROW = 4096
#: Elements of a block of top_k: short rows share one.
_TOP_K_BLOCK = 512


def _top_k_fits(op: Op, context: Context) -> bool:
    x, picked = op.required(0), op.outputs[0].shape
    width, picks = x.shape[-1], picked[-1]
    return (
        op.attrs.get("axis", -1) in (-1, len(x.shape) - 1)
        and op.attrs.get("largest", 1) == 1
        and x.dtype != "i32"
        and not x.constant
        and describable(x.shape)
        and isinstance(width, int)
        and isinstance(picks, int)
        and 0 < picks <= min(width, _MOST_PICKS)
        and width <= _WIDEST_ROW
    )


def _rows(shape: tuple[int | str, ...]) -> int:
    """The code of the number of rows (strides.py)."""
    total = 1
    for size in sizes_of(shape[:-1]):
        total = product(total, size)
    return total


def _top_k(op: Op, context: Context) -> Lowering:
    x, (values, places) = op.required(0), op.outputs
    width, picks = int(x.shape[-1]), int(values.shape[-1])
    block = next_power_of_two(width)
    rows = max(1, _TOP_K_BLOCK // block)
    total, symbol = _rows(x.shape), symbol_of(x.shape)
    kernel = TritonKernel(
        routing.top_k,
        {
            "x": pointer(x.dtype),
            "values": pointer(values.dtype),
            "places": pointer(places.dtype),
            "n": "i32",
        },
        {
            "TOTAL": total,
            "WIDTH": width,
            "PICKS": picks,
            "BLOCK": block,
            "BLOCK_PICKS": next_power_of_two(picks),
            "ROWS": rows,
        },
        num_stages=1,
    )
    grid = Grid(times=-(-total // rows)) if symbol is None else blocks_over(symbol, rows, -total)
    args = (value(x.name), value(values.name), value(places.name), symbol_count(symbol))
    launch = KernelLaunch(kernel, (grid,), args)
    return Lowering((Call("top_k", [x.name], [values.name, places.name], (), {}, (launch,)),))


def _gather_fits(op: Op, context: Context) -> bool:
    x, places = op.required(0), op.required(1)
    return (
        op.attrs.get("axis", 0) in (-1, len(x.shape) - 1)
        and x.dtype != "i32"
        and places.dtype == "i32"
        and not x.constant
        and not places.constant
        and describable(x.shape, places.shape)
        and x.shape[:-1] == places.shape[:-1]
        and isinstance(x.shape[-1], int)
        and isinstance(places.shape[-1], int)
    )


def _gather(op: Op, context: Context) -> Lowering:
    x, places, y = op.required(0), op.required(1), op.outputs[0]
    width, count = int(x.shape[-1]), int(places.shape[-1])
    rows, symbol = _rows(x.shape), symbol_of(x.shape)
    total = product(rows, count)
    kernel = TritonKernel(
        routing.gather_elements,
        {"x": pointer(x.dtype), "places": "*i32", "y": pointer(y.dtype), "n": "i32"},
        {
            "TOTAL": total,
            "WIDTH": width,
            "COUNT": count,
            "BLOCK": BLOCK,
            "WIDE": is_wide(product(rows, width), context),
        },
        num_stages=1,
    )
    args = (value(x.name), value(places.name), value(y.name), symbol_count(symbol))
    launch = KernelLaunch(kernel, (walk_grid(total, symbol),), args)
    return Lowering((Call("gather_elements", [x.name, places.name], [y.name], (), {}, (launch,)),))


def _mark_fits(op: Op, context: Context) -> bool:
    places = op.required(0)
    count = places.shape[-1]
    return (
        places.dtype == "i32"
        and not places.constant
        and describable(places.shape)
        and isinstance(count, int)
        and count <= _MOST_PICKS
    )


def _mark(op: Op, context: Context) -> Lowering:
    places, y = op.required(0), op.outputs[0]
    count, width = int(places.shape[-1]), int(y.shape[-1])
    total, symbol = product(_rows(places.shape), width), symbol_of(places.shape)
    kernel = TritonKernel(
        routing.mark_places,
        {"places": "*i32", "y": pointer(y.dtype), "n": "i32"},
        {"TOTAL": total, "WIDTH": width, "COUNT": count, "BLOCK": BLOCK, "WIDE": is_wide(total, context)},
        num_stages=1,
    )
    args = (value(places.name), value(y.name), symbol_count(symbol))
    launch = KernelLaunch(kernel, (walk_grid(total, symbol),), args)
    return Lowering((Call("mark_places", [places.name], [y.name], (), {}, (launch,)),))


def _combine_fits(op: Op, context: Context) -> bool:
    outputs, weights = op.required(0), op.required(1)
    return (
        len(outputs.shape) == 3
        and not outputs.constant
        and not weights.constant
        and weights.shape == outputs.shape[:2]
        and all(isinstance(dim, int) for dim in outputs.shape[1:])
    )


def _combine(op: Op, context: Context) -> Lowering:
    outputs, weights, y = op.required(0), op.required(1), op.outputs[0]
    picks, width = int(outputs.shape[1]), int(outputs.shape[2])
    block = min(BLOCK, next_power_of_two(width))
    kernel = TritonKernel(
        routing.combine_experts,
        {"outputs": pointer(outputs.dtype), "weights": pointer(weights.dtype), "y": pointer(y.dtype)},
        {"PICKS": picks, "WIDTH": width, "BLOCK": block},
        num_stages=1,
    )
    grid = (blocks_over(outputs.shape[0], 1), Grid(times=-(-width // block)))
    launch = KernelLaunch(kernel, grid, (value(outputs.name), value(weights.name), value(y.name)))
    return Lowering((Call("combine_experts", [outputs.name, weights.name], [y.name], (), {}, (launch,)),))


TACTICS = (
    Tactic("cuda.top_k", "TopK", "cuda", _top_k_fits, _top_k, bandwidth_cost, reference.top_k),
    Tactic(
        "cuda.gather_elements",
        "GatherElements",
        "cuda",
        _gather_fits,
        _gather,
        bandwidth_cost,
        reference.gather_elements,
    ),
    Tactic(
        "cuda.mark_places",
        "castiron.MarkPlaces",
        "cuda",
        _mark_fits,
        _mark,
        bandwidth_cost,
        reference.mark_places,
    ),
    Tactic(
        "cuda.combine_experts",
        "castiron.CombineExperts",
        "cuda",
        _combine_fits,
        _combine,
        bandwidth_cost,
        reference.combine_experts,
    ),
)
