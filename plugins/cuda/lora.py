"""The launches that add LoRA adapters to a product's result or sums."""

from __future__ import annotations

from ...engines.symbols import LORA_TILE
from ..launch import Grid, KernelLaunch, Param, TritonKernel, adapter, row_stride, step_input, value
from ..tactic import Context, LoraPlace, Operand
from .kernels.lora import lora_expand, lora_shrink
from .types import pointer

#: Inputs that one block sums up. A constant, so that a row's sums are the same in any step.
_PART = 1024
_BLOCK_N = 128
_WARPS = 4


def lora_launches(
    x: Operand, y: Operand, inputs: int, alpha: float, context: Context, place: LoraPlace
) -> tuple[tuple[KernelLaunch, KernelLaunch], Operand]:
    """y += alpha · (x · aᵀ) · bᵀ for rows with adapters, and the memory for x · aᵀ.

    ``x``: [T or N, inputs], perhaps a view. ``y``: [T or N, columns], without gaps.
    """
    of_logits = x.shape[0] == "N"
    columns = int(y.shape[1])
    rows = step_input("logit_lora_rows" if of_logits else "lora_rows")
    slots = step_input("logit_lora_slots" if of_logits else "lora_slots")
    ranks, parts = place.rank * len(place.starts), -(-inputs // _PART)
    sums = Operand(f"{y.name}.lora", ("B" if of_logits else "A", parts * LORA_TILE * ranks))
    # Columns that begin behind the last one belong to nobody.
    second, third = ((*place.starts, columns, columns))[1:3]
    half, stride = pointer(context.half), Param("i64", place.slot_bytes // 2)
    block_r = next(size for size in (64, 32, 16) if place.rank % size == 0)
    tiles = Grid("B" if of_logits else "A")
    shrink = TritonKernel(
        lora_shrink,
        {
            "x": pointer(x.dtype),
            "a": half,
            "rows": "*i32",
            "slots": "*i32",
            "sums": "*fp32",
            "x_stride": "i32",
            "inputs": "i32",
            "ranks": "i32",
            "slot_stride": "i64",
        },
        {"TILE": LORA_TILE, "BLOCK_R": 16, "BLOCK_K": 64, "PART": _PART, "WARPS": _WARPS},
        num_warps=_WARPS,
        hot=True,
    )
    expand = TritonKernel(
        lora_expand,
        {
            "sums": "*fp32",
            "b": half,
            "rows": "*i32",
            "slots": "*i32",
            "y": pointer(y.dtype),
            "columns": "i32",
            "second": "i32",
            "third": "i32",
            "inputs": "i32",
            "ranks": "i32",
            "slot_stride": "i64",
            "alpha": "fp32",
        },
        {"TILE": LORA_TILE, "RANK": place.rank, "BLOCK_R": block_r, "BLOCK_N": _BLOCK_N, "PART": _PART},
        num_warps=_WARPS,
        hot=True,
    )
    numbers = (Param("i32", inputs), Param("i32", ranks), stride)
    return (
        KernelLaunch(
            shrink,
            (tiles, Grid(times=ranks // 16), Grid(times=parts)),
            (
                *(value(x.name), adapter(place.a), rows, slots, value(sums.name), row_stride(x.name)),
                *numbers,
            ),
        ),
        KernelLaunch(
            expand,
            (tiles, Grid(times=-(-columns // _BLOCK_N))),
            (
                *(value(sums.name), adapter(place.b), rows, slots, value(y.name), Param("i32", columns)),
                *(Param("i32", second), Param("i32", third), *numbers, Param("f32", alpha)),
            ),
        ),
    ), sums
