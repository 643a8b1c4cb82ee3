"""What kernels of quantized products are given: weights by role, x as its form reads it, and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..launch import Param, row_stride, value, weight
from ..reading import matrices
from ..tactic import Context, Op, Operand, WeightUse
from .products import Arguments
from .quantize import RoundedInput
from .quantized_form import QuantizedForm
from .types import next_power_of_two, pointer


@dataclass(frozen=True)
class QuantizedOperands:
    """Of one product. ``uses``: the weights by role, in the call's order."""

    context: Context
    form: QuantizedForm
    x: RoundedInput
    uses: Mapping[str, WeightUse]

    def constants(self, scales: str) -> dict[str, Any]:
        """How weights and x are coded, with the weights' scales applied as ``scales`` says."""
        form = self.form
        # One group is as good as the next power of two: kernels cut steps at powers of two.
        whole = next_power_of_two(form.inputs)
        return {
            "K": form.inputs,
            "GROUP": whole if form.group == form.inputs else form.group,
            "X_GROUP": form.x_group or whole,
            "MATH": form.math,
            "FORMAT": form.quant.format,
            "SCALES": scales,
            "X_SCALES": form.x_scales,
            "HAS_OFFSETS": form.quant.has_offset,
            "HALF": self.context.half,
        }

    def arguments(self, y: Operand) -> Arguments:
        """x, its scales, and the weights. What is absent gets the address of ``y``: it is not read."""
        nothing = (pointer(y.dtype), value(y.name))
        x, x_scales = self.x.x, self.x.scales
        scales = self._weight("scales", pointer(self.form.quant.scale_dtype), nothing)
        rows = self._weight("row_scales", "*fp32", scales)
        stride = row_stride(x.name) if len(x.shape) == 2 else Param("i32", int(x.shape[-1]))
        return {
            "x": (pointer(x.dtype), value(x.name)),
            "x_scales": nothing if x_scales is None else ("*fp32", value(x_scales.name)),
            "codes": self._weight("codes", self._codes_type, nothing),
            "scales": self._weight("block_scales", "*u8", scales),
            "row_scales": rows,
            "offsets": self._weight("offsets", "*fp32", nothing),
            "bias": self._weight("vector", "*fp32", nothing),
            "x_stride": ("i32", stride),
            "x_scale": ("fp32", Param("f32", self._x_scale)),
        }

    def _weight(self, role: str, kind: str, absent: tuple[str, Param]) -> tuple[str, Param]:
        return (kind, weight(list(self.uses).index(role))) if role in self.uses else absent

    @property
    def _codes_type(self) -> str:
        if self.form.packed:
            return "*u32"
        if self.form.quant.format == "int8":
            return "*i8"
        # Before sm_89 there are no conversions of float8: kernels take the bytes.
        return "*fp8e4nv" if self.context.target.compute_capability >= 89 else "*u8"

    @property
    def _x_scale(self) -> float:
        """The static scale of x, where the numbers that the product reads lack it."""
        form = self.form
        lacks = form.x_storage in ("codes", "values") or form.x_format == "nvfp4"
        return form.x_scale if lacks and form.x_scale else 1.0


def weight_uses(op: Op, form: QuantizedForm, biases: tuple[Operand, ...]) -> dict[str, WeightUse]:
    """The weights that a product reads, by role."""
    parts = tuple(operand.name for operand in matrices(op))
    uses = {"codes": WeightUse(parts, "codes")}
    if form.scales in ("e4m3", "e8m0"):
        uses["block_scales"] = WeightUse(parts, "block_scales")
        if form.scales == "e4m3":
            uses["row_scales"] = WeightUse(parts, "row_scales")
    else:
        uses["scales"] = WeightUse(parts, "scales")
    if form.quant.has_offset:
        uses["offsets"] = WeightUse(parts, "offsets")
    if biases:
        uses["vector"] = WeightUse(tuple(bias.name for bias in biases), "vector")
    return uses
