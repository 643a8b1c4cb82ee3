"""Calls that round x before a quantized product, or bring its columns in the order of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..launch import KernelLaunch, Param, TritonKernel, When, row_stride, value, weight
from ..tactic import Call, Context, Operand, WeightUse
from .kernels.quantize import quantize_fp4_rows, quantize_rows
from .quantized_form import QuantizedForm
from .types import blocks_for_each, next_power_of_two, pointer

#: Rows of what products read start at multiples of this many elements: 16 bytes for any type.
_ALIGNMENT = 16
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class RoundedInput:
    """x as a product reads it.

    Attributes:
        x: the numbers or codes. scales: of rows or groups, f32, or None.
        block_scales: u8, beside float4 codes.
        temporaries: what the call makes. call: None where x is read as it is.
    """

    x: Operand
    scales: Operand | None = None
    block_scales: Operand | None = None
    temporaries: tuple[Operand, ...] = ()
    call: Call | None = None


def rounded_input(
    x: Operand, y: str, form: QuantizedForm, context: Context, use: WeightUse, when: When | None = None
) -> RoundedInput:
    """What the product ``y`` reads in the place of x, in its form.

    ``use``: the weight's columns. ``when``: the row counts that it is wanted for, if not all.
    """
    if form.x_storage == "as it is" and form.quant.columns is None:
        return RoundedInput(x)
    if form.x_format in _BLOCKS:
        return float4_input(x, y, form, context, when, codes=False)
    columns = form.quant.columns is not None
    stride = -(-form.inputs // _ALIGNMENT) * _ALIGNMENT
    dtype: Literal["bf16", "f16", "f32", "i8", "f8e4m3"] = context.half
    if form.x_storage == "codes":
        dtype = "i8" if form.math == "int8" else "f8e4m3"
    out = Operand(f"{y}.x", (*x.shape[:-1], stride), dtype)
    group = (32 if form.x_format == "mxfp8" else form.x_group) or stride
    groups = -(-form.inputs // group)
    has_scales = form.x_scales != "none"
    scales = Operand(f"{y}.x_scales", (*x.shape[:-1], groups)) if has_scales else None
    stored = out if scales is None else scales
    kernel = TritonKernel(
        quantize_rows,
        {
            "x": pointer(x.dtype),
            "columns": "*i32" if columns else pointer(out.dtype),
            "codes": pointer(out.dtype),
            "scales": pointer(stored.dtype),
            "x_stride": "i32",
            "static_scale": "fp32",
        },
        {
            "K": form.inputs,
            "STRIDE": stride,
            "FORMAT": form.x_format or "none",
            "GROUP": group,
            "PADDED_GROUP": next_power_of_two(group),
            "GROUPS": groups,
            "PADDED_GROUPS": next_power_of_two(groups),
            "STATIC": form.x_scale > 0 and form.x_format != "mxfp8",
            "ROUND_ONLY": form.x_storage == "rounded",
            "HAS_COLUMNS": columns,
        },
        num_warps=_warps(form.inputs),
        num_stages=1,
    )
    args = (
        value(x.name),
        weight(0) if columns else value(out.name),
        value(out.name),
        value(stored.name),
        _stride(x),
        Param("f32", form.x_scale),
    )
    made = (out,) if scales is None else (out, scales)
    call = _call(x, made, use if columns else None, kernel, args, when)
    return RoundedInput(out, scales, None, made, call)


def float4_input(
    x: Operand,
    y: str,
    form: QuantizedForm,
    context: Context,
    when: When | None,
    *,
    codes: bool,
) -> RoundedInput:
    """x rounded to float4 in blocks: as ``codes`` with block scales, or as numbers in half precision."""
    block = _BLOCKS[form.x_format]
    blocks = -(-form.inputs // block)
    rows, label = x.shape[:-1], "fp4" if codes else "x"
    if codes:
        stride = -(-form.inputs // 32) * 16
        out = Operand(f"{y}.{label}", (*rows, stride), "u8")
    else:
        stride = -(-form.inputs // _ALIGNMENT) * _ALIGNMENT
        out = Operand(f"{y}.{label}", (*rows, stride), context.half)
    dynamic = form.x_format == "nvfp4" and form.x_scale == 0
    scales = Operand(f"{y}.{label}_scales", (*rows, 1)) if dynamic else None
    block_scales = Operand(f"{y}.{label}_blocks", (*rows, blocks), "u8") if codes else None
    stored = out if scales is None else scales
    in_blocks = out if block_scales is None else block_scales
    kernel = TritonKernel(
        quantize_fp4_rows,
        {
            "x": pointer(x.dtype),
            "codes": pointer(out.dtype),
            "block_scales": pointer(in_blocks.dtype),
            "row_scales": pointer(stored.dtype),
            "x_stride": "i32",
            "static_scale": "fp32",
        },
        {
            "K": form.inputs,
            "STRIDE": stride,
            "GROUP": block,
            "GROUPS": blocks,
            "PADDED_GROUPS": next_power_of_two(-(-stride * (2 if codes else 1) // block)),
            "STATIC": not dynamic,
            "ROUND_ONLY": not codes,
        },
        num_warps=_warps(form.inputs),
        num_stages=1,
    )
    args = (
        value(x.name),
        value(out.name),
        value(in_blocks.name),
        value(stored.name),
        _stride(x),
        Param("f32", form.x_scale or 1.0),
    )
    made = tuple(operand for operand in (out, scales, block_scales) if operand is not None)
    call = _call(x, made, None, kernel, args, when)
    return RoundedInput(out, scales, block_scales, made, call)


def _call(
    x: Operand,
    made: tuple[Operand, ...],
    columns: WeightUse | None,
    kernel: TritonKernel,
    args: tuple[Param, ...],
    when: When | None,
) -> Call:
    launch = KernelLaunch(kernel, (blocks_for_each(x.shape[:-1]),), args, when)
    outputs = [operand.name for operand in made]
    uses = () if columns is None else (columns,)
    return Call("quantize", [x.name], outputs, uses, {}, (launch,), takes_views=True)


def _stride(x: Operand) -> Param:
    """From one row to the next. Only values with two axes are views."""
    return row_stride(x.name) if len(x.shape) == 2 else Param("i32", int(x.shape[-1]))


def _warps(inputs: int) -> int:
    """Eight elements a thread, up to 16 warps."""
    return max(1, min(16, next_power_of_two(inputs) // 256))
